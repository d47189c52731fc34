"""Chat completions: bodies and streams."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.output import ChatChunkEncoder, CompletionMetadata, collect_chat
from app.core.events import (
    Finish,
    OutputEvent,
    PrefillProgress,
    PromptTokenIds,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from app.core.settings import Settings
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


def call(index: int, name: str, *pieces: str, choice: int = 0) -> list[ToolCallDelta]:
    first, *rest = pieces or ("",)
    start = ToolCallDelta(
        choice=choice, call_index=index, id=f"call_{index}", name=name, arguments=first
    )
    return [
        start,
        *(ToolCallDelta(choice=choice, call_index=index, arguments=piece) for piece in rest),
    ]


def deltas(head: CompletionMetadata, *events: OutputEvent) -> list[Any]:
    return [choice["delta"] for choice in choices(chunks(ChatChunkEncoder(head), events))]


BEGIN = {"role": "assistant", "content": ""}


def test_each_choice_begins_with_its_role_and_empty_content():
    assert deltas(HEAD, text("a"), text("b"), finish()) == [
        BEGIN,
        {"content": "a"},
        {"content": "b"},
        {},
    ]


def test_nothing_is_sent_before_the_first_output():
    """Clients measure the time to the first chunk, and an error can still set the status."""
    encoder = ChatChunkEncoder(HEAD)
    assert encoder.feed(text("")) == b""
    assert encoder.feed(text("a")).count(b"data: ") == 2


def test_an_answer_without_text_still_has_a_role():
    first, last = choices(chunks(ChatChunkEncoder(HEAD), [finish()]))
    assert (first["delta"], last["delta"]) == (BEGIN, {})
    assert (first["finish_reason"], last["finish_reason"]) == (None, "stop")


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("reasoning_content", ["reasoning_content"]),
        ("reasoning", ["reasoning"]),
        ("both", ["reasoning_content", "reasoning"]),
    ],
)
def test_reasoning_is_sent_under_the_name_of_the_server(setting: Any, names: list[str]):
    head = replace(HEAD, reasoning_field=setting)
    events = [ReasoningDelta(text="Hm"), ReasoningDelta(text="."), text("a"), finish()]
    assert deltas(head, *events) == [
        BEGIN,
        dict.fromkeys(names, "Hm"),
        dict.fromkeys(names, "."),
        {"content": "a"},
        {},
    ]
    message = collect_chat(head, events)["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        **dict.fromkeys(names, "Hm."),
    }


def test_reasoning_has_one_name_by_default():
    """LiteLLM and kimi-code join the texts of both names."""
    assert Settings().reasoning_field == HEAD.reasoning_field == "reasoning_content"


def test_a_tool_call_starts_with_its_name_and_no_arguments():
    assert deltas(HEAD, *call(0, "f", '{"a"', ": 1}"), *call(1, "g"), finish("tool_calls")) == [
        BEGIN,
        {
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


def test_tool_calls_without_text_have_null_content():
    events = [*call(0, "f", "{", "}"), finish("tool_calls")]
    (choice,) = collect_chat(HEAD, events)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    with_text = collect_chat(HEAD, [text("Wait."), *events])["choices"][0]["message"]
    assert with_text["content"] == "Wait."
    assert collect_chat(HEAD, [finish()])["choices"][0]["message"]["content"] == ""


def test_logprobs_are_held_back_until_the_next_delta_so_that_no_content_is_empty():
    encoder = ChatChunkEncoder(LOGPROBS)
    assert encoder.feed(text("", token(b"\xe4"))) == b""
    events = [text("ä", token(b"\xbd\xa0")), text("", token(b"<")), *call(0, "f")]
    events += [text("", token(b"!")), finish("tool_calls")]
    _, first, named, last = choices(chunks(encoder, events))
    assert [entry["bytes"] for entry in first["logprobs"]["content"]] == [[0xE4], [0xBD, 0xA0]]
    assert [entry["token"] for entry in named["logprobs"]["content"]] == ["<"]
    assert [entry["token"] for entry in last["logprobs"]["content"]] == ["!"]
    assert last["delta"] == {}


def test_requested_logprobs_are_present_even_in_an_empty_answer():
    empty = {"content": [], "refusal": None}
    assert collect_chat(LOGPROBS, [finish()])["choices"][0]["logprobs"] == empty
    assert collect_chat(HEAD, [finish()])["choices"][0]["logprobs"] is None


def test_stop_reason_is_the_matched_stop_string():
    end = Finish(
        reason="stop", usage=finish().usage, timings=finish().timings, stop_string="\n\nHuman:"
    )
    assert collect_chat(HEAD, [text("a"), end])["choices"][0]["stop_reason"] == "\n\nHuman:"
    *_, last = choices(chunks(ChatChunkEncoder(HEAD), [text("a"), end]))
    assert last["stop_reason"] == "\n\nHuman:"
    assert collect_chat(HEAD, [finish()])["choices"][0]["stop_reason"] is None
    by_token = replace(finish(), stop_token_id=7)
    assert collect_chat(HEAD, [by_token])["choices"][0]["stop_reason"] == 7


def test_prompt_token_ids_are_sent_once_and_token_ids_with_each_chunk():
    events = [
        PromptTokenIds(token_ids=(5, 6)),
        TextDelta(text="", token_ids=(7,)),
        TextDelta(text="a", token_ids=(8,)),
        TextDelta(text="", token_ids=(9,)),
        finish(),
    ]
    begin, first, last = chunks(ChatChunkEncoder(IDS), events)
    assert begin["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in first
    ids = [choices([chunk])[0]["token_ids"] for chunk in (begin, first, last)]
    assert ids == [[], [7, 8], [9]]
    body = collect_chat(IDS, events)
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ((5, 6), [7, 8, 9])


@st.composite
def answers(draw: st.DrawFn, choice: int) -> list[OutputEvent]:
    """The events of one choice: text, reasoning and tool calls, in any order."""
    events: list[OutputEvent] = []
    num_calls = 0
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
                events += call(num_calls, "f", draw(st.sampled_from(["", words])), choice=choice)
                num_calls += 1
            case _ if num_calls:
                events.append(
                    ToolCallDelta(choice=choice, call_index=num_calls - 1, arguments=words)
                )
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
def interleave(draw: st.DrawFn, count: int) -> list[OutputEvent]:
    """The events of several choices, interleaved; each choice's events stay in order."""
    remaining = [draw(answers(choice)) for choice in range(count)]
    events: list[OutputEvent] = []
    while any(remaining):
        events.append(draw(st.sampled_from([choice for choice in remaining if choice])).pop(0))
    return events


@pytest.mark.parametrize("count", [1, 3])
@given(data=st.data())
def test_streamed_equals_collected(count: int, data: st.DataObject):
    """The joined stream equals the body: messages, logprobs, finish reasons, usage, counters."""
    events = data.draw(interleave(count))
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
    *payloads, usage = chunks(ChatChunkEncoder(head), events)
    body = collect_chat(head, events)
    for choice in body["choices"]:
        pieces = choices(payloads, choice["index"])
        assert pieces[0]["delta"] == BEGIN
        assert all(piece["delta"].get("content") != "" for piece in pieces[1:])
        joined = message(pieces)
        if "tool_calls" in joined:
            joined["content"] = joined["content"] or None
        assert {**joined, "refusal": None} == choice["message"]
        assert [piece["delta"].get("role") for piece in pieces].count("assistant") == 1
        entries = [e for piece in pieces for e in (piece["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        for name in ("finish_reason", "stop_reason"):
            assert pieces[-1][name] == choice[name]
    assert usage["choices"] == []
    assert usage["usage"] == body["usage"]
    assert payloads[-1]["timings"] == body["timings"]
    counters = {name for name in body if name.endswith(("count", "duration"))}
    assert {name: payloads[-1][name] for name in counters} == {n: body[n] for n in counters}
    assert all("timings" not in payload for payload in payloads[:-1])


def test_progress_is_streamed_in_llama_cpps_format():
    encoder = ChatChunkEncoder(replace(HEAD, return_progress=True))
    frames = [
        encoder.progress(PrefillProgress(computed_tokens=done, total_tokens=9)) for done in (4, 9)
    ]
    reports = [orjson.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert [report["choices"] for report in reports] == [[], []]
    progress = [report["prompt_progress"] for report in reports]
    assert [(p["total"], p["cache"], p["processed"]) for p in progress] == [(9, 4, 4), (9, 4, 9)]
    comment = ChatChunkEncoder(HEAD).progress(PrefillProgress(computed_tokens=4, total_tokens=9))
    assert comment.startswith(b": ")
