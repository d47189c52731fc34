"""The server accepts its own output when a client sends it back: in every dialect, streamed and
not, whatever the model wrote, with the fields that SDKs and gateways add to an answer before they
send it back.

OpenAI's own accumulators build the answers here; tests/clients/test_replay.py does the same with
Anthropic's and Ollama's.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._types import omit
from openai.lib._parsing._responses import parse_response
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.core.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta
from app.core.requests import Conversation, Message
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, DETAILS, FakeGenerate, finish

FUNCTION: Any = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
HI = {"role": "user", "content": "hi"}

WORDS = st.text(min_size=1, max_size=4)
# complete, truncated, empty, not an object, not JSON at all
ARGUMENTS = st.sampled_from(['{"a": 1}', '{"a": [1, {"b": null}', "", "[1]", "null", "so: x", "{}"])

# the fields that clients and gateways add to a message, a part or a call
ADDED: list[dict[str, Any]] = [
    {},
    {"annotations": []},
    {"audio": None, "function_call": None, "refusal": None},
    {"provider_specific_fields": None},
    {"provider_specific_fields": {"refusal": None}},
    {"cot_id": "x", "cot_summary": "y", "copilot_cache_control": {"type": "ephemeral"}},
    {"thinking_blocks": [], "images": []},
]


@st.composite
def answers(draw: st.DrawFn) -> list[OutputEvent]:
    """The events of an answer: reasoning, text and calls in any order, or nothing, possibly cut."""
    events: list[OutputEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call", "held"]), max_size=4)):
        match kind:
            case "reasoning":
                events.append(ReasoningDelta(text=draw(WORDS)))
            case "text":
                events.append(TextDelta(text=draw(WORDS)))
            case "held":
                events.append(TextDelta(text=""))
            case _:
                events.append(ToolCallDelta(call_index=calls, id=f"call_{calls}", name="f"))
                for piece in (draw(ARGUMENTS)[:5], draw(ARGUMENTS)[5:]):
                    events.append(ToolCallDelta(call_index=calls, arguments=piece))
                calls += 1
    reason: Any = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return [*events, finish(reason)]


def post(path: str, body: Any, script: Sequence[Any]) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate(script)
    return send_request(generate, "POST", path, body), generate


def read_events(reply: Reply) -> Iterator[Any]:
    """The data of a stream of server-sent events."""
    for frame in reply.body.decode().split("\n\n"):
        data = frame.partition("data: ")[2]
        if data and data != "[DONE]":
            yield json.loads(data)


def join(events: Sequence[Any], kind: type[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def find_answer(generate: FakeGenerate) -> list[Message]:
    [request] = generate.opened
    assert isinstance(request.prompt, Conversation)
    return [message for message in request.prompt.messages if message.role == "assistant"]


def count_calls(events: Sequence[OutputEvent]) -> int:
    return sum(isinstance(event, ToolCallDelta) and event.id is not None for event in events)


def check_same(generate: FakeGenerate, events: Sequence[OutputEvent], *, calls: int) -> None:
    """No text, no reasoning and no complete call is lost."""
    messages = find_answer(generate)
    assert "".join(message.content or "" for message in messages) == join(events, TextDelta)
    reasoning = "".join((message.reasoning or "").replace("\n", "") for message in messages)
    assert reasoning == join(events, ReasoningDelta).replace("\n", "")
    assert sum(len(message.tool_calls) for message in messages) == calls


def accumulate_chat(reply: Reply, *, streamed: bool) -> Any:
    if not streamed:
        return ChatCompletion.model_validate(reply.json).choices[0].message
    state = ChatCompletionStreamState(input_tools=[TOOL])  # pyright: ignore[reportArgumentType]
    for data in read_events(reply):
        state.handle_chunk(ChatCompletionChunk.model_validate(data))
    # for a truncated answer, the SDK returns only the snapshot
    return state.current_completion_snapshot.choices[0].message


def vary(message: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """The message with additions at each level, where it does not have these fields."""
    calls = [
        {**added, **call, "function": {**added, **call["function"]}}
        for call in message.get("tool_calls") or []
    ]
    return {**added, **message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("streamed", [False, True])
@given(events=answers(), added=st.sampled_from(ADDED), nulls=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_chat_completion_can_be_sent_back(
    streamed: bool, events: list[OutputEvent], added: dict[str, Any], nulls: bool
):
    path, body = "/v1/chat/completions", {"model": CARD.id, "messages": [HI], "tools": [TOOL]}
    reply, _ = post(path, {**body, "stream": streamed}, events)
    message = accumulate_chat(reply, streamed=streamed)
    turn = vary(message.model_dump(exclude_none=not nulls), added)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": None}
        for call in turn.get("tool_calls") or []
    ]
    replay, generate = post(path, {**body, "messages": [HI, turn, *results, HI]}, [finish()])
    assert replay.status == 200, replay.body
    check_same(generate, events, calls=count_calls(events))


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def accumulate_response(reply: Reply, *, streamed: bool) -> Any:
    if not streamed:
        response = Response.model_validate(reply.json)
        return parse_response(text_format=omit, input_tools=omit, response=response)
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    for data in read_events(reply):
        event = EVENT.validate_python(data)
        state.handle_event(event)
        last = event
    return parse_response(text_format=omit, input_tools=omit, response=last.response)


@pytest.mark.parametrize("streamed", [False, True])
@given(events=answers(), added=st.sampled_from(ADDED), nulls=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_response_can_be_sent_back(
    streamed: bool, events: list[OutputEvent], added: dict[str, Any], nulls: bool
):
    tools = [{"type": "function", **FUNCTION}]
    path, body = "/v1/responses", {"model": CARD.id, "tools": tools, "store": False}
    reply, _ = post(path, {**body, "input": "hi", "stream": streamed}, events)
    response = accumulate_response(reply, streamed=streamed)
    items = [{**added, **item.model_dump(exclude_none=not nulls)} for item in response.output]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
        for item in items
        if item["type"] == "function_call"
    ]
    cut = sum(item["type"] == "function_call" and item["status"] != "completed" for item in items)
    replay, generate = post(path, {**body, "input": [HI, *items, *outputs, HI]}, [finish()])
    assert replay.status == 200, replay.body
    messages = find_answer(generate)
    # the texts of several items are paragraphs
    content = "".join((message.content or "").replace("\n", "") for message in messages)
    assert content == join(events, TextDelta).replace("\n", "")
    reasoning = "".join((message.reasoning or "").replace("\n", "") for message in messages)
    assert reasoning == join(events, ReasoningDelta).replace("\n", "")
    assert sum(len(message.tool_calls) for message in messages) == count_calls(events) - cut


def accumulate_ollama(reply: Reply, *, streamed: bool) -> dict[str, Any]:
    """The message that ollama-python's users build: with joined text and collected calls."""
    lines = reply.body.decode().splitlines() if streamed else [reply.body.decode()]
    message: dict[str, Any] = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        part = json.loads(line)["message"]
        message["content"] += part.get("content") or ""
        message["thinking"] += part.get("thinking") or ""
        message["tool_calls"] += part.get("tool_calls") or []
    return message


@pytest.mark.parametrize("streamed", [False, True])
@given(events=answers(), added=st.sampled_from(ADDED), nulls=st.booleans())
@settings(max_examples=25, deadline=None)
def test_an_answer_of_ollamas_api_can_be_sent_back(
    streamed: bool, events: list[OutputEvent], added: dict[str, Any], nulls: bool
):
    path, body = "/api/chat", {"model": DETAILS.name, "messages": [HI], "tools": [TOOL]}
    reply, _ = post(path, {**body, "stream": streamed}, events)
    message = accumulate_ollama(reply, streamed=streamed)
    given_ = {name: value for name, value in message.items() if value or name == "role"}
    absent = dict.fromkeys(("content", "thinking", "tool_calls", "images", "tool_name"))
    turn = vary({**absent, **given_} if nulls else message, added)
    results = [{"role": "tool", "tool_name": "f", "content": "4"} for _ in turn["tool_calls"] or []]
    asked = {**body, "messages": [HI, turn, *results, HI], "stream": False}
    replay, generate = post(path, asked, [finish()])
    assert replay.status == 200, replay.body
    check_same(generate, events, calls=len(message["tool_calls"]))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
@given(events=answers(), added=st.sampled_from(ADDED))
@settings(max_examples=15, deadline=None)
def test_a_message_can_be_sent_back(
    streamed: bool, display: str, events: list[OutputEvent], added: dict[str, Any]
):
    thinking = {"type": "adaptive", "display": display}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body: Any = {"model": CARD.id, "max_tokens": 99, "tools": [tool], "thinking": thinking}
    path = "/v1/messages"
    reply, _ = post(path, {**body, "messages": [HI], "stream": streamed}, events)
    message = fold(read_events(reply)) if streamed else reply.json
    blocks = [{**added, **block} for block in message["content"]]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use["id"]} for use in uses]
    # the whole message, as some clients append it
    turns = [HI, {**message, "content": blocks}, {"role": "user", "content": [*results, TEXT]}]
    replay, generate = post(path, {**body, "messages": turns}, [finish()])
    assert replay.status == 200, replay.body
    check_same(generate, events, calls=count_calls(events))


TEXT = {"type": "text", "text": "Go on."}


@given(events=answers(), cut=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_the_part_of_a_chat_completion_that_a_client_received_can_be_sent_back(
    events: list[OutputEvent], cut: int
):
    path, body = "/v1/chat/completions", {"model": CARD.id, "messages": [HI], "tools": [TOOL]}
    reply, _ = post(path, {**body, "stream": True}, events)
    state = ChatCompletionStreamState(input_tools=[TOOL])  # pyright: ignore[reportArgumentType]
    for data in [*read_events(reply)][:cut]:
        state.handle_chunk(ChatCompletionChunk.model_validate(data))
    turn = state.current_completion_snapshot.choices[0].message.model_dump()
    calls = turn.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    replay, _ = post(path, {**body, "messages": [HI, turn, *results, HI]}, [finish()])
    assert replay.status == 200, replay.body


@given(events=answers(), cut=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_the_part_of_a_response_that_a_client_received_can_be_sent_back(
    events: list[OutputEvent], cut: int
):
    tools = [{"type": "function", **FUNCTION}]
    path, body = "/v1/responses", {"model": CARD.id, "tools": tools, "store": False}
    reply, _ = post(path, {**body, "input": "hi", "stream": True}, events)
    snapshot: Any = None
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for data in [*read_events(reply)][:cut]:
        snapshot = state.accumulate_event(EVENT.validate_python(data))
        state._ResponseStreamState__current_snapshot = snapshot
    items = [item.model_dump() for item in snapshot.output]
    replay, _ = post(path, {**body, "input": [HI, *items, HI]}, [finish()])
    assert replay.status == 200, replay.body


@given(events=answers(), cut=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_the_part_of_a_message_that_a_client_received_can_be_sent_back(
    events: list[OutputEvent], cut: int
):
    tool = {"name": "f", "input_schema": {"type": "object"}}
    path, body = "/v1/messages", {"model": CARD.id, "max_tokens": 99, "tools": [tool]}
    reply, _ = post(path, {**body, "messages": [HI], "stream": True}, events)
    message = fold(iter([*read_events(reply)][:cut]))
    replay, _ = post(path, {**body, "messages": [HI, message, HI]}, [finish()])
    assert replay.status == 200, replay.body


def fold(events: Iterator[Any]) -> dict[str, Any]:
    """The message of a stream, as Anthropic's SDK accumulates it."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case _:
                        joined = partial.get(event["index"], "") + delta["partial_json"]
                        partial[event["index"]] = joined
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(partial.get(event["index"], "") or "{}")
            case "message_delta":
                message |= event["delta"]
            case _:
                pass
    return message
