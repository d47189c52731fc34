"""Pages of other origins cannot change anything, with any kind of request."""

import pytest
from starlette.datastructures import Headers

from app.config import value_types
from app.core.errors import AppError, ErrorKind
from app.http.host_and_origin import AllowedOrigins, check_origin
from tests.api.asgi import send_request
from tests.fakes import FakeGenerate
from tests.rows import rows

CHAT = "/v1/chat/completions"
UI = "https://chat.example.org"


def passes(method: str, *cors_origins: str, **headers: str) -> bool:
    """Header names have underscores for hyphens."""
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    raw = [(name.encode(), value.encode()) for name, value in [("host", "here:8080"), *pairs]]
    allowed = AllowedOrigins(origins=frozenset(cors_origins))
    try:
        check_origin(method, Headers(raw=raw), allowed)
    except AppError as error:
        error_ = error
    else:
        return True
    assert (error_.kind, error_.code) == (ErrorKind.FORBIDDEN, "origin_not_allowed")
    return False


def test_a_client_without_origin_passes():
    assert passes("POST")


@rows("method", ["POST", "PUT", "DELETE", "PATCH", "QUERY", "BREW"])
@rows(
    "headers",
    [
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": "https://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "of a kind that is yet to come"},
        {"sec_fetch_site": ""},
        {"origin": "null", "sec_fetch_site": "cross-site"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://here:8080.evil.example"},
        {"origin": "http://here"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://localhost:3000\n"},
        {"origin": "file://"},
    ],
)
def test_unsafe_methods_of_other_origins_are_rejected(method: str, headers: dict[str, str]):
    assert not passes(method, **headers)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_safe_methods_are_left_to_cors(method: str):
    assert passes(method, origin="https://evil.example", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-origin", "origin": "https://here:8080"},
        # a browser sends only the origin with plain http beyond loopback
        {"origin": "http://here:8080"},
    ],
)
def test_the_own_origin_is_allowed(headers: dict[str, str]):
    """For example, if a proxy serves a page and this server under one name."""
    assert passes("POST", **headers)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "app://obsidian.md", UI],
)
def test_local_and_listed_origins_are_allowed(origin: str, site: str):
    assert passes("POST", UI, origin=origin, sec_fetch_site=site)
    assert passes("POST", UI, origin=origin)


def test_a_star_allows_all_origins():
    assert passes("POST", "*", origin="https://evil.example", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "origin",
    [UI, "http://chat.example.org:8080", "https://[fd00::1]:80", "app://obsidian.md", "file://"],
)
def test_origins_of_desktop_apps_can_be_listed(origin: str):
    [listed] = value_types.origins().parse_text(origin)
    assert AllowedOrigins(origins=frozenset({listed})).allows(origin)


@pytest.mark.parametrize(
    "type_", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
@pytest.mark.parametrize("path", ["/v1/tokenize", CHAT, "/v1/models/unload"])
def test_form_posts_of_other_origins_are_rejected(path: str, type_: str):
    """A form sends these types without a preflight, and its text may be JSON."""
    generate = FakeGenerate()
    headers = {"content-type": type_, "origin": "https://evil.example"}
    reply = send_request(
        generate, "POST", path, b'{"model": "fake/model", "prompt": "hi"}', headers
    )
    assert reply.status == 403
    assert reply.error["code"] == "origin_not_allowed"
    assert "--cors-origin" in reply.error["message"]
    assert "access-control-allow-origin" not in reply.headers
    assert not generate.opened


def test_the_error_quotes_at_most_one_line():
    headers = Headers({"origin": "x" * 10_000 + "\n"})
    with pytest.raises(AppError) as caught:
        check_origin("POST", headers, AllowedOrigins())
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message
