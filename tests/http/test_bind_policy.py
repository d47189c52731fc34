"""The server accepts remote clients only with keys or an explicit option."""

from typing import Any

import pytest

from app.core.errors import AppError
from app.core.settings import Settings
from app.http.bind_policy import check_bind_policy, is_loopback

LOOPBACK = ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1", "::ffff:127.0.0.1"]
OPEN = ["0.0.0.0", "::", "", "192.168.1.7", "fd00::1", "mac.local", "localhost.evil.example"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_no_keys(host: str):
    assert is_loopback(host)
    for has_keys in (True, False):
        assert check_bind_policy(Settings(host=host), has_keys=has_keys) == ()


@pytest.mark.parametrize("host", OPEN)
def test_other_addresses_need_keys_and_the_error_names_both_options(host: str):
    assert not is_loopback(host)
    with pytest.raises(AppError) as caught:
        check_bind_policy(Settings(host=host), has_keys=False)
    message = caught.value.message
    assert "--api-keys" in message
    assert "--allow-anyone" in message
    assert "\n" not in message


@pytest.mark.parametrize("host", OPEN)
def test_other_addresses_are_allowed_with_allow_anyone_and_a_warning(host: str):
    [warning] = check_bind_policy(Settings(host=host, allow_anyone=True), has_keys=False)
    assert "anyone who can reach it can use it" in warning


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, True), ({"tls_cert": "c.pem", "tls_key": "k.pem"}, False)],
)
def test_keys_without_tls_give_a_warning(settings: dict[str, Any], expected: bool):
    warnings = check_bind_policy(Settings(host="0.0.0.0", **settings), has_keys=True)
    assert any("without TLS" in line for line in warnings) is expected


@pytest.mark.parametrize("name", ["llm.example.org", ".example.org", "server"])
def test_a_public_host_name_needs_keys(name: str):
    """Behind a proxy, every client counted as a local user, who may also unload models."""
    settings: dict[str, Any] = {"allowed_hosts": ("localhost", name)}
    with pytest.raises(
        AppError, match=f"--allowed-host {name} without API keys lets anyone"
    ) as caught:
        check_bind_policy(Settings(**settings), has_keys=False)
    assert caught.value.param == "allowed_hosts"
    assert "--api-keys FILE, or pass --allow-anyone" in caught.value.message
    assert check_bind_policy(Settings(**settings), has_keys=True) == ()
    [warning] = check_bind_policy(Settings(**settings, allow_anyone=True), has_keys=False)
    assert (
        warning
        == f"accepting requests for {name} without API keys: anyone who can reach it can use it"
    )


def test_a_local_host_name_needs_no_keys():
    settings: dict[str, Any] = {"allowed_hosts": ("localhost",)}
    assert check_bind_policy(Settings(**settings), has_keys=False) == ()


def test_cors_for_all_origins_needs_keys_or_allow_anyone():
    settings: dict[str, Any] = {"cors_origins": ("*",)}
    with pytest.raises(AppError, match="any web page"):
        check_bind_policy(Settings(**settings), has_keys=False)
    assert check_bind_policy(Settings(**settings), has_keys=True) == ()
    assert check_bind_policy(Settings(**settings, allow_anyone=True), has_keys=False) == ()
