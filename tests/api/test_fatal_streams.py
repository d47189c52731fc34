"""Streams that crash a real client: none of them is ever sent, whatever the model generates.

A blank NDJSON line is a JSONDecodeError in ollama-python and LangChain. Without `message_stop`, and
with text after the complete JSON of a call, Anthropic's TypeScript library raises.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    FinishReason,
    ModelLoading,
    PrefillProgress,
    ReasoningDelta,
    ToolCallDelta,
)
from app.core.models import LayerProgress, LibraryStep
from tests.api.anthropic.requests import body as message_body
from tests.api.anthropic.requests import events
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FakeGenerate, Script, finish, text

TEXTS = st.sampled_from(["", "\n", "\n\n", " ", "a", "}", "\u2028", "\x85"]) | st.text(max_size=4)
ARGUMENTS = st.sampled_from(
    [
        "{}",
        "",
        '{"a": 1}',
        '{"a": 1} and more',
        '{"a": 1}}',
        '{"a": 1}\n\n{"b": 2}',
        '{"a": "x',
        "x",
    ]
) | st.text(max_size=6)
PROGRESS = st.sampled_from(
    [
        ModelLoading(progress=3),
        PrefillProgress(computed_tokens=0, total_tokens=9),
        PrefillProgress(computed_tokens=9, total_tokens=9),
    ]
)


def split_call(index: int, arguments: str, size: int) -> list[Event]:
    begun = ToolCallDelta(call_index=index, id=f"call_{index:024}", name="add")
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    return [begun, *(ToolCallDelta(call_index=index, arguments=piece) for piece in pieces)]


@st.composite
def scripts(draw: st.DrawFn) -> list[Any]:
    """Events of one choice in any order; at the end, or before, an error."""
    script: list[Any] = list(draw(st.lists(PROGRESS, max_size=3)))
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        match kind:
            case "text":
                script.append(text(draw(TEXTS)))
            case "reasoning":
                script.append(ReasoningDelta(text=draw(TEXTS)))
            case _:
                script += split_call(num_calls, draw(ARGUMENTS), draw(st.integers(1, 5)))
                num_calls += 1
    reasons: tuple[FinishReason, ...] = ("stop", "length", "tool_calls")
    reason = draw(st.sampled_from(reasons))
    script.append(replace(finish(reason), stop_string=draw(st.sampled_from([None, "END"]))))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(script) - 1))
        script[place:] = [AppError(ErrorKind.ENGINE, "the engine\n\nfailed")]
    return script


def read_lines(reply: Reply) -> list[Any]:
    """The objects of NDJSON; a blank line is not JSON. An error before the first line is a body."""
    if reply.status != 200:
        assert set(reply.json) == {"error"}
        return [reply.json]
    assert reply.body.endswith(b"\n")
    return [json.loads(line) for line in reply.body.removesuffix(b"\n").split(b"\n")]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@given(script=scripts())
def test_no_stream_has_a_blank_ndjson_line(path: str, script: Script) -> None:
    fields = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    reply = send_request(FakeGenerate(script), "POST", path, {"model": CARD.id, **fields})
    found = read_lines(reply)
    assert all(isinstance(line, dict) and line for line in found)
    if reply.status == 200:
        assert [line.get("done") for line in found[:-1]] == [False] * (len(found) - 1)
        assert found[-1].get("done") is True or set(found[-1]) == {"error"}


@pytest.mark.parametrize("path", ["/api/pull", "/api/create"])
@given(
    steps=st.lists(
        st.builds(LibraryStep, status=TEXTS)
        | st.just(LibraryStep(layer=LayerProgress(digest="sha256:0", total=9, completed=1)))
        | st.just(AppError(ErrorKind.MODEL_FILES, "the disk\n\nfailed")),
        min_size=1,
        max_size=5,
    )
)
def test_no_progress_of_a_library_has_a_blank_ndjson_line(path: str, steps: list[Any]) -> None:
    generate = FakeGenerate()
    generate.library.steps = steps
    body = {"model": "a/b", **({"from": CARD.id} if path == "/api/create" else {})}
    assert all(read_lines(send_request(generate, "POST", path, body)))


@given(script=scripts())
def test_no_stream_has_a_missing_message_stop(script: Script) -> None:
    """Only an error ends a stream differently."""
    generate = FakeGenerate(script)
    reply = send_request(generate, "POST", "/v1/messages", message_body(stream=True))
    if reply.status != 200:  # the error came before the first byte
        assert isinstance(script[-1], AppError)
        return
    kinds = [event["type"] for event in events(reply)]
    fails = isinstance(script[-1], AppError)
    assert kinds[-1] == ("error" if fails else "message_stop")
    assert kinds.count("message_stop") == (not fails)
    if not fails:
        assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@given(script=scripts())
def test_no_stream_has_text_after_the_complete_json_of_a_call(script: Script) -> None:
    """The pieces of each call are one JSON object with nothing after it, and text has a separate
    block."""
    reply = send_request(FakeGenerate(script), "POST", "/v1/messages", message_body(stream=True))
    if reply.status != 200 or isinstance(script[-1], AppError):
        return
    kinds: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events(reply):
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                kinds[index] = block["type"]
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                is_json = delta["type"] == "input_json_delta"
                assert is_json == (kinds[index] == "tool_use")
                if is_json:
                    arguments[index] = arguments.get(index, "") + delta["partial_json"]
            case _:
                pass
    for piece in arguments.values():
        assert isinstance(json.loads(piece), dict)
