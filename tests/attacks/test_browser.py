"""Pages of other origins in a browser: they can send any request, but must not have any effect."""

import json

import httpx
import pytest

from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import Victim
from tests.http.raw_client import head, post
from tests.server_process import TIMEOUT

CHAT = "/v1/chat/completions"
CHAT_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def count_tokens(victim: Victim) -> int:
    tokens: dict[str, int] = victim.server.status()["Tokens"]  # pyright: ignore[reportAssignmentType]
    return sum(tokens.values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_rebound_page_is_rejected_on_every_path(victim: Victim, stream: bool) -> None:
    """The page came from evil.example, whose name now resolves to this server: for the browser it
    is the same origin, and only the Host header differs."""
    before = count_tokens(victim)
    headers = {"host": "evil.example:8080", "sec-fetch-site": "same-origin"}
    paths = ("/health", "/v1/status", "/v1/models", "/metrics", "/nowhere")
    url = victim.server.url
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT) as browser:
        replies = [browser.get(path) for path in paths]
        replies += [browser.post(CHAT, json={**CHAT_BODY, "stream": stream})]
        replies += [browser.post("/v1/models/unload", json={"model": "tiny"})]
        replies += [browser.request("OPTIONS", CHAT)]
    for reply in replies:
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
    assert count_tokens(victim) == before


@pytest.mark.exhaustive
@pytest.mark.timing
def test_rebinding_does_not_disturb_other_clients(victim: Victim) -> None:
    page = Send(post(CHAT_BODY, CHAT, Host="evil.example"))
    result = victim.attack(Attack([[page, Read()]], threads=4))
    assert set(result.statuses) == {"403"}


@pytest.mark.parametrize("with_fetch_metadata", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize", "/v1/completions", "/v1/models/unload"])
def test_a_form_of_another_origin_has_no_effect(
    victim: Victim, path: str, with_fetch_metadata: bool
) -> None:
    """A form may post across origins without a preflight. As text/plain its body can be JSON. An
    old browser does not send Sec-Fetch-Site."""
    before = count_tokens(victim)
    site = (
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        if with_fetch_metadata
        else {}
    )
    body = json.dumps(CHAT_BODY)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"origin": "https://evil.example", "content-type": kind, **site}
        reply = victim.client.post(path, content=body, headers=headers)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
    assert count_tokens(victim) == before


@pytest.mark.timing
def test_forms_do_not_disturb_other_clients(victim: Victim) -> None:
    fields = {"Origin": "https://evil.example", "Content_Type": "text/plain"}
    form = head("POST", "/v1/tokenize", Content_Length=10_000, **fields) + b"x" * 10_000
    result = victim.attack(Attack([[Send(form), Read()]], threads=4))
    assert set(result.statuses) == {"403"}


def test_a_page_of_another_origin_can_read_nothing(victim: Victim) -> None:
    """The browser hides the response from a page of another origin."""
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        reply = victim.client.get("/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in reply.headers
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        allowed = victim.client.request("OPTIONS", CHAT, headers=preflight).headers
        assert "access-control-allow-origin" not in allowed
