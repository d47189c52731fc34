"""Answers of /v1/responses: what is streamed and what is collected are the same, event by event as
OpenAI's SDK defines them."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as sdk
from pydantic import BaseModel

from app.api.responses.events import (
    ResponseBuilder,
    ResponseEventEncoder,
    ResponseMetadata,
    collect_response,
)
from app.api.responses.request import parse_responses_request
from app.api.responses.store import ResponseStores
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Finish,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from tests.fakes import finish, text

# How OpenAI's SDK defines what a stream may say.
EVENTS: dict[str, type[BaseModel]] = {
    "created": sdk.ResponseCreatedEvent,
    "in_progress": sdk.ResponseInProgressEvent,
    "output_item.added": sdk.ResponseOutputItemAddedEvent,
    "content_part.added": sdk.ResponseContentPartAddedEvent,
    "output_text.delta": sdk.ResponseTextDeltaEvent,
    "output_text.done": sdk.ResponseTextDoneEvent,
    "reasoning_text.delta": sdk.ResponseReasoningTextDeltaEvent,
    "reasoning_text.done": sdk.ResponseReasoningTextDoneEvent,
    "function_call_arguments.delta": sdk.ResponseFunctionCallArgumentsDeltaEvent,
    "function_call_arguments.done": sdk.ResponseFunctionCallArgumentsDoneEvent,
    "content_part.done": sdk.ResponseContentPartDoneEvent,
    "output_item.done": sdk.ResponseOutputItemDoneEvent,
    "completed": sdk.ResponseCompletedEvent,
    "incomplete": sdk.ResponseIncompleteEvent,
    "failed": sdk.ResponseFailedEvent,
    "error": sdk.ResponseErrorEvent,
}
ECHO = parse_responses_request(
    {"model": "m", "input": "hi"}, "m", ResponseStores().for_caller(""), context_shift=False
).echo
HEAD = ResponseMetadata(id="resp_1", created=1_700_000_000, echo=ECHO)


def think(said: str) -> ReasoningDelta:
    return ReasoningDelta(text=said)


def call(number: int, *pieces: str, name: str = "f") -> list[OutputEvent]:
    first = ToolCallDelta(call_index=number, id=f"call_{number}", name=name)
    return [first, *(ToolCallDelta(call_index=number, arguments=piece) for piece in pieces)]


def token(raw: bytes) -> TokenLogprob:
    said = TopLogprob(text=raw.decode(errors="replace"), token_bytes=raw, logprob=-0.5)
    return TokenLogprob(text=said.text, token_bytes=raw, logprob=-0.5, top_logprobs=(said,))


def told(events: list[Any], error: AppError | None = None) -> list[Any]:
    """What a stream says, frame by frame; it breaks off where there is an error."""
    kept: list[Any] = []
    frames = ResponseEventEncoder(ResponseBuilder(HEAD), kept.append)
    said = b"".join(map(frames.feed, events))
    said += frames.end() if error is None else frames.fail(error)
    payloads: list[Any] = []
    for frame in said.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    assert kept == ([payloads[-1]["response"]] if error is None else [])
    return payloads


def whole(events: list[Any]) -> Any:
    return collect_response(ResponseBuilder(HEAD), events)


def anonymous(response: Any) -> str:
    """Without what differs from answer to answer."""
    text = re.sub(r'"(msg|rs|fc)_[0-9a-f]{48}"', r'"\1"', json.dumps(response))
    return re.sub(r'"completed_at": \d+', '"completed_at": 0', text)


def types(payloads: list[Any]) -> list[str]:
    return [payload["type"].removeprefix("response.") for payload in payloads]


def test_a_message_comes_in_the_order_of_openai():
    assert types(told([text("Hel"), text("lo"), finish()])) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_reasoning_and_calls_are_items_of_their_own_in_the_order_in_which_they_were_said():
    said = [think("Hm."), text("Wait."), *call(0, '{"a":', "1}"), *call(1, name="g")]
    response = whole([*said, finish("tool_calls")])
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    thought, message, first, second = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert thought["summary"] == []
    assert message["content"][0]["text"] == "Wait."
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_0", "f", '{"a":1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_1", "g", "")
    assert response["status"] == "completed"
    assert len({item["id"] for item in response["output"]}) == 4


def test_a_call_is_named_before_its_arguments_come():
    payloads = told([*call(0, '{"a"', ":1}"), finish("tool_calls")])
    assert types(payloads)[2:-1] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert payloads[2]["item"]["name"] == "f"
    assert payloads[5]["arguments"] == '{"a":1}'


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item():
    response = whole([think("Hm."), text("Hel"), finish("length")])
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None


def test_an_answer_that_was_cut_amid_reasoning_has_no_message():
    response = whole([think("Hm"), finish("length")])
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_an_answer_that_says_nothing_is_an_empty_message():
    (message,) = whole([finish()])["output"]
    assert message["content"][0]["text"] == ""
    assert whole([finish("length")])["output"] == []


def test_tokens_are_counted():
    usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
    timings = Timings(prefill_ns=1, decode_ns=2, total_ns=3)
    response = whole([Finish(reason="stop", usage=usage, timings=timings)])
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert response["timings"]["cache_n"] == 3


def test_logprobs_stand_in_the_message_and_in_its_deltas():
    events = [
        text("", token(b"\xe4\xbd")),
        text("你", token(b"\xa0")),
        text("", token(b"END")),
        finish(),
    ]
    payloads = told(events)
    (delta,) = (p for p in payloads if p["type"] == "response.output_text.delta")
    assert [entry["bytes"] for entry in delta["logprobs"]] == [[0xE4, 0xBD], [0xA0]]
    (message,) = payloads[-1]["response"]["output"]
    scored = message["content"][0]["logprobs"]
    assert [entry["token"] for entry in scored] == ["�", "�", "END"]
    assert scored[2]["top_logprobs"][0]["logprob"] == -0.5


def test_tokens_of_reasoning_and_of_calls_are_not_those_of_a_message():
    events = [
        text("", token(b"Hm")),
        think("Hm"),
        text("a", token(b"a")),
        text("", token(b"<call>")),
        *call(0, "{}"),
        finish("tool_calls"),
    ]
    _, message, _ = whole(events)["output"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["a"]


def test_a_stream_that_breaks_off_tells_the_error_and_then_that_it_failed():
    error = AppError(ErrorKind.ENGINE, "out of memory")
    *_, said, failed = told([text("Hel")], error)
    assert said["type"] == "error"
    assert said["message"] == said["error"]["message"] == "out of memory"
    assert said["code"] == said["error"]["code"] == "engine_error"
    response = failed["response"]
    assert failed["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "out of memory"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hel"
    EVENTS["error"].model_validate(said)
    EVENTS["failed"].model_validate(failed)
    assert failed["sequence_number"] == said["sequence_number"] + 1


def test_a_stream_that_breaks_off_at_once_still_begins():
    assert types(told([], AppError(ErrorKind.ENGINE, "no"))) == [
        "created",
        "in_progress",
        "error",
        "failed",
    ]


@pytest.mark.parametrize(
    ("kind", "code"), [(ErrorKind.BUSY, "rate_limit_exceeded"), (ErrorKind.INVALID, "server_error")]
)
def test_a_response_fails_with_one_of_openais_codes(kind: ErrorKind, code: str):
    assert told([], AppError(kind, "no"))[-1]["response"]["error"]["code"] == code


WORDS = st.text(max_size=4)
SPOKEN = st.one_of(
    st.builds(lambda said: [think(said)], WORDS.filter(bool)),
    st.builds(lambda said: [text(said, token(said.encode()))], WORDS),
    st.lists(WORDS, max_size=3),
)


@st.composite
def answers(draw: st.DrawFn) -> list[OutputEvent]:
    said: list[OutputEvent] = []
    calls = 0
    for part in draw(st.lists(SPOKEN, max_size=12)):
        if all(isinstance(piece, str) for piece in part):
            said += call(calls, *(str(piece) for piece in part))
            calls += 1
        else:
            said += [piece for piece in part if not isinstance(piece, str)]
    return [*said, finish(draw(st.sampled_from(["stop", "length", "tool_calls"])))]


@given(answers())
def test_whatever_is_said_is_streamed_as_it_is_collected(events: list[OutputEvent]):
    payloads = told(events)
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    for type_, payload in zip(types(payloads), payloads, strict=True):
        EVENTS[type_].model_validate(payload)
    response = payloads[-1]["response"]
    assert anonymous(response) == anonymous(whole(events))
    done = [p["item"] for p in payloads if p["type"] == "response.output_item.done"]
    assert response["output"] == done
    assert [p["output_index"] for p in payloads if p["type"].endswith("item.added")] == list(
        range(len(done))
    )


@given(answers())
def test_the_pieces_of_each_item_are_its_whole(events: list[OutputEvent]):
    payloads = told(events)
    for place, item in enumerate(payloads[-1]["response"]["output"]):
        pieces = "".join(
            p["delta"] for p in payloads if "delta" in p and p["output_index"] == place
        )
        if item["type"] == "function_call":
            assert pieces == item["arguments"]
        else:
            (part,) = item["content"]
            assert pieces == part["text"]


@given(answers())
def test_nothing_that_was_said_is_lost(events: list[OutputEvent]):
    """All texts in a row, as they were said."""
    said = "".join(
        event.arguments if isinstance(event, ToolCallDelta) else event.text
        for event in events
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)
    )
    output = whole(events)["output"]
    assert said == "".join(
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in output
    )
