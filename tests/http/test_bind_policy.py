"""Nobody serves strangers without having said so."""

from typing import Any

import pytest

from app.core.errors import AppError
from app.core.settings import Settings
from app.http.bind_policy import check_bind_policy, is_loopback

LOOPBACK = ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1", "::ffff:127.0.0.1"]
OPEN = ["0.0.0.0", "::", "", "192.168.1.7", "fd00::1", "mac.local", "localhost.evil.example"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_nothing(host: str):
    assert is_loopback(host)
    for has_keys in (True, False):
        assert check_bind_policy(Settings(host=host), has_keys=has_keys) == ()


@pytest.mark.parametrize("host", OPEN)
def test_elsewhere_is_refused_without_keys_and_the_refusal_names_both_ways_out(host: str):
    assert not is_loopback(host)
    with pytest.raises(AppError) as caught:
        check_bind_policy(Settings(host=host), has_keys=False)
    told = caught.value.message
    assert "--api-keys" in told
    assert "--allow-anyone" in told
    assert "\n" not in told


@pytest.mark.parametrize("host", OPEN)
def test_elsewhere_is_allowed_in_so_many_words_and_told(host: str):
    [told] = check_bind_policy(Settings(host=host, allow_anyone=True), has_keys=False)
    assert "anyone who can reach it can use it" in told


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({}, True), ({"tls_cert": "c.pem", "tls_key": "k.pem"}, False)],
)
def test_keys_that_travel_in_clear_are_told_of(settings: dict[str, Any], warned: bool):
    told = check_bind_policy(Settings(host="0.0.0.0", **settings), has_keys=True)
    assert any("without TLS" in line for line in told) is warned


@pytest.mark.parametrize("name", ["llm.example.org", ".example.org", "server"])
def test_a_name_for_others_is_refused_without_keys(name: str):
    """A proxy in front made everybody a user of this machine, who may unload models too."""
    named: dict[str, Any] = {"allowed_hosts": ("localhost", name)}
    with pytest.raises(
        AppError, match=f"--allowed-host {name} without API keys lets anyone"
    ) as caught:
        check_bind_policy(Settings(**named), has_keys=False)
    assert caught.value.param == "allowed_hosts"
    assert "--api-keys FILE, or pass --allow-anyone" in caught.value.message
    assert check_bind_policy(Settings(**named), has_keys=True) == ()
    [told] = check_bind_policy(Settings(**named, allow_anyone=True), has_keys=False)
    assert (
        told
        == f"accepting requests for {name} without API keys: anyone who can reach it can use it"
    )


def test_a_name_of_this_machine_is_for_nobody_else():
    named: dict[str, Any] = {"allowed_hosts": ("localhost",)}
    assert check_bind_policy(Settings(**named), has_keys=False) == ()


def test_all_pages_of_the_web_are_let_in_only_with_keys_or_in_so_many_words():
    pages: dict[str, Any] = {"cors_origins": ("*",)}
    with pytest.raises(AppError, match="any web page"):
        check_bind_policy(Settings(**pages), has_keys=False)
    assert check_bind_policy(Settings(**pages), has_keys=True) == ()
    assert check_bind_policy(Settings(**pages, allow_anyone=True), has_keys=False) == ()
