"""The requests of coding agents, as the programs sent them.

The files in client_requests were recorded from the published programs in a session with one tool
call. Structure and fields are unchanged; long texts and most tools were shortened.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FakeGenerate

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((Path(__file__).parent / "client_requests").glob("*.json"))

# fields that cannot change a response, by client
WITHOUT_EFFECT = {"codex": {"prompt_cache_key", "client_metadata"}, "pi": {"store"}}


def read_requests(path: Path) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["requests"]
    return [request | {"model": CARD.id} for request in requests]


def send(path: str, body: Any) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    return send_request(generate, "POST", path, body), generate


def check_requests(client: str, path: str, requests: list[dict[str, Any]]) -> None:
    """Sends each request, and again without each field that has no effect."""
    for request in requests:
        reply, generate = send(path, request)
        assert reply.status == 200, reply.body
        for field in WITHOUT_EFFECT.get(client, set()) & set(request):
            plain = {name: value for name, value in request.items() if name != field}
            assert send(path, plain)[1].opened == generate.opened


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_requests_of_a_program_are_answered(path: Path):
    check_requests(path.stem, "/v1/chat/completions", read_requests(path))


def test_the_request_of_codex_is_answered(shared: Path):
    body = json.loads((shared / "agents/codex-0.169.0.responses.json").read_text("utf-8"))
    check_requests("codex", "/v1/responses", [body | {"model": CARD.id}])


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_document_names_the_recorded_version(path: Path):
    program = json.loads(path.read_text("utf-8"))["program"]
    version = program.rpartition(" ")[2]
    assert version in (ROOT / "docs/clients.md").read_text("utf-8")
