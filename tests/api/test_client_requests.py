"""The requests of coding agents, as the programs sent them, and the tables of docs/clients.md.

The files in client_requests were recorded from the published programs in a session with one tool
call. Structure and fields are as sent; long texts and most tools are cut.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FakeGenerate

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((Path(__file__).parent / "client_requests").glob("*.json"))


def read_requests(path: Path) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["requests"]
    return [request | {"model": CARD.id} for request in requests]


def read_tables() -> dict[str, dict[str, str]]:
    """Returns what docs/clients.md says of each field, by client in lower case."""
    page = (ROOT / "docs/clients.md").read_text("utf-8")
    _, _, rest = page.partition("\n## What coding agents send\n")
    section, _, _ = rest.partition("\n## ")
    tables: dict[str, dict[str, str]] = {}
    for part in section.split("\n### ")[1:]:
        name, _, text = part.partition("\n")
        rows = re.findall(r"^\| (`.*`) \| \*\*(supported|accepted)\*\*", text, re.MULTILINE)
        tables[name.lower()] = {
            field: status for fields, status in rows for field in re.findall(r"`(\w+)`", fields)
        }
    return tables


def send(path: str, body: Any) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    return send_request(generate, "POST", path, body), generate


def check_table(table: dict[str, str], path: str, requests: list[dict[str, Any]]) -> None:
    """Sends each request, and again without each accepted field."""
    assert set(table) == {field for request in requests for field in request}
    for request in requests:
        reply, generate = send(path, request)
        assert reply.status == 200, reply.body
        for field in request:
            if table[field] == "accepted":
                plain = {name: value for name, value in request.items() if name != field}
                assert send(path, plain)[1].opened == generate.opened


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_requests_of_a_program_have_the_results_in_its_table(path: Path):
    check_table(read_tables()[path.stem], "/v1/chat/completions", read_requests(path))


def test_the_request_of_codex_has_the_results_in_its_table(shared: Path):
    body = json.loads((shared / "agents/codex-0.169.0.responses.json").read_text("utf-8"))
    check_table(read_tables()["codex"], "/v1/responses", [body | {"model": CARD.id}])


def test_every_table_is_checked():
    assert set(read_tables()) == {"codex", *(path.stem for path in RECORDED)}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_document_names_the_recorded_version(path: Path):
    program = json.loads(path.read_text("utf-8"))["program"]
    version = program.rpartition(" ")[2]
    assert version in (ROOT / "docs/clients.md").read_text("utf-8")
