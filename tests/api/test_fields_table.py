"""The tables of docs/api.md, row by row: the server does what each row says.

A field that is honoured reaches the model, or is seen in the answer; one that is accepted does
neither; one that is refused is named in the error.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api.asgi import Reply, ask
from tests.fakes import CARD, FakeGenerate

ROOT = Path(__file__).parents[2]

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
}

MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"model": CARD.id, "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": CARD.id, "prompt": "hi"},
    "responses": {"model": CARD.id, "input": "hi"},
    "embeddings": {"model": CARD.id, "input": "hi"},
}

# OpenAI's reference, November 2026.
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
}

# what differs from one answer to the next
FRESH = re.compile(rb'"(?:id|item_id|created|\w+_at)":(?:"[^"]*"|[0-9.]+)')


@dataclass(frozen=True)
class Row:
    """field: dotted. endpoint: one of `PATHS`. status: honoured, accepted or refused."""

    field: str
    endpoint: str
    status: str
    example: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.endpoint}-{self.field}-{self.status}"


def rows() -> list[Row]:
    found: list[Row] = []
    # the tables behind this title tell of keywords and grammars:
    # tests/grammar/test_llguidance_backend.py
    fields, _, _ = (ROOT / "docs/api.md").read_text("utf-8").partition("\n## Structured output\n")
    for line in fields.splitlines():
        if not line.startswith("| `"):
            continue
        field, endpoints, happens, examples = line.strip("| ").split(" | ")
        status = re.match(r"\*\*(honoured|accepted|refused)\*\*", happens)
        assert status, line
        for endpoint in endpoints.split(", "):
            example = json.loads(example_for(endpoint, examples))
            found.append(Row(field.strip("`"), endpoint, status[1], example))
    return found


def example_for(endpoint: str, examples: str) -> str:
    """The one that is said to be for this endpoint, or the only one."""
    spans: list[tuple[str, str]] = re.findall(r"`([^`]+)`(?: in (\w+))?", examples)
    [example] = [text for text, where in spans if where in ("", endpoint)]
    return example


ROWS = rows()


def send(endpoint: str, example: dict[str, Any]) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate()
    body = {**MINIMAL[endpoint], **example}
    if "model" in example:
        body["model"] = CARD.id  # the document's model is nobody's
    return ask(generate, "POST", PATHS[endpoint], body), generate


def asked(generate: FakeGenerate) -> list[object]:
    return [*generate.opened, *generate.embedded]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_the_table_says_is_what_happens(row: Row):
    reply, generate = send(row.endpoint, row.example)
    if row.status == "refused":
        assert (reply.status, asked(generate)) == (400, [])
        assert f"{reply.error['param']}.".startswith(f"{row.field}.")
        return
    plain, before = send(row.endpoint, {})
    assert (plain.status, reply.status) == (200, 200)
    same_request = asked(generate) == asked(before)
    same_answer = FRESH.sub(b"", reply.body) == FRESH.sub(b"", plain.body)
    if row.status == "accepted":
        assert same_request
        assert same_answer
    elif row.field != "model":
        assert not (same_request and same_answer)


@pytest.mark.parametrize("endpoint", PATHS)
def test_no_field_of_openais_is_missing(endpoint: str):
    assert set(DOCUMENTED[endpoint].split()) <= {r.field for r in ROWS if r.endpoint == endpoint}


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_table_and_the_schema_name_the_same_fields(endpoint: str):
    schema = fields_of_schema(endpoint)
    told = [row for row in ROWS if row.endpoint == endpoint and "." not in row.field]
    assert schema <= {row.field for row in told}
    assert {row.field for row in told if row.status != "refused"} <= schema


def fields_of_schema(endpoint: str) -> set[str]:
    document = yaml.safe_load((ROOT / "openapi.yaml").read_text("utf-8"))
    node: Any = document["paths"][PATHS[endpoint]]["post"]["requestBody"]
    node = node["content"]["application/json"]["schema"]
    for key in node["$ref"].removeprefix("#/").split("/") if "$ref" in node else ():
        document = document[key]
        node = document
    return set(node["properties"])
