"""How a message is written, whole and streamed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.chat import ChatChunkEncoder, collect_chat
from app.api.openai.output import CompletionMetadata
from app.core.events import (
    Finish,
    OutputEvent,
    PromptTokenIds,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from tests.api.streams import choices, chunks, message
from tests.fakes import finish, text

HEAD = CompletionMetadata(id="x-1", created=1_700_000_000, model="m", fingerprint="fp_1")
LOGPROBS = CompletionMetadata(
    id="x-1", created=1_700_000_000, model="m", fingerprint="fp_1", logprobs=True
)
IDS = CompletionMetadata(
    id="x-1", created=1_700_000_000, model="m", fingerprint="fp_1", return_token_ids=True
)


def token(raw: bytes, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(
        text=raw.decode(errors="replace"), token_bytes=raw, logprob=logprob, top_logprobs=()
    )


def call(place: int, name: str, *pieces: str, choice: int = 0) -> list[ToolCallDelta]:
    first, *rest = pieces or ("",)
    begun = ToolCallDelta(
        choice=choice, call_index=place, id=f"call_{place}", name=name, arguments=first
    )
    return [
        begun,
        *(ToolCallDelta(choice=choice, call_index=place, arguments=piece) for piece in rest),
    ]


def deltas(head: CompletionMetadata, *events: OutputEvent) -> list[Any]:
    return [choice["delta"] for choice in choices(chunks(ChatChunkEncoder(head), events))]


def test_the_role_comes_once_and_with_the_first_text():
    assert deltas(HEAD, text("a"), text("b"), finish()) == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]


def test_an_answer_without_text_still_has_a_role():
    (only,) = choices(chunks(ChatChunkEncoder(HEAD), [finish()]))
    assert only["delta"] == {"role": "assistant"}
    assert only["finish_reason"] == "stop"


def test_thoughts_have_two_names():
    told = [ReasoningDelta(text="Hm"), ReasoningDelta(text="."), text("a"), finish()]
    assert deltas(HEAD, *told) == [
        {"role": "assistant", "reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": ".", "reasoning": "."},
        {"content": "a"},
        {},
    ]
    assert collect_chat(HEAD, told)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }


def test_a_call_begins_with_its_name_and_no_arguments():
    assert deltas(HEAD, *call(0, "f", '{"a"', ": 1}"), *call(1, "g"), finish("tool_calls")) == [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "f", "arguments": ""},
                }
            ],
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {
            "tool_calls": [
                {
                    "index": 1,
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "g", "arguments": ""},
                }
            ]
        },
        {},
    ]


def test_calls_without_text_leave_the_content_null():
    told = [*call(0, "f", "{", "}"), finish("tool_calls")]
    (choice,) = collect_chat(HEAD, told)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    said = collect_chat(HEAD, [text("Wait."), *told])["choices"][0]["message"]
    assert said["content"] == "Wait."
    assert collect_chat(HEAD, [finish()])["choices"][0]["message"]["content"] == ""


def test_logprobs_wait_for_the_next_thing_said_so_that_no_text_is_empty():
    held = ChatChunkEncoder(LOGPROBS)
    assert held.feed(text("", token(b"\xe4"))) == b""
    told = [text("ä", token(b"\xbd\xa0")), text("", token(b"<")), *call(0, "f")]
    told += [text("", token(b"!")), finish("tool_calls")]
    first, named, last = choices(chunks(held, told))
    assert [entry["bytes"] for entry in first["logprobs"]["content"]] == [[0xE4], [0xBD, 0xA0]]
    assert [entry["token"] for entry in named["logprobs"]["content"]] == ["<"]
    assert [entry["token"] for entry in last["logprobs"]["content"]] == ["!"]
    assert last["delta"] == {}


def test_logprobs_that_were_asked_for_are_there_even_if_nothing_was_said():
    empty = {"content": [], "refusal": None}
    assert collect_chat(LOGPROBS, [finish()])["choices"][0]["logprobs"] == empty
    assert collect_chat(HEAD, [finish()])["choices"][0]["logprobs"] is None


def test_what_stopped_an_answer_is_told():
    end = Finish(
        reason="stop", usage=finish().usage, timings=finish().timings, stop_string="\n\nHuman:"
    )
    assert collect_chat(HEAD, [text("a"), end])["choices"][0]["stop_reason"] == "\n\nHuman:"
    *_, last = choices(chunks(ChatChunkEncoder(HEAD), [text("a"), end]))
    assert last["stop_reason"] == "\n\nHuman:"
    assert collect_chat(HEAD, [finish()])["choices"][0]["stop_reason"] is None


def test_ids_are_those_of_the_prompt_once_and_of_the_answer_as_it_comes():
    told = [
        PromptTokenIds(token_ids=(5, 6)),
        TextDelta(text="", token_ids=(7,)),
        TextDelta(text="a", token_ids=(8,)),
        TextDelta(text="", token_ids=(9,)),
        finish(),
    ]
    first, last = chunks(ChatChunkEncoder(IDS), told)
    assert first["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in last
    assert [choices([chunk])[0]["token_ids"] for chunk in (first, last)] == [[7, 8], [9]]
    body = collect_chat(IDS, told)
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ((5, 6), [7, 8, 9])


@st.composite
def answers(draw: st.DrawFn, choice: int) -> list[OutputEvent]:
    """What one choice may say: pieces of text, thoughts and calls, in any order."""
    events: list[OutputEvent] = []
    begun = 0
    for kind in draw(st.lists(st.sampled_from(["text", "held", "thought", "call", "more"]))):
        words = draw(st.text(min_size=1, max_size=3))
        logprobs = tuple(token(raw) for raw in draw(st.lists(st.binary(min_size=1, max_size=2))))
        match kind:
            case "text":
                events.append(TextDelta(choice=choice, text=words, logprobs=logprobs))
            case "held":
                events.append(TextDelta(choice=choice, text="", logprobs=logprobs, token_ids=(1,)))
            case "thought":
                events.append(ReasoningDelta(choice=choice, text=words))
            case "call":
                events += call(begun, "f", draw(st.sampled_from(["", words])), choice=choice)
                begun += 1
            case _ if begun:
                events.append(ToolCallDelta(choice=choice, call_index=begun - 1, arguments=words))
            case _:
                pass
    reason: Any = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    usage = finish(tokens=draw(st.integers(0, 9))).usage
    stop = draw(st.sampled_from([None, "END"]))
    end = Finish(
        choice=choice, reason=reason, usage=usage, timings=finish().timings, stop_string=stop
    )
    return [*events, end]


@st.composite
def interleaved(draw: st.DrawFn, count: int) -> list[OutputEvent]:
    """Choices beside each other, each in its own order."""
    lines = [draw(answers(choice)) for choice in range(count)]
    told: list[OutputEvent] = []
    while any(lines):
        told.append(draw(st.sampled_from([line for line in lines if line])).pop(0))
    return told


@pytest.mark.parametrize("count", [1, 3])
@given(data=st.data())
def test_streamed_equals_collected(count: int, data: st.DataObject):
    """Joining what was streamed gives the body: messages, logprobs, reasons, usage, counters."""
    told = data.draw(interleaved(count))
    head = CompletionMetadata(
        id="x-1",
        created=0,
        model="m",
        fingerprint="fp",
        n=count,
        best_of=count,
        logprobs=True,
        include_usage=True,
    )
    *payloads, usage = chunks(ChatChunkEncoder(head), told)
    body = collect_chat(head, told)
    for whole in body["choices"]:
        pieces = choices(payloads, whole["index"])
        assert all(piece["delta"].get("content") != "" for piece in pieces)
        joined = {"content": None if "tool_calls" in message(pieces) else "", **message(pieces)}
        assert {**joined, "refusal": None} == whole["message"]
        assert [piece["delta"].get("role") for piece in pieces].count("assistant") == 1
        entries = [e for piece in pieces for e in (piece["logprobs"] or {"content": []})["content"]]
        assert entries == whole["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        for name in ("finish_reason", "stop_reason"):
            assert pieces[-1][name] == whole[name]
    assert usage["choices"] == []
    assert usage["usage"] == body["usage"]
    assert payloads[-1]["timings"] == body["timings"]
    counters = {name for name in body if name.endswith(("count", "duration"))}
    assert {name: payloads[-1][name] for name in counters} == {n: body[n] for n in counters}
    assert all("timings" not in payload for payload in payloads[:-1])
