"""How answers are written, whole and streamed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.dialects.openai_reply import (
    ChatChunks,
    CompletionChunks,
    Head,
    collect_chat,
    collect_completion,
)
from app.core.errors import AppError, Kind
from app.core.events import Finish, TextDelta, TokenLogprob, TopLogprob
from tests.fakes import finish, text

HEAD = Head(id="x-1", created=1_700_000_000, model="m", logprobs=True, include_usage=True)
PLAIN = Head(id="x-1", created=1_700_000_000, model="m", logprobs=False)


def token(raw: bytes, logprob: float = -0.5, *top: TopLogprob) -> TokenLogprob:
    return TokenLogprob(text=raw.decode(errors="replace"), raw=raw, logprob=logprob, top=top)


def rival(raw: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(text=raw.decode(errors="replace"), raw=raw, logprob=logprob)


def stream(writer: Any, *events: TextDelta | Finish) -> list[Any]:
    """The payloads of a stream that ends as it should."""
    frames = b"".join(map(writer.feed, events)).decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def choices(chunks: list[Any]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_the_role_comes_once_and_with_the_first_text():
    deltas = [
        c["delta"] for c in choices(stream(ChatChunks(PLAIN), text("a"), text("b"), finish()))
    ]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]


def test_an_answer_without_text_still_has_a_role():
    (only,) = choices(stream(ChatChunks(PLAIN), finish()))
    assert only["delta"] == {"role": "assistant"}
    assert only["finish_reason"] == "stop"


def test_a_stream_says_usage_only_when_asked():
    assert all("usage" not in chunk for chunk in stream(ChatChunks(PLAIN), text("a"), finish()))
    *chunks, last = stream(ChatChunks(HEAD), text("a"), finish())
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_logprobs_wait_for_the_next_text_so_that_no_text_is_empty():
    held = ChatChunks(HEAD)
    assert held.feed(text("", token(b"\xe4"))) == b""
    first, last = choices(
        stream(held, text("ä", token(b"\xbd\xa0")), text("", token(b"!")), finish())
    )
    assert [entry["bytes"] for entry in first["logprobs"]["content"]] == [[0xE4], [0xBD, 0xA0]]
    assert [entry["token"] for entry in last["logprobs"]["content"]] == ["!"]
    assert last["delta"] == {}


def test_rivals_stand_beside_the_token():
    body = collect_chat(HEAD, [text("a", token(b"a", -0.5, rival(b"a", -0.5))), finish()])
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
            }
        ],
        "refusal": None,
    }


def test_logprobs_that_were_asked_for_are_there_even_if_nothing_was_said():
    assert collect_chat(HEAD, [finish()])["choices"][0]["logprobs"] == {
        "content": [],
        "refusal": None,
    }
    assert collect_chat(PLAIN, [finish()])["choices"][0]["logprobs"] is None


def test_an_infinite_logprob_is_written_as_a_number():
    body = collect_chat(HEAD, [text("a", token(b"a", float("-inf"))), finish()])
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_completions_have_four_lists():
    events = [
        text("one", token(b"one", -0.1, rival(b"one", -0.1), rival(b"two", -2.0))),
        text("", token(b"\xe4", -0.2, rival(b"\xe5", -0.3))),
        text("你!", token(b"\xbd\xa0", -0.4), token(b"!", -0.5)),
        finish(),
    ]
    assert collect_completion(HEAD, events)["choices"][0]["logprobs"] == {
        "tokens": ["one", "bytes:\\xe4", "bytes:\\xbd\\xa0", "!"],
        "token_logprobs": [-0.1, -0.2, -0.4, -0.5],
        "top_logprobs": [
            {"one": -0.1, "two": -2.0},
            {"bytes:\\xe5": -0.3, "bytes:\\xe4": -0.2},
            {"bytes:\\xbd\\xa0": -0.4},
            {"!": -0.5},
        ],
        "text_offset": [0, 3, 3, 4],
    }


@pytest.mark.parametrize("writer", [ChatChunks(HEAD), CompletionChunks(HEAD)])
def test_a_stream_that_breaks_off_says_why_and_ends(writer: Any):
    frames = writer.feed(text("a")) + writer.fail(AppError(Kind.ENGINE, "out of memory"))
    *_, problem, done, _ = frames.decode().split("\n\n")
    assert json.loads(problem.removeprefix("data: ")) == {
        "error": {
            "message": "out of memory",
            "type": "api_error",
            "param": None,
            "code": "engine_error",
        }
    }
    assert done == "data: [DONE]"


tokens = st.builds(token, st.binary(min_size=1, max_size=3), st.floats(-20, 0))
deltas = st.builds(text, st.text(max_size=3), tokens) | st.builds(text, st.text(min_size=1))


@given(st.lists(deltas), st.sampled_from(["stop", "length"]))
def test_streamed_equals_collected(events: list[TextDelta], reason: Any):
    """Joining what was streamed gives the body: text, logprobs, reason, usage and counters."""
    told: list[TextDelta | Finish] = [*events, finish(reason)]
    *chunks, usage = stream(ChatChunks(HEAD), *told)
    body = collect_chat(HEAD, told)
    message, logprobs = body["choices"][0]["message"], body["choices"][0]["logprobs"]
    pieces = choices(chunks)
    assert all(piece["delta"].get("content") != "" for piece in pieces)
    assert [piece["delta"].get("role") for piece in pieces].count("assistant") == 1
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == message["content"]
    assert [
        entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]
    ] == logprobs["content"]
    assert pieces[-1]["finish_reason"] == body["choices"][0]["finish_reason"]
    assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    assert usage["usage"] == body["usage"]
    assert {k: v for k, v in chunks[-1].items() if k.endswith(("count", "duration"))} == {
        k: v for k, v in body.items() if k.endswith(("count", "duration"))
    }


@given(st.lists(deltas))
def test_streamed_completions_equal_collected_ones(events: list[TextDelta]):
    told: list[TextDelta | Finish] = [*events, finish()]
    pieces = choices(stream(CompletionChunks(HEAD), *told))
    body = collect_completion(HEAD, told)["choices"][0]
    assert "".join(piece["text"] for piece in pieces) == body["text"]
    assert all(piece["text"] for piece in pieces[:-1])
    for name, column in body["logprobs"].items():
        streamed = [item for p in pieces if p["logprobs"] for item in p["logprobs"][name]]
        assert streamed == column
