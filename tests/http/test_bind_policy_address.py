"""A port that is taken, or an address that is not ours, is told in one line."""

import socket
import time

import pytest

from app.core.errors import AppError
from app.http.bind_policy import check_bind_address


def refusal(host: str, port: int) -> AppError:
    with pytest.raises(AppError) as caught:
        check_bind_address(host, port)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_port_that_is_free_may_be_had(host: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    check_bind_address(host, port)
    check_bind_address(host, 0)


@pytest.mark.parametrize(
    ("host", "other"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("", "0.0.0.0")]
)
def test_a_port_that_is_taken_is_named_with_the_way_out(host: str, other: str):
    with socket.create_server((other, 0)) as taken:
        port = taken.getsockname()[1]
        refused = refusal(host, port)
    assert "cannot listen on " in refused.message
    assert f":{port}: the port is in use" in refused.message
    assert "--port" in refused.message
    assert refused.param == "port"


def test_a_port_whose_server_has_just_ended_is_free():
    """Its last connections may still be on their way out (TIME_WAIT)."""
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = ended.getsockname()
        client = socket.create_connection(address)
        served, _ = ended.accept()
        served.close()
        time.sleep(0.05)
        client.close()
    check_bind_address(*address)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.name.invalid", "a" * 70, "1.2.3.4.5"])
def test_an_address_that_is_not_ours_is_named(host: str):
    refused = refusal(host, 0)
    assert host[:9] in refused.message
    assert refused.param == "host"
