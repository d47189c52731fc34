"""Anthropic's endpoints."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from tests.api.anthropic.requests import PATH, body, call, message, result, words
from tests.api.asgi import send_request
from tests.fakes import CARD, FakeGenerate
from tests.test_openapi import schema_validator

COUNT = f"{PATH}/count_tokens"


@pytest.mark.parametrize("query", ["", "?beta=true"])
@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "2099-01-01", ""])
def test_every_api_version_is_accepted(version: str, query: str):
    headers = {"anthropic-version": version} if version else {}
    reply = send_request(FakeGenerate(), "POST", f"{PATH}{query}", body(temperature=0.5), headers)
    assert reply.status == 200
    assert reply.json["content"] == [{"type": "text", "text": "Hello", "citations": None}]


def test_tokens_are_counted_without_max_tokens():
    generate = FakeGenerate()
    content = {"model": CARD.id, "messages": [{"role": "user", "content": "hello"}]}
    reply = send_request(generate, "POST", f"{COUNT}?beta=true", content)
    assert (reply.status, reply.json) == (200, {"input_tokens": 5})
    assert generate.opened == []


def test_the_count_is_that_of_the_generated_prompt():
    content = body(
        "hi",
        message("assistant", words("x"), call()),
        message("user", result(), words("reminder")),
        system="s",
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        thinking={"type": "enabled", "budget_tokens": 50},
    )
    generate = FakeGenerate()
    assert send_request(generate, "POST", COUNT, content).status == 200
    assert send_request(generate, "POST", PATH, content).status == 200
    assert generate.tokenized_chats == generate.opened


def test_a_count_has_the_requested_fields():
    content = body(
        context_management={"edits": []}, tools=[{"type": "web_search_20250305", "name": "w"}]
    )
    reply = send_request(FakeGenerate(), "POST", COUNT, content)
    assert reply.json == {"input_tokens": 2, "context_management": {"original_input_tokens": 2}}
    assert "web_search" in reply.headers["x-mlxrunner-notice"]


def test_errors_of_a_count_have_the_format():
    reply = send_request(FakeGenerate(), "POST", COUNT, {"model": CARD.id})
    assert (reply.status, reply.json["error"]["message"]) == (400, "messages: is missing")
    error = AppError(ErrorKind.BUSY, "busy")
    assert send_request(FakeGenerate(open_error=error), "POST", COUNT, body()).status == 429


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ["text", "tool_use", "tool_result", "thinking", "document", "user", "system"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "content", "role", "id", "name", "input", "source", "tool_use_id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
BLOCKS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "tool_use", "tool_result", "thinking", "document", "tool_addition", "x"]
        )
    },
    optional=dict.fromkeys(
        ("text", "id", "name", "input", "tool_use_id", "content", "source", "tool"), JSON
    ),
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.text(max_size=5) | st.lists(BLOCKS, max_size=4) | JSON,
    }
)
FIELDS = (
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "stop_sequences",
    "stream",
    "context_management",
    "thread",
    "metadata",
    "temperature",
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just(CARD.id),
        "max_tokens": st.integers(0, 9) | JSON,
        "messages": st.lists(MESSAGES, min_size=1, max_size=4) | JSON,
    },
    optional=dict.fromkeys(FIELDS, JSON),
)


@pytest.mark.parametrize("path", [PATH, COUNT])
@given(content=BODIES | JSON)
def test_any_body_is_accepted_or_rejected_in_the_format(path: str, content: Any):
    reply = send_request(FakeGenerate(), "POST", path, content)
    if reply.status != 200:
        assert 400 <= reply.status < 500, reply.body
        schema_validator("AnthropicError").validate(reply.json)


@pytest.mark.parametrize("depth", [60, 200, 900])
def test_deeply_nested_bodies_are_accepted_or_rejected(depth: int):
    """Endlessly nested documents, arguments, schemas and system blocks."""
    opened = '[{"type":"document","source":{"type":"content","content":'
    nested = opened * depth + '"x"' + "}}]" * depth
    deep = '{"a":' * depth + "{}" + "}" * depth
    for content in (
        body({"role": "user", "content": "NESTED"}),
        body(system="NESTED"),
        body(
            "hi", message("assistant", call(a="DEEP")), message("user", result("toolu_1", "NESTED"))
        ),
        body(tools=[{"name": "f", "input_schema": "DEEP"}]),
        body(tools=[{"name": "f", "input_schema": {}, "input_examples": ["DEEP"]}]),
        body(output_format={"type": "json_schema", "schema": "DEEP"}),
        body(metadata="DEEP"),
    ):
        data = json.dumps(content).replace('"NESTED"', nested).replace('"DEEP"', deep)
        reply = send_request(FakeGenerate(), "POST", PATH, data.encode())
        assert reply.status in (200, 400)
