"""The names under which we answer, and that a page which was rebound to us has none of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.host import AllowedHosts, check_host, parse_host
from tests.api.asgi import ask
from tests.fakes import FakeGenerate

CHAT = "/v1/chat/completions"


def scope(*hosts: str, target: str = "/v1/models", version: str = "1.1") -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": version,
        "raw_path": target.encode(),
        "headers": [(b"accept", b"*/*"), *((b"host", host.encode("latin-1")) for host in hosts)],
    }


def passes(*hosts: str, target: str = "/v1/models", version: str = "1.1", **settings: Any) -> bool:
    try:
        check_host(
            scope(*hosts, target=target, version=version),
            AllowedHosts.from_settings(Settings(**settings)),
        )
    except AppError as error:
        refused = error
    else:
        return True
    assert (refused.kind, refused.code) == (ErrorKind.FORBIDDEN, "host_not_allowed")
    return False


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "host.docker.internal:8080",
        "host.containers.internal",
        "LocalHost:8080",
        "localhost.",
        "localhost:",
        "app.localhost:3000",
        "127.0.0.1:8080",
        "127.8.9.10",
        "0.0.0.0",
        "192.168.1.7:8080",
        "[::1]",
        "[::1]:8080",
        "[FE80::1%25en0]:8080",
        "[::ffff:127.0.0.1]",
    ],
)
def test_loopback_names_and_all_addresses_are_ours(host: str):
    assert passes(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "docker.internal",
        "evil.host.docker.internal",
        "evillocalhost",
        "xn--lcalhost-9ta",
        "127.1",
        "0x7f.1",
        "2130706433",
        "127.0.0.01",
        "mlxrunner",
        ".localhost.example",
    ],
)
def test_a_name_that_a_stranger_could_own_is_refused(host: str):
    assert not passes(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        " localhost",
        "localhost:http",
        "localhost:80:80",
        "user@localhost",
        "localhost@evil.example",
        "localhost/evil.example",
        "localhost,evil.example",
        "localhost\\evil.example",
        "::1",
        "[localhost]",
        "[::1",
        "[::1]evil.example",
        "[127.0.0.1",
        "löcalhost",
        "localhost\x00",
        "localhost%00.evil.example",
        "localhost" + "." * 300,
        "a" * 5000,
        ".",
    ],
)
def test_what_is_no_host_is_refused(host: str):
    assert not passes(host)


def test_a_missing_host_is_refused_where_a_browser_might_be_asking():
    assert not passes()
    assert passes(version="1.0")


def test_two_hosts_are_refused_even_if_both_are_ours():
    assert not passes("localhost", "localhost")
    assert not passes("localhost", "evil.example")
    assert not passes("localhost", "localhost", version="1.0")


@pytest.mark.parametrize(
    ("target", "ours"),
    [
        ("http://localhost:8080/v1/models", True),
        ("http://evil.example/v1/models", False),
        ("HTTP://evil.example", False),
        ("http://user@localhost/", False),
        ("/v1/models?next=http://evil.example", True),
        ("*", True),
    ],
)
def test_a_target_that_names_a_host_is_held_to_it_too(target: str, ours: bool):
    assert passes("localhost", target=target) is ours


def test_a_target_is_no_way_around_the_header():
    assert not passes("evil.example", target="http://localhost/v1/models")


def test_the_name_that_was_told_to_listen_on_is_ours():
    assert passes("mac.local:8080", host="Mac.local")
    assert not passes("mac.local:8080", host="0.0.0.0")


def test_further_names_are_exact_or_whole_domains():
    allowed: dict[str, Any] = {"allowed_hosts": ("Chat.example.org", ".lan.example.")}
    assert passes("chat.example.org:443", **allowed)
    assert passes("CHAT.example.org.", **allowed)
    assert not passes("a.chat.example.org", **allowed)
    assert not passes("chat.example.org.evil.example", **allowed)
    assert passes("a.lan.example", **allowed)
    assert passes("a.b.lan.example", **allowed)
    assert not passes("lan.example", **allowed)
    assert not passes("evillan.example", **allowed)


@pytest.mark.parametrize(
    "name",
    ["", "*", "*.example.org", "http://a", "a:80", "a b", "..a", "a..b", ".", "a/", "[::1]", "é.a"],
)
def test_a_name_that_could_never_be_asked_for_is_told_at_the_start(name: str):
    with pytest.raises(AppError, match="--allowed-host takes a name") as caught:
        AllowedHosts.from_settings(Settings(allowed_hosts=(name,)))
    assert caught.value.param == "allowed_hosts"


def test_the_refusal_says_how_to_allow_the_name():
    reply = ask(FakeGenerate(), "GET", "/v1/models", None, {"host": "mac.local:8080"})
    assert reply.status == 403
    assert reply.error["code"] == "host_not_allowed"
    assert "--allowed-host mac.local," in reply.error["message"]
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/health", {}),
        ("GET", "/v1/status", {}),
        ("GET", "/nowhere", {}),
        ("POST", CHAT, {}),
        ("DELETE", "/v1/responses/resp_1", {}),
        ("OPTIONS", CHAT, {"origin": "http://localhost", "access-control-request-method": "POST"}),
    ],
)
def test_no_path_and_no_method_answers_to_a_strange_name(
    method: str, path: str, headers: dict[str, str]
):
    generate = FakeGenerate()
    reply = ask(generate, method, path, {}, {"host": "evil.example", **headers})
    assert reply.status == 403
    assert "access-control-allow-origin" not in reply.headers
    assert not generate.opened


@given(st.text(max_size=40))
def test_a_host_that_is_understood_is_clean(text: str):
    host = parse_host(text)
    assert host is None or (host == host.lower() and not set(host) & set("/@\\ ,%[]"))


@given(st.text("abc.-:[]@/%*_0123456789", max_size=30))
def test_no_name_within_a_strangers_domain_is_ever_ours(text: str):
    assert not passes(f"{text}.evil.example", allowed_hosts=("a.b", ".c"))
