"""Text completions: bodies and streams."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.output import CompletionChunkEncoder, CompletionMetadata, collect_completion
from app.core.events import Finish, OutputEvent, PromptTokenIds, TextDelta, TokenLogprob, Usage
from tests.api.streams import choices, chunks
from tests.fakes import finish, text

HEAD = CompletionMetadata(
    id="x-1", created=1_700_000_000, model="m", fingerprint="fp_1", logprobs=True
)


def token(raw: bytes, logprob: float | None = -0.5) -> TokenLogprob:
    return TokenLogprob(
        text=raw.decode(errors="replace"), token_bytes=raw, logprob=logprob, top_logprobs=()
    )


def build_choice(
    choice: int, words: str, *logprobs: float | None, prompt: int = 0
) -> list[OutputEvent]:
    """The events of a choice with one piece of text, whose tokens have these log-probabilities."""
    tokens = tuple(token(b"x", logprob) for logprob in logprobs)
    return [
        TextDelta(choice=choice, text=words, logprobs=tokens),
        replace(finish(tokens=len(tokens)), choice=choice, prompt_index=prompt),
    ]


def test_each_prompt_has_its_own_choices():
    head = replace(HEAD, num_prompts=2, n=2, best_of=2, logprobs=False, include_usage=True)
    events = [
        *build_choice(2, "c", prompt=1),
        *build_choice(0, "a"),
        *build_choice(3, "d", prompt=1),
        *build_choice(1, "b"),
    ]
    body = collect_completion(head, events)
    assert [choice["text"] for choice in body["choices"]] == ["a", "b", "c", "d"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    *_, usage = chunks(CompletionChunkEncoder(head), events)
    assert usage["usage"] == body["usage"]
    assert body["usage"]["prompt_tokens"] == 14  # seven each, once


def test_each_choice_has_its_token_ids():
    head = replace(HEAD, num_prompts=2, n=1, best_of=1, logprobs=False, return_token_ids=True)
    events = [
        PromptTokenIds(prompt_index=0, token_ids=(1,)),
        PromptTokenIds(prompt_index=1, token_ids=(2, 3)),
        TextDelta(choice=0, text="a", token_ids=(7,)),
        TextDelta(choice=1, text="b", token_ids=(8,)),
        TextDelta(choice=1, text="c", token_ids=(9,)),
        replace(finish(), choice=0, prompt_index=0),
        replace(finish(), choice=1, prompt_index=1),
    ]
    collected: Any = collect_completion(head, events)["choices"]
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in collected] == [
        ((1,), [7]),
        ((2, 3), [8, 9]),
    ]
    first, *rest = choices(chunks(CompletionChunkEncoder(head), events), 1)
    assert (first["prompt_token_ids"], first["token_ids"]) == ([2, 3], [8])
    assert all("prompt_token_ids" not in piece for piece in rest)


def test_the_most_likely_candidates_are_returned_and_all_are_counted_in_usage():
    head = replace(HEAD, n=2, best_of=4, logprobs=False)
    events = [
        *build_choice(0, "long but unlikely", -1.0, -1.0),
        *build_choice(1, "likeliest", -0.1, -0.2, -0.3),
        *build_choice(2, "nothing"),
        *build_choice(3, "second", -0.5),
    ]
    body = collect_completion(head, events)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "likeliest"), (1, "second")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 + 3 + 0 + 1


def test_candidates_are_ranked_per_prompt_and_renumbered():
    head = replace(HEAD, num_prompts=2, n=1, best_of=2)
    events = [
        *build_choice(0, "a", -2.0),
        *build_choice(1, "b", -1.0),
        *build_choice(2, "c", -1.0, prompt=1),
        *build_choice(3, "d", -2.0, prompt=1),
    ]
    body = collect_completion(head, events)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "b"), (1, "c")]


def test_the_echoed_prompt_is_ignored_when_candidates_are_ranked():
    """Otherwise an unlikely prompt would favor the longest answer."""
    usage = Usage(prompt_tokens=2, completion_tokens=0, cached_tokens=0)
    end = Finish(reason="stop", usage=usage, timings=finish().timings)

    def build_echoed_choice(choice: int, *sampled: float) -> list[OutputEvent]:
        logprobs = tuple(token(b"x", logprob) for logprob in (None, -9.0, *sampled))
        words = TextDelta(choice=choice, text=str(choice), logprobs=logprobs)
        return [words, replace(end, choice=choice)]

    head = replace(HEAD, best_of=2, echo=True, logprobs=False)
    body = collect_completion(
        head, [*build_echoed_choice(0, -1.0), *build_echoed_choice(1, -1.5, -1.5, -1.5)]
    )
    assert [choice["text"] for choice in body["choices"]] == ["0"]


tokens = st.builds(token, st.binary(min_size=1, max_size=3), st.floats(-20, 0))
deltas = st.builds(text, st.text(max_size=3), tokens) | st.builds(text, st.text(min_size=1))


@given(st.lists(deltas))
def test_streamed_equals_collected(events: list[TextDelta]):
    all_events = [*events, finish()]
    pieces = choices(chunks(CompletionChunkEncoder(HEAD), all_events))
    body = collect_completion(HEAD, all_events)["choices"][0]
    assert "".join(piece["text"] for piece in pieces) == body["text"]
    assert all(piece["text"] for piece in pieces[:-1])
    for name, column in body["logprobs"].items():
        streamed = [item for p in pieces if p["logprobs"] for item in p["logprobs"][name]]
        assert streamed == column
