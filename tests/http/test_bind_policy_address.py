"""A used port or a foreign address gives an error of one line."""

import socket

import pytest

from app.core.errors import AppError
from app.http.bind_policy import check_bind_address
from tests.ports import find_free_port


def get_error(host: str, port: int) -> AppError:
    with pytest.raises(AppError) as caught:
        check_bind_address(host, port)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_free_port_is_accepted(host: str):
    check_bind_address(host, find_free_port())
    check_bind_address(host, 0)


@pytest.mark.parametrize(
    ("host", "other"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("", "0.0.0.0")]
)
def test_the_error_of_a_used_port_names_the_option(host: str, other: str):
    with socket.create_server((other, 0)) as taken:
        port = taken.getsockname()[1]
        error = get_error(host, port)
    assert "cannot listen on " in error.message
    assert f":{port}: the port is in use" in error.message
    assert "--port" in error.message
    assert error.param == "port"


def test_a_port_in_time_wait_is_free():
    """The last connections of an ended server may still be in TIME_WAIT."""
    address = ("127.0.0.1", find_free_port())
    with socket.create_server(address) as listener:
        client = socket.create_connection(address)
        connection, _ = listener.accept()
        connection.close()
        assert client.recv(1) == b""
        client.close()
    check_bind_address(*address)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.name.invalid", "a" * 70, "1.2.3.4.5"])
def test_the_error_of_a_foreign_address_names_it(host: str):
    error = get_error(host, 0)
    assert host[:9] in error.message
    assert error.param == "host"
