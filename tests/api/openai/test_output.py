"""Properties that streams and bodies of both endpoints share."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.api.openai.output import (
    ChatChunkEncoder,
    CompletionChunkEncoder,
    CompletionMetadata,
    collect_chat,
    collect_completion,
)
from app.core.errors import AppError, ErrorKind
from app.core.events import PromptTokenIds
from tests.api.streams import choices, chunks
from tests.fakes import finish, text

HEAD = CompletionMetadata(id="x-1", created=1_700_000_000, model="m", fingerprint="fp_1")
ENCODERS = [(ChatChunkEncoder, collect_chat), (CompletionChunkEncoder, collect_completion)]


@pytest.mark.parametrize(("encoder", "collect"), ENCODERS)
def test_every_payload_has_the_metadata_of_its_completion(encoder: Any, collect: Any):
    head = replace(HEAD, tier="default")
    events = [text("a"), finish()]
    for payload in (*chunks(encoder(head), events), collect(head, events)):
        assert payload["id"] == "x-1"
        assert payload["created"] == 1_700_000_000
        assert payload["model"] == "m"
        assert payload["system_fingerprint"] == "fp_1"
        assert payload["service_tier"] == "default"
    assert "service_tier" not in collect(HEAD, events)


@pytest.mark.parametrize(("encoder", "collect"), ENCODERS)
def test_a_stream_has_usage_only_if_requested(encoder: Any, collect: Any):
    events = [text("a"), finish()]
    assert all("usage" not in chunk for chunk in chunks(encoder(HEAD), events))
    *payloads, last = chunks(encoder(replace(HEAD, include_usage=True)), events)
    assert all(chunk["usage"] is None for chunk in payloads)
    assert last["choices"] == []
    assert last["usage"] == collect(HEAD, events)["usage"]


def skip_begins(payloads: list[Any]) -> list[Any]:
    """Without the chunks that begin the choices of a chat completion. No token precedes them."""
    begins = [c for c in payloads if c["choices"] and "role" in c["choices"][0].get("delta", {})]
    usages = [chunk.get("usage") for chunk in begins]
    assert all(usage is None or usage["completion_tokens"] == 0 for usage in usages)
    return [chunk for chunk in payloads if chunk not in begins]


@pytest.mark.parametrize(("encoder", "collect"), ENCODERS)
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_continuous_usage_if_requested(
    encoder: Any, collect: Any, include_usage: bool
):
    """vLLM's continuous_usage_stats: the usage of a choice and its prompt in each of its chunks."""
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
    payloads = skip_begins(chunks(encoder(head), events))
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


@pytest.mark.parametrize(("encoder", "collect"), ENCODERS)
def test_choices_are_interleaved_and_each_has_its_finish_reason(encoder: Any, collect: Any):
    head = replace(HEAD, n=2, best_of=2, include_usage=True)
    events = [
        replace(text("a"), choice=0),
        replace(text("b"), choice=1),
        replace(finish("length"), choice=1),
        replace(text("c"), choice=0),
        replace(finish("stop"), choice=0),
    ]
    payloads = skip_begins(chunks(encoder(head), events))
    assert [c["index"] for c in choices(payloads)] == [0, 1, 1, 0, 0]
    reasons = [(c["index"], c["finish_reason"]) for c in choices(payloads) if c["finish_reason"]]
    assert reasons == [(1, "length"), (0, "stop")]
    assert [payload["choices"] for payload in payloads].count([]) == 1
    # the chunk of the last finish has the counters of all choices, and the usage chunk has the
    # timings
    assert ["timings" in payload for payload in payloads] == [False] * 4 + [True, True]
    body = collect(head, events)
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]
    assert payloads[-2]["timings"] == body["timings"]


@pytest.mark.parametrize("encoder", [ChatChunkEncoder(HEAD), CompletionChunkEncoder(HEAD)])
def test_a_failing_stream_sends_the_error_and_ends(encoder: Any):
    frames = encoder.feed(text("a")) + encoder.fail(AppError(ErrorKind.ENGINE, "out of memory"))
    *_, error, done, _ = frames.decode().split("\n\n")
    assert json.loads(error.removeprefix("data: ")) == {
        "error": {
            "message": "out of memory",
            "type": "api_error",
            "param": None,
            "code": "engine_error",
        }
    }
    assert done == "data: [DONE]"
