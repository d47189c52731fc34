"""The behavior of the server for each documented field of a request, row by row (field_rows.json).

A supported field reaches the model or changes the response; an accepted field does neither; a
refused field is named in the error.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.api.schema.unsupported_fields import Endpoint, list_unsupported_fields
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FakeGenerate
from tests.openapi_document import read_openapi
from tests.rows import rows

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}

MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"model": CARD.id, "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": CARD.id, "prompt": "hi"},
    "responses": {"model": CARD.id, "input": "hi"},
    "embeddings": {"model": CARD.id, "input": "hi"},
    "messages": {
        "model": CARD.id,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "g", "input_schema": {"type": "object"}}],
    },
}

# OpenAI's reference, and Anthropic's with the fields of its betas (as in its SDK), November 2026.
DOCUMENTED = {
    "chat": """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
        max_tokens messages metadata modalities model moderation n parallel_tool_calls prediction
        presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning_effort response_format safety_identifier seed service_tier stop store stream
        stream_options temperature tool_choice tools top_logprobs top_p user verbosity
        web_search_options
    """,
    "completions": """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty
        prompt seed stop stream stream_options suffix temperature top_p user
    """,
    "responses": """
        access_programs background context_management conversation image include input
        instructions max_output_tokens max_tool_calls metadata model moderation
        parallel_tool_calls previous_response_id prompt prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier
        store stream stream_options temperature text tool_choice tools top_logprobs top_p
        truncation user
    """,
    "embeddings": "dimensions encoding_format input model user",
    "messages": """
        betas billing_policy cache_control compaction container context_management diagnostics
        fallback_credit_token fallbacks inference_geo max_tokens mcp_servers messages metadata model
        output_config service_tier speed stop_sequences stream system temperature thinking thread
        tool_choice tools top_k top_p user_profile_id workspace_id
    """,
}

# fields that differ in every response
FRESH = re.compile(rb'"(?:id|item_id|created|\w+_at)":(?:"[^"]*"|[0-9.]+)')


@dataclass(frozen=True)
class Row:
    """field: dotted. endpoint: a key of `PATHS`, or the last part of a path of Ollama's API.
    status: supported, accepted or refused."""

    field: str
    endpoint: str
    status: str
    example: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.endpoint}-{self.field}-{self.status}"


OTHER_SERVERS: tuple[Endpoint, ...] = ("chat", "completions", "responses", "embeddings")


def read_rows(path: Path) -> list[Row]:
    """path: a list of rows, each of which may name several endpoints."""
    return [
        Row(row["field"], endpoint, row["status"], row["example"])
        for row in json.loads(path.read_text("utf-8"))
        for endpoint in row["endpoints"]
    ]


def list_neutral_rows() -> list[Row]:
    """Fields of other servers, accepted at a value that has no effect."""
    return [
        Row(field, endpoint, "accepted", {field: neutral[0]})
        for endpoint in OTHER_SERVERS
        for field, neutral in list_unsupported_fields(endpoint).items()
    ]


ROWS = [*read_rows(Path(__file__).with_name("field_rows.json")), *list_neutral_rows()]


def send(endpoint: str, example: dict[str, Any]) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    body = {**MINIMAL[endpoint], **example}
    if "model" in example:
        body["model"] = CARD.id  # the model of the row is not served
    return send_request(generate, "POST", PATHS[endpoint], body), generate


def rejected_field(reply: Reply) -> str:
    """Anthropic's errors begin with it."""
    error = reply.error
    return error["param"] if "param" in error else error["message"].partition(":")[0]


def recorded_requests(generate: FakeGenerate) -> list[object]:
    return [*generate.opened, *generate.embedded]


@rows("row", ROWS, ids=str, parts=5)
def test_the_server_does_what_the_row_says(row: Row):
    reply, generate = send(row.endpoint, row.example)
    if row.status == "refused":
        assert (reply.status, recorded_requests(generate)) == (400, [])
        assert f"{rejected_field(reply)}.".startswith(f"{row.field}.")
        return
    plain, plain_generate = send(row.endpoint, {})
    assert (plain.status, reply.status) == (200, 200)
    same_request = recorded_requests(generate) == recorded_requests(plain_generate)
    same_response = FRESH.sub(b"", reply.body) == FRESH.sub(b"", plain.body)
    if row.status == "accepted":
        assert same_request
        assert same_response
    elif row.field != "model":
        assert not (same_request and same_response)


@pytest.mark.parametrize("endpoint", PATHS)
def test_every_documented_field_is_in_the_table(endpoint: str):
    assert set(DOCUMENTED[endpoint].split()) <= {r.field for r in ROWS if r.endpoint == endpoint}


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_table_and_the_schema_list_the_same_fields(endpoint: str):
    schema = read_schema_fields(PATHS[endpoint])
    rows = [row for row in ROWS if row.endpoint == endpoint and "." not in row.field]
    assert schema <= {row.field for row in rows}
    assert {row.field for row in rows if row.status != "refused"} <= schema


def read_schema_fields(path: str, method: str = "post") -> set[str]:
    """Reads the fields of a request body from openapi.yaml."""
    document = read_openapi()
    node: Any = document["paths"][path][method]["requestBody"]
    while "$ref" in node or "content" in node:
        if "content" in node:
            node = node["content"]["application/json"]["schema"]
            continue
        keys = node["$ref"].removeprefix("#/").split("/")
        node = document
        for key in keys:
            node = node[key]
    return set(node["properties"])
