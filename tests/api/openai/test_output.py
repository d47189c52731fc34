"""What the streams and bodies of both endpoints have in common."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.openai.chat import ChatChunkEncoder, collect_chat
from app.api.openai.completions import CompletionChunkEncoder, collect_completion
from app.api.openai.output import CompletionMetadata
from app.core.errors import AppError, ErrorKind
from app.core.events import PromptTokenIds
from tests.api.streams import choices, chunks
from tests.fakes import finish, text

HEAD = CompletionMetadata(id="x-1", created=1_700_000_000, model="m", fingerprint="fp_1")
WAYS = [(ChatChunkEncoder, collect_chat), (CompletionChunkEncoder, collect_completion)]


@pytest.mark.parametrize(("writer", "collect"), WAYS)
def test_everything_says_what_it_belongs_to(writer: Any, collect: Any):
    head = replace(HEAD, tier="default")
    told = [text("a"), finish()]
    for payload in (*chunks(writer(head), told), collect(head, told)):
        assert payload["id"] == "x-1"
        assert payload["created"] == 1_700_000_000
        assert payload["model"] == "m"
        assert payload["system_fingerprint"] == "fp_1"
        assert payload["service_tier"] == "default"
    assert "service_tier" not in collect(HEAD, told)


@pytest.mark.parametrize(("writer", "collect"), WAYS)
def test_a_stream_says_usage_only_when_asked(writer: Any, collect: Any):
    told = [text("a"), finish()]
    assert all("usage" not in chunk for chunk in chunks(writer(HEAD), told))
    *payloads, last = chunks(writer(replace(HEAD, include_usage=True)), told)
    assert all(chunk["usage"] is None for chunk in payloads)
    assert last["choices"] == []
    assert last["usage"] == collect(HEAD, told)["usage"]


@pytest.mark.parametrize(("writer", "collect"), WAYS)
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_the_counts_so_far_when_asked(writer: Any, collect: Any, include_usage: bool):
    """vLLM's continuous_usage_stats: of each choice and its prompt, in every chunk of a choice."""
    head = replace(HEAD, n=2, best_of=2, include_usage=include_usage, continuous_usage=True)
    events = [
        PromptTokenIds(prompt_index=0, token_ids=(1,) * 7),
        replace(text("a"), choice=0, token_ids=(5, 6)),
        replace(text("b"), choice=1, token_ids=(7,)),
        replace(text(""), choice=0, token_ids=(8,)),
        replace(text("c"), choice=0),
        replace(finish("length", tokens=2), choice=1),
        replace(finish("stop", tokens=4), choice=0),
    ]
    payloads = chunks(writer(head), events)
    last = payloads.pop() if include_usage else None
    assert [chunk["usage"] for chunk in payloads] == [
        {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        for count in (2, 1, 3, 2, 4)
    ]
    assert all(
        "token_ids" not in choice and "prompt_token_ids" not in chunk
        for chunk in payloads
        for choice in chunk["choices"]
    )
    if last is not None:
        assert (last["choices"], last["usage"]) == ([], collect(head, events)["usage"])


@pytest.mark.parametrize(("writer", "collect"), WAYS)
def test_choices_come_beside_each_other_and_end_each_for_itself(writer: Any, collect: Any):
    head = replace(HEAD, n=2, best_of=2, include_usage=True)
    told = [
        replace(text("a"), choice=0),
        replace(text("b"), choice=1),
        replace(finish("length"), choice=1),
        replace(text("c"), choice=0),
        replace(finish("stop"), choice=0),
    ]
    payloads = chunks(writer(head), told)
    assert [c["index"] for c in choices(payloads)] == [0, 1, 1, 0, 0]
    reasons = [(c["index"], c["finish_reason"]) for c in choices(payloads) if c["finish_reason"]]
    assert reasons == [(1, "length"), (0, "stop")]
    assert [payload["choices"] for payload in payloads].count([]) == 1
    # the counters of all stand at the last end
    assert ["timings" in payload for payload in payloads] == [False] * 4 + [True, False]
    body = collect(head, told)
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]
    assert payloads[-2]["timings"] == body["timings"]


@pytest.mark.parametrize("writer", [ChatChunkEncoder(HEAD), CompletionChunkEncoder(HEAD)])
def test_a_stream_that_breaks_off_says_why_and_ends(writer: Any):
    frames = writer.feed(text("a")) + writer.fail(AppError(ErrorKind.ENGINE, "out of memory"))
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
