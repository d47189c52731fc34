"""Answers of /v1/responses: the stream and the body are the same, and each event is as OpenAI's SDK
defines it."""

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

# The events of a stream, as OpenAI's SDK defines them.
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
    b'{"model": "m", "input": "hi"}', "m", ResponseStores().for_caller(""), context_shift=False
).echo
HEAD = ResponseMetadata(id="resp_1", created=1_700_000_000, echo=ECHO)


def think(text: str) -> ReasoningDelta:
    return ReasoningDelta(text=text)


def call(number: int, *pieces: str, name: str = "f") -> list[OutputEvent]:
    first = ToolCallDelta(call_index=number, id=f"call_{number}", name=name)
    return [first, *(ToolCallDelta(call_index=number, arguments=piece) for piece in pieces)]


def token(raw: bytes) -> TokenLogprob:
    candidate = TopLogprob(text=raw.decode(errors="replace"), token_bytes=raw, logprob=-0.5)
    return TokenLogprob(
        text=candidate.text, token_bytes=raw, logprob=-0.5, top_logprobs=(candidate,)
    )


def stream_payloads(events: list[Any], error: AppError | None = None) -> list[Any]:
    """The payloads of a stream, frame by frame; it fails at the end if there is an error."""
    stored: list[Any] = []
    frames = ResponseEventEncoder(ResponseBuilder(HEAD), stored.append)
    body = b"".join(map(frames.feed, events))
    body += frames.end() if error is None else frames.fail(error)
    payloads: list[Any] = []
    for frame in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    assert stored == ([payloads[-1]["response"]] if error is None else [])
    return payloads


def collect(events: list[Any]) -> Any:
    return collect_response(ResponseBuilder(HEAD), events)


def normalize_ids(response: Any) -> str:
    """The response as JSON, with constant ids and times."""
    text = re.sub(r'"(msg|rs|fc)_[0-9a-f]{48}"', r'"\1"', json.dumps(response))
    return re.sub(r'"completed_at": \d+', '"completed_at": 0', text)


def event_types(payloads: list[Any]) -> list[str]:
    return [payload["type"].removeprefix("response.") for payload in payloads]


def test_the_events_of_a_message_are_in_openais_order():
    assert event_types(stream_payloads([text("Hel"), text("lo"), finish()])) == [
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


def test_reasoning_and_calls_are_separate_items_in_order():
    events = [think("Hm."), text("Wait."), *call(0, '{"a":', "1}"), *call(1, name="g")]
    response = collect([*events, finish("tool_calls")])
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


def test_a_call_item_has_its_name_before_the_arguments_are_streamed():
    payloads = stream_payloads([*call(0, '{"a"', ":1}"), finish("tool_calls")])
    assert event_types(payloads)[2:-1] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert payloads[2]["item"]["name"] == "f"
    assert payloads[5]["arguments"] == '{"a":1}'


def test_a_truncated_answer_and_its_last_item_are_incomplete():
    response = collect([think("Hm."), text("Hel"), finish("length")])
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None


def test_an_answer_truncated_in_its_reasoning_has_no_message():
    response = collect([think("Hm"), finish("length")])
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_an_empty_answer_is_an_empty_message():
    (message,) = collect([finish()])["output"]
    assert message["content"][0]["text"] == ""
    assert collect([finish("length")])["output"] == []


def test_tokens_are_counted():
    usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
    timings = Timings(prefill_ns=1, decode_ns=2, total_ns=3)
    response = collect([Finish(reason="stop", usage=usage, timings=timings)])
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert response["timings"]["cache_n"] == 3


def test_logprobs_are_in_the_message_and_in_its_deltas():
    events = [
        text("", token(b"\xe4\xbd")),
        text("你", token(b"\xa0")),
        text("", token(b"END")),
        finish(),
    ]
    payloads = stream_payloads(events)
    (delta,) = (p for p in payloads if p["type"] == "response.output_text.delta")
    assert [entry["bytes"] for entry in delta["logprobs"]] == [[0xE4, 0xBD], [0xA0]]
    (message,) = payloads[-1]["response"]["output"]
    scored = message["content"][0]["logprobs"]
    assert [entry["token"] for entry in scored] == ["�", "�", "END"]
    assert scored[2]["top_logprobs"][0]["logprob"] == -0.5


def test_logprobs_of_a_message_exclude_reasoning_and_calls():
    events = [
        text("", token(b"Hm")),
        think("Hm"),
        text("a", token(b"a")),
        text("", token(b"<call>")),
        *call(0, "{}"),
        finish("tool_calls"),
    ]
    _, message, _ = collect(events)["output"]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["a"]


def test_a_failing_stream_sends_an_error_event_and_then_a_failed_event():
    error = AppError(ErrorKind.ENGINE, "out of memory")
    *_, error_event, failed = stream_payloads([text("Hel")], error)
    assert error_event["type"] == "error"
    assert error_event["message"] == error_event["error"]["message"] == "out of memory"
    assert error_event["code"] == error_event["error"]["code"] == "engine_error"
    response = failed["response"]
    assert failed["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "out of memory"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hel"
    EVENTS["error"].model_validate(error_event)
    EVENTS["failed"].model_validate(failed)
    assert failed["sequence_number"] == error_event["sequence_number"] + 1


def test_a_stream_that_fails_at_once_still_has_the_first_events():
    assert event_types(stream_payloads([], AppError(ErrorKind.ENGINE, "no"))) == [
        "created",
        "in_progress",
        "error",
        "failed",
    ]


@pytest.mark.parametrize(
    ("kind", "code"), [(ErrorKind.BUSY, "rate_limit_exceeded"), (ErrorKind.INVALID, "server_error")]
)
def test_a_response_fails_with_one_of_openais_codes(kind: ErrorKind, code: str):
    assert stream_payloads([], AppError(kind, "no"))[-1]["response"]["error"]["code"] == code


WORDS = st.text(max_size=4)
OUTPUT_PARTS = st.one_of(
    st.builds(lambda words: [think(words)], WORDS.filter(bool)),
    st.builds(lambda words: [text(words, token(words.encode()))], WORDS),
    st.lists(WORDS, max_size=3),
)


@st.composite
def answers(draw: st.DrawFn) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    calls = 0
    for part in draw(st.lists(OUTPUT_PARTS, max_size=12)):
        if all(isinstance(piece, str) for piece in part):
            events += call(calls, *(str(piece) for piece in part))
            calls += 1
        else:
            events += [piece for piece in part if not isinstance(piece, str)]
    return [*events, finish(draw(st.sampled_from(["stop", "length", "tool_calls"])))]


@given(answers())
def test_streamed_equals_collected(events: list[OutputEvent]):
    payloads = stream_payloads(events)
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    for type_, payload in zip(event_types(payloads), payloads, strict=True):
        EVENTS[type_].model_validate(payload)
    response = payloads[-1]["response"]
    assert normalize_ids(response) == normalize_ids(collect(events))
    done = [p["item"] for p in payloads if p["type"] == "response.output_item.done"]
    assert response["output"] == done
    assert [p["output_index"] for p in payloads if p["type"].endswith("item.added")] == list(
        range(len(done))
    )


@given(answers())
def test_the_deltas_of_each_item_add_up_to_it(events: list[OutputEvent]):
    payloads = stream_payloads(events)
    for index, item in enumerate(payloads[-1]["response"]["output"]):
        pieces = "".join(
            p["delta"] for p in payloads if "delta" in p and p["output_index"] == index
        )
        if item["type"] == "function_call":
            assert pieces == item["arguments"]
        else:
            (part,) = item["content"]
            assert pieces == part["text"]


@given(answers())
def test_no_output_is_lost(events: list[OutputEvent]):
    """The texts of all events equal the texts of all items."""
    expected = "".join(
        event.arguments if isinstance(event, ToolCallDelta) else event.text
        for event in events
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)
    )
    output = collect(events)["output"]
    assert expected == "".join(
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in output
    )
