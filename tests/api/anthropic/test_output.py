"""Responses of /v1/messages."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.anthropic.output import fold_events
from app.api.opaque_reasoning import decode_reasoning
from app.core.events import (
    Event,
    FinishReason,
    ModelLoading,
    PrefillProgress,
    ReasoningDelta,
    ToolCallDelta,
)
from app.core.settings import Settings
from tests.api.anthropic.requests import PATH, body, events, send
from tests.api.asgi import Conversation
from tests.fakes import FOREVER, FakeGenerate, Script, build_fake_app, finish, text
from tests.test_openapi import schema_validator

START = PrefillProgress(computed_tokens=3, total_tokens=7)
ID = "call_" + "0a" * 12


def make_reasoning(text: str) -> ReasoningDelta:
    return ReasoningDelta(text=text)


def make_call(arguments: str, *, index: int = 0) -> list[Event]:
    """A call, its arguments in pieces of three characters."""
    pieces = [arguments[at : at + 3] for at in range(0, len(arguments), 3)]
    begun = ToolCallDelta(call_index=index, id=f"{ID[:-1]}{index}", name="Read")
    return [begun, *(ToolCallDelta(call_index=index, arguments=piece) for piece in pieces)]


ALL = [
    START,
    PrefillProgress(computed_tokens=7, total_tokens=7),
    make_reasoning("Let"),
    make_reasoning(" me"),
    text("Hel"),
    text(""),
    text("lo"),
    *make_call('{"path": "a.py", "line": 1}'),
    *make_call("{}", index=1),
    finish("tool_calls"),
]


def stream(script: Script, **fields: Any) -> list[Any]:
    reply, _ = send(body(stream=True, **fields), script)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = events(reply)
    for event in found:
        schema_validator("AnthropicEventData").validate(event)
    return found


def whole(script: Script, **fields: Any) -> Any:
    reply, _ = send(body(**fields), script)
    schema_validator("AnthropicMessage").validate(reply.json)
    return reply.json


def make_finish(reason: FinishReason, stop: str | None = None) -> Event:
    return replace(finish(reason), stop_string=stop)


def test_a_stream_has_all_blocks_in_order():
    found = stream(ALL)
    assert [event["type"].removeprefix("content_") for event in found] == [
        "message_start",
        *("block_start", "block_delta", "block_delta", "block_delta", "block_stop"),
        *("block_start", "block_delta", "block_delta", "block_stop"),
        *("block_start", "block_delta", "block_delta", "block_stop"),
        *("block_start", "block_delta", "block_stop"),
        "message_delta",
        "message_stop",
    ]
    places = [event["index"] for event in found if event["type"] == "content_block_start"]
    assert places == [0, 1, 2, 3]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["stop_reason"] is None
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_message_is_the_fold_of_its_stream():
    streamed, message = fold_events(stream(ALL)), whole(ALL)
    assert message | {"id": ""} == streamed | {"id": ""}
    thinking, said, first, second = message["content"]
    assert (thinking["thinking"], said["text"]) == ("Let me", "Hello")
    assert thinking["signature"]
    assert first["input"] == {"path": "a.py", "line": 1}
    assert second["input"] == {}
    assert first["id"] == f"toolu_{'0a' * 11}00"


def test_usage_is_complete_in_both_events():
    """vLLM's and Ollama's first event has wrong counts; litellm counts only at the end."""
    found = stream([START, text("x"), finish()])
    first, last = found[0]["message"]["usage"], found[-2]["usage"]
    for usage in (first, last):
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert [usage[name] for name in names] == [4, 0, 3]
    assert (first["output_tokens"], last["output_tokens"]) == (0, 2)


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (make_finish("stop"), "end_turn", None),
        (make_finish("stop", "END"), "stop_sequence", "END"),
        (make_finish("length"), "max_tokens", None),
        (make_finish("tool_calls"), "tool_use", None),
        (make_finish("tool_calls", "END"), "tool_use", None),
    ],
)
def test_the_response_gives_the_stop_reason(end: Event, reason: str, sequence: str | None):
    """vLLM never sets stop_sequence; Ollama does not return the string."""
    message = whole([text("x"), end])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("end", [make_finish("length"), make_finish("tool_calls", "END")])
def test_an_incomplete_call_has_only_complete_members(end: Event):
    script = [START, *make_call('{"b": 1, "a": "x'), end]
    assert whole(script)["content"][0]["input"] == {"b": 1}
    pieces = [
        event["delta"]["partial_json"]
        for event in stream(script)
        if event["type"] == "content_block_delta"
    ]
    assert "".join(pieces) == '{"b": 1}'


def test_arguments_that_are_not_json_are_repaired():
    """Both SDKs fail on them, and TypeScript's on text after the object."""
    script = [*make_call('{"a": oops'), *make_call('{"a": 1} x', index=1), finish("tool_calls")]
    first, second = whole(script)["content"]
    assert first["input"] == {"invalid_arguments": '"a": oops'}
    assert second["input"] == {"a": 1}


def test_hidden_thinking_has_a_signature_with_its_text():
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    script = [START, make_reasoning("Let"), make_reasoning(" me"), text("x"), finish()]
    started, *_ = [e for e in stream(script, **fields) if e["type"] == "content_block_start"]
    assert started["content_block"]["type"] == "thinking"
    block = whole(script, **fields)["content"][0]
    assert block["thinking"] == ""
    assert decode_reasoning(block["signature"]) == "Let me"
    assert "thinking_delta" not in str(stream(script, **fields))


def test_a_message_may_have_several_thinking_blocks():
    script = [make_reasoning("a"), text("b"), make_reasoning("c"), text("d"), finish()]
    content = whole(script)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "thinking", "text"]
    assert content[0]["signature"] != content[2]["signature"]


def test_a_response_without_output_has_no_blocks():
    assert whole([finish("length", tokens=0)], max_tokens=0)["content"] == []
    kinds = [event["type"] for event in stream([START, finish("length", tokens=0)], max_tokens=0)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_context_management_is_returned_if_it_was_requested():
    fields = {"context_management": {"edits": []}}
    script = [START, text("x"), finish()]
    assert whole(script, **fields)["context_management"] == {"applied_edits": []}
    assert stream(script, **fields)[-2]["context_management"] == {"applied_edits": []}
    assert "context_management" not in whole(script)
    assert "context_management" not in stream(script)[-2]


def test_the_model_is_named_as_in_the_request():
    assert whole([finish()])["model"] == "fake/model"
    reply, _ = send(body() | {"model": "fake/model:latest"}, [finish()])
    assert reply.json["model"] == "fake/model:latest"


def in_steps(script: Script, until: bytes, **settings: Any) -> bytes:
    """The output sent by the time `until` occurred."""

    async def run() -> bytes:
        app = build_fake_app(FakeGenerate(script), Settings(**settings))
        content = json.dumps(body(stream=True)).encode()
        request = Conversation(app, "POST", PATH, content)
        reply = await request.until(lambda reply: until in reply.body)
        request.disconnect()
        await request.end()
        return reply.body

    return asyncio.run(run())


def test_the_first_event_is_sent_before_the_prompt_is_computed():
    sent = in_steps([START, FOREVER], b"message_start")
    assert b'"input_tokens":4' in sent


@pytest.mark.parametrize("script", [[FOREVER], [ModelLoading(progress=3), FOREVER]])
def test_a_stream_that_waits_gets_pings(script: Script):
    sent = in_steps(script, b"ping\n", ping=0.02)
    assert sent.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')


def test_a_silent_stream_gets_pings():
    sent = in_steps([START, make_reasoning("x"), FOREVER], b"ping\n", ping=0.02)
    assert sent.startswith(b"event: message_start\n")
