"""Allowed host names, and that DNS rebinding gets none of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.host_and_origin import AllowedHosts, check_host, parse_host
from tests.api.asgi import send_request
from tests.fakes import FakeGenerate
from tests.rows import rows

CHAT = "/v1/chat/completions"


def build_scope(*hosts: str, target: str = "/v1/models", version: str = "1.1") -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": version,
        "raw_path": target.encode(),
        "headers": [(b"accept", b"*/*"), *((b"host", host.encode("latin-1")) for host in hosts)],
    }


def passes(*hosts: str, target: str = "/v1/models", version: str = "1.1", **settings: Any) -> bool:
    try:
        check_host(
            build_scope(*hosts, target=target, version=version),
            AllowedHosts.from_settings(Settings(**settings)),
        )
    except AppError as error:
        rejection = error
    else:
        return True
    assert (rejection.kind, rejection.code) == (ErrorKind.FORBIDDEN, "host_not_allowed")
    return False


@rows(
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
def test_loopback_names_and_all_addresses_are_allowed(host: str):
    assert passes(host)


@rows(
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
def test_public_names_are_rejected(host: str):
    assert not passes(host)


@rows(
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
def test_an_invalid_host_is_rejected(host: str):
    assert not passes(host)


def test_a_missing_host_is_rejected_except_in_http_1_0():
    assert not passes()
    assert passes(version="1.0")


def test_two_host_headers_are_rejected():
    assert not passes("localhost", "localhost")
    assert not passes("localhost", "evil.example")
    assert not passes("localhost", "localhost", version="1.0")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://localhost:8080/v1/models", True),
        ("http://evil.example/v1/models", False),
        ("HTTP://evil.example", False),
        ("http://user@localhost/", False),
        ("/v1/models?next=http://evil.example", True),
        ("*", True),
    ],
)
def test_the_host_of_an_absolute_target_is_checked(target: str, expected: bool):
    assert passes("localhost", target=target) is expected


def test_an_absolute_target_does_not_bypass_the_host_header():
    assert not passes("evil.example", target="http://localhost/v1/models")


def test_the_name_of_the_host_option_is_allowed():
    assert passes("mac.local:8080", host="Mac.local")
    assert not passes("mac.local:8080", host="0.0.0.0")


def test_allowed_hosts_are_exact_names_or_domains():
    allowed: dict[str, Any] = {"allowed_hosts": ("Chat.example.org", ".lan.example")}
    assert passes("chat.example.org:443", **allowed)
    assert passes("CHAT.example.org.", **allowed)
    assert not passes("a.chat.example.org", **allowed)
    assert not passes("chat.example.org.evil.example", **allowed)
    assert passes("a.lan.example", **allowed)
    assert passes("a.b.lan.example", **allowed)
    assert not passes("lan.example", **allowed)
    assert not passes("evillan.example", **allowed)


def test_the_error_names_the_option_that_allows_the_host():
    reply = send_request(FakeGenerate(), "GET", "/v1/models", None, {"host": "mac.local:8080"})
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
def test_every_path_and_method_checks_the_host(method: str, path: str, headers: dict[str, str]):
    generate = FakeGenerate()
    reply = send_request(generate, method, path, {}, {"host": "evil.example", **headers})
    assert reply.status == 403
    assert "access-control-allow-origin" not in reply.headers
    assert not generate.opened


@given(st.text(max_size=40))
def test_a_parsed_host_is_lower_case_without_special_characters(text: str):
    host = parse_host(text)
    assert host is None or (host == host.lower() and not set(host) & set("/@\\ ,%[]"))


@given(st.text("abc.-:[]@/%*_0123456789", max_size=30))
def test_no_name_in_another_domain_is_allowed(text: str):
    assert not passes(f"{text}.evil.example", allowed_hosts=("a.b", ".c"))
