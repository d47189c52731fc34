"""The behavior of the server for each field of Ollama's API, row by row (field_rows.json).

Ollama's clients send fields that this server does not know, and those are ignored. Therefore the
rows must also list every field that Ollama documents.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from app.api.schema.ollama import OllamaOptions
from tests.api.asgi import Reply, send_request
from tests.api.test_fields_table import Row, read_rows, read_schema_fields
from tests.fakes import CARD, FakeGenerate
from tests.rows import rows

METHODS = {"delete": "DELETE"}  # POST otherwise

HI = [{"role": "user", "content": "hi"}]

MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"model": CARD.id, "messages": HI},
    "generate": {"model": CARD.id, "prompt": "hi"},
    "embed": {"model": CARD.id, "input": "hi"},
    "embeddings": {"model": CARD.id, "prompt": "hi"},
    "show": {"model": CARD.id},
    "pull": {"model": CARD.id},
    "create": {"model": CARD.id, "from": CARD.id},
    "copy": {"source": CARD.id, "destination": "new"},
    "delete": {"model": CARD.id},
}

# Ollama's docs/api.md and api/types.go at fb3076099, August 2026.
DOCUMENTED = {
    "chat": """
        _debug_render_only format keep_alive logprobs messages model options shift stream think
        tools top_logprobs truncate
    """,
    "generate": """
        _debug_render_only context format images keep_alive logprobs model options prompt raw shift
        stream suffix system template think top_logprobs truncate
    """,
    "embed": "dimensions input keep_alive model options truncate",
    "embeddings": "keep_alive model options prompt",
    "show": "model name options system verbose",
    "pull": "insecure model name stream",
    "create": """
        adapters files from license messages model name parameters parser quantization quantize
        renderer requires stream system template
    """,
    "copy": "destination source",
    "delete": "model name",
}

# These fields name a model. Without them, a request is invalid, except in the endpoints that use
# the only model of the server.
NAME_FIELDS = ("model", "name", "source", "from")
WITHOUT_NAME = ("chat", "generate", "embed", "embeddings")

# fields that differ in every response
FRESH = re.compile(rb'"\w+_(?:at|duration)":(?:"[^"]*"|[0-9]+)')


ROWS = read_rows(Path(__file__).with_name("field_rows.json"))


def build_body(row: Row) -> dict[str, Any]:
    body = {**MINIMAL[row.endpoint], **row.example}
    for field in NAME_FIELDS:
        if row.example.get(field) is not None:
            body[field] = CARD.id  # the model of the row is not served
    if row.field == "name":
        del body["model"]
    return body


def send(endpoint: str, body: dict[str, Any]) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    method = METHODS.get(endpoint, "POST")
    return send_request(generate, method, f"/api/{endpoint}", body), generate


def list_effects(generate: FakeGenerate) -> list[object]:
    return [*generate.opened, *generate.embedded, *generate.loaded, *generate.library.calls]


@rows("row", ROWS, ids=str, parts=2)
def test_the_server_does_what_the_row_says(row: Row):
    reply, generate = send(row.endpoint, build_body(row))
    if row.status == "refused":
        assert (reply.status, list_effects(generate)) == (400, [])
        assert row.field.rpartition(".")[2] in reply.error
        return
    plain, plain_generate = send(row.endpoint, MINIMAL[row.endpoint])
    assert (plain.status, reply.status) == (200, 200)
    same_request = list_effects(generate) == list_effects(plain_generate)
    same_response = FRESH.sub(b"", reply.body) == FRESH.sub(b"", plain.body)
    if row.status == "accepted":
        assert same_request
        assert same_response
    elif row.field in NAME_FIELDS:
        body = build_body(row)
        del body[row.field]
        assert send(row.endpoint, body)[0].status == (200 if row.endpoint in WITHOUT_NAME else 400)
    else:
        assert not (same_request and same_response)


@pytest.mark.parametrize("endpoint", MINIMAL)
def test_every_documented_field_is_in_the_table(endpoint: str):
    assert set(DOCUMENTED[endpoint].split()) == {
        row.field for row in ROWS if row.endpoint == endpoint and "." not in row.field
    }


@pytest.mark.parametrize("endpoint", ["chat", "generate"])
def test_the_table_lists_every_option_without_effect(endpoint: str):
    accepted = [row for row in ROWS if row.endpoint == endpoint and row.status == "accepted"]
    options = {row.field.removeprefix("options.") for row in accepted if "." in row.field}
    assert options == OllamaOptions.ignored.keys()


@pytest.mark.parametrize("endpoint", MINIMAL)
def test_the_table_and_the_schema_list_the_same_fields(endpoint: str):
    method = METHODS.get(endpoint, "POST").lower()
    rows = [row for row in ROWS if row.endpoint == endpoint and "." not in row.field]
    schema = read_schema_fields(f"/api/{endpoint}", method)
    assert schema == {row.field for row in rows if row.status != "refused"}


def test_an_unknown_option_is_reported_and_has_no_effect():
    body = {**MINIMAL["chat"], "options": {"unknown": 1}}
    reply, generate = send("chat", body)
    _, plain = send("chat", MINIMAL["chat"])
    assert reply.headers["x-mlxrunner-notice"] == "ignored unknown fields: options.unknown"
    assert list_effects(generate) == list_effects(plain)
