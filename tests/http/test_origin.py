"""Pages of other origins can make us do nothing, whatever kind of request their browser sends."""

import pytest
from starlette.datastructures import Headers

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.origin import AllowedOrigins, check_origin
from tests.api.asgi import ask
from tests.fakes import FakeGenerate

CHAT = "/v1/chat/completions"
UI = "https://chat.example.org"


def passes(method: str, *listed: str, **headers: str) -> bool:
    """Headers by their names with underscores."""
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    raw = [(name.encode(), value.encode()) for name, value in [("host", "here:8080"), *pairs]]
    allowed = AllowedOrigins.from_settings(Settings(cors_origins=listed))
    try:
        check_origin(method, Headers(raw=raw), allowed)
    except AppError as error:
        refused = error
    else:
        return True
    assert (refused.kind, refused.code) == (ErrorKind.FORBIDDEN, "origin_not_allowed")
    return False


def test_a_client_that_is_no_browser_passes():
    assert passes("POST")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "QUERY", "BREW"])
@pytest.mark.parametrize(
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
def test_a_strange_page_may_change_nothing(method: str, headers: dict[str, str]):
    assert not passes(method, **headers)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_asking_changes_nothing_and_is_for_cors_to_judge(method: str):
    assert passes(method, origin="https://evil.example", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-origin", "origin": "https://here:8080"},
        # a browser that tells nothing but the origin: http, beyond loopback
        {"origin": "http://here:8080"},
    ],
)
def test_a_page_of_our_own_origin_may(headers: dict[str, str]):
    """As when a proxy serves a page and us under one name."""
    assert passes("POST", **headers)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", UI]
)
def test_pages_of_this_machine_and_listed_ones_may(origin: str, site: str):
    assert passes("POST", UI, origin=origin, sec_fetch_site=site)
    assert passes("POST", UI, origin=origin)


def test_all_may_where_all_are_listed():
    assert passes("POST", "*", origin="https://evil.example", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "chat.example.org",
        "https://chat.example.org/",
        "https://Chat.example.org",
        "https://*.example.org",
        "https://chat.example.org:443",
        "http://chat.example.org:80",
        "https://",
        "https://a, https://b",
    ],
)
def test_an_origin_that_no_browser_writes_is_told_at_the_start(origin: str):
    with pytest.raises(AppError, match="--cors-origin takes an origin") as caught:
        AllowedOrigins.from_settings(Settings(cors_origins=(origin,)))
    assert caught.value.param == "cors_origins"


@pytest.mark.parametrize(
    "origin",
    [UI, "http://chat.example.org:8080", "https://[fd00::1]:80", "app://obsidian.md", "file://"],
)
def test_pages_and_programs_with_a_browser_inside_can_be_listed(origin: str):
    assert AllowedOrigins.from_settings(Settings(cors_origins=(origin,))).allows(origin)


@pytest.mark.parametrize(
    "type_", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
@pytest.mark.parametrize("path", ["/v1/tokenize", CHAT, "/v1/models/unload"])
def test_what_a_form_can_post_goes_nowhere(path: str, type_: str):
    """A form sends these types without a preflight, and its text may well be JSON."""
    generate = FakeGenerate()
    headers = {"content-type": type_, "origin": "https://evil.example"}
    reply = ask(generate, "POST", path, b'{"model": "fake/model", "prompt": "hi"}', headers)
    assert reply.status == 403
    assert reply.error["code"] == "origin_not_allowed"
    assert "--cors-origin" in reply.error["message"]
    assert "access-control-allow-origin" not in reply.headers
    assert not generate.opened


def test_a_refusal_does_not_repeat_more_than_a_line():
    headers = Headers({"origin": "x" * 10_000 + "\n"})
    with pytest.raises(AppError) as caught:
        check_origin("POST", headers, AllowedOrigins())
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message
