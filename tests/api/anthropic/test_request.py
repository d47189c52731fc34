"""Requests of /v1/messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.api.schema.anthropic import MessagesBody
from app.core.requests import Conversation, JsonSchema, ReasoningOptions
from tests.api.anthropic.requests import body, parse_body, rejection, send, words
from tests.fakes import CARD
from tests.rows import rows

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def test_the_fields_reach_the_model():
    request = parse_body(
        body(stop_sequences=["END"], temperature=0, top_p=0.5, top_k=5, seed=7, keep_alive="5m")
    )
    assert (request.max_tokens, request.stop, request.keep_alive) == (100, ("END",), 300)
    assert request.sampling == {"temperature": 0, "top_p": 0.5, "top_k": 5, "seed": 7}


def test_the_recorded_request_of_claude_code_is_read(shared: Path):
    recorded = shared / "agents" / "claude-code-2.1.197.messages.json"
    content = {**json.loads(recorded.read_text("utf-8")), "model": CARD.id}
    reply, generate = send(content, anthropic_beta="claude-code-20250219,unknown-2099-01-01")
    assert reply.status == 200
    [request] = generate.opened
    assert len(request.tools) == 24
    assert request.reasoning == ReasoningOptions(effort="high", enabled=True, lenient=True)
    assert isinstance(request.prompt, Conversation)
    assert [one.role for one in request.prompt.messages] == ["system", "user", "system"]
    assert "cache_control" not in repr(request)
    assert "billing" not in repr(request)
    assert request.max_tokens == 32000
    assert request.output_reserve == CARD.context_length // 32


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, ReasoningOptions(lenient=True)),
        ({"type": "disabled"}, ReasoningOptions(effort="none", lenient=True)),
        ({"type": "adaptive"}, ReasoningOptions(enabled=True, lenient=True)),
        ({"type": "between_tools"}, ReasoningOptions(enabled=True, lenient=True)),
        (
            {"type": "enabled", "budget_tokens": 64},
            ReasoningOptions(token_budget=64, enabled=True, lenient=True),
        ),
        (
            {"type": "enabled", "budget_tokens": 31999, "display": "omitted"},
            ReasoningOptions(token_budget=99, enabled=True, lenient=True),
        ),
    ],
)
def test_thinking_is_mapped(thinking: Any, expected: ReasoningOptions):
    assert parse_body(body(thinking=thinking)).reasoning == expected


def test_zero_tokens_leave_no_budget():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert parse_body(body(max_tokens=0, thinking=thinking)).reasoning.token_budget == 0


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}]
)
def test_a_schema_constrains_the_output(fields: Any):
    grammar = parse_body(body(**fields)).grammar
    assert isinstance(grammar, JsonSchema)
    assert json.loads(grammar.text) == SCHEMA
    assert grammar.param == f"{'.'.join(_path(fields))}.schema"


def _path(fields: Any) -> list[str]:
    return ["output_config", "format"] if "output_config" in fields else ["output_format"]


def test_a_required_call_leaves_no_text_to_constrain():
    fields = {"output_format": FORMAT, "tools": TOOLS, "tool_choice": {"type": "any"}}
    assert parse_body(body(**fields)).grammar is None


def test_fields_without_an_effect_change_nothing():
    plain = parse_body(body())
    for name in MessagesBody.ignored:
        for value in ("x", 1, {"a": []}):
            assert parse_body(body(**{name: value})) == plain


def test_a_task_budget_changes_nothing():
    budget = {"task_budget": {"type": "tokens", "total": 1000}}
    assert parse_body(body(output_config=budget)) == parse_body(body())


def test_parts_may_have_unknown_attributes():
    block = {**words("hi"), "new": 1}
    assert parse_body(body({"role": "user", "content": [block], "new": 1})) == parse_body(body())


@rows(
    ("fields", "path"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"model": 5}, "model"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"thinking": {"type": "enabled", "budget_token": 5}}, "thinking.budget_token"),
        ({"output_config": {"fromat": FORMAT}}, "output_config.fromat"),
        ({"output_config": {"format": FORMAT | {"shema": {}}}}, "output_config.format.shema"),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "names": []}}, "tool_choice.names"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [1]}}, "context_management.edits.0"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"system": 1}, "system"),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_an_invalid_field_is_rejected_with_its_path(fields: Any, path: str):
    assert rejection(body(**fields)).startswith(f"{path}: ")


def test_a_body_that_is_not_an_object_is_rejected():
    assert "must be an object" in rejection([])


def test_threads_are_rejected_with_the_error_code_that_the_sdk_expects():
    reply, _ = send(body(thread={"type": "create"}))
    assert reply.status == 400
    details = reply.json["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": []}
