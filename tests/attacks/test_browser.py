"""Another page in the browser: it can send us what it likes and must get nothing for it."""

import json

import httpx
import pytest

from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import Victim
from tests.http.lines import head, post

CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def computed(victim: Victim) -> int:
    tokens: dict[str, int] = victim.server.status()["Tokens"]  # pyright: ignore[reportAssignmentType]
    return sum(tokens.values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_rebound_page_is_answered_under_no_path(victim: Victim, stream: bool) -> None:
    """The page came from evil.example, whose name now leads to us: to its browser we are of its own
    origin, and only the Host header tells."""
    before = computed(victim)
    page = {"host": "evil.example:8080", "sec-fetch-site": "same-origin"}
    paths = ("/health", "/v1/status", "/v1/models", "/metrics", "/nowhere")
    with httpx.Client(base_url=victim.server.url, headers=page) as browser:
        replies = [browser.get(path) for path in paths]
        replies += [browser.post(CHAT, json={**ASK, "stream": stream})]
        replies += [browser.post("/v1/models/unload", json={"model": "tiny"})]
        replies += [browser.request("OPTIONS", CHAT)]
    for reply in replies:
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
    assert computed(victim) == before


def test_rebinding_disturbs_nobody(victim: Victim) -> None:
    page = Send(post(ASK, CHAT, Host="evil.example"))
    seen = victim.undisturbed(Attack([[page, Read()]], threads=4))
    assert set(seen.statuses) == {"403"}


@pytest.mark.parametrize("fetched", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize", "/v1/completions", "/v1/models/unload"])
def test_a_form_on_a_strange_page_makes_us_do_nothing(
    victim: Victim, path: str, fetched: bool
) -> None:
    """A form needs nobody's leave to post across origins. As text/plain its body can be JSON. An
    old browser does not send Sec-Fetch-Site."""
    before = computed(victim)
    site = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"} if fetched else {}
    body = json.dumps(ASK)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"origin": "https://evil.example", "content-type": kind, **site}
        reply = victim.client.post(path, content=body, headers=headers)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
    assert computed(victim) == before


def test_forms_disturb_nobody(victim: Victim) -> None:
    fields = {"Origin": "https://evil.example", "Content_Type": "text/plain"}
    form = head("POST", "/v1/tokenize", Content_Length=10_000, **fields) + b"x" * 10_000
    seen = victim.undisturbed(Attack([[Send(form), Read()]], threads=4))
    assert set(seen.statuses) == {"403"}


def test_a_strange_page_can_read_nothing(victim: Victim) -> None:
    """What it may ask for, as every page may: the browser keeps the answer from it."""
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        reply = victim.client.get("/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in reply.headers
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert victim.client.request("OPTIONS", CHAT, headers=asked).is_client_error
