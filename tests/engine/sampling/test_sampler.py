"""Each sampling stage against its definition, and the draws against their distribution."""

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.sampling_params import SAMPLING_KNOBS
from app.engine.sampling import sampler
from app.engine.sampling.sampler import SamplerBatch
from app.engine.sampling.stages import PenaltyState
from tests.engine.sampling.cases import LOGITS, VOCAB, P, make_state, sample_once, softmax
from tests.rows import rows

pytestmark = pytest.mark.usefixtures("pipeline")

STREAMS, TURNS = 400, 10
DRAWS = STREAMS * TURNS

Logits = st.lists(st.integers(-60, 60).map(lambda n: n / 10), min_size=VOCAB, max_size=VOCAB)


def draw_frequencies(logits: Any, **knobs: Any) -> Any:
    """Frequencies of the draws of many seeds."""
    rows = SamplerBatch([make_state(seed=seed, **knobs) for seed in range(STREAMS)])
    table = mx.array([logits] * STREAMS)
    tokens = [rows.sample(table).tokens for _ in range(TURNS)]
    return np.bincount(np.array(mx.concatenate(tokens)), minlength=VOCAB) / DRAWS


def greedy(logits: Any, **knobs: Any) -> int:
    return cast(int, sample_once(logits, make_state(temperature=0.0, **knobs)).tokens[0].item())


def in_nucleus(p: Any, top_p: float) -> Any:
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros(len(p), bool)
    kept[order[(before < top_p) | (np.arange(len(p)) == 0)]] = True
    return kept


DISTRIBUTIONS: list[tuple[dict[str, Any], Any]] = [
    ({}, P),
    ({"temperature": 0.5}, softmax(np.array(LOGITS) / 0.5)),
    ({"temperature": 1.7}, softmax(np.array(LOGITS) / 1.7)),
    ({"top_k": 3}, np.where(np.arange(VOCAB) < 3, P, 0)),
    ({"top_k": 1}, np.where(np.arange(VOCAB) < 1, P, 0)),
    ({"top_k": 10**6}, P),
    ({"top_p": 0.7}, np.where(in_nucleus(P, 0.7), P, 0)),
    ({"top_p": 0.0}, np.where(np.arange(VOCAB) < 1, P, 0)),
    ({"min_p": 0.3}, np.where(0.3 * P.max() <= P, P, 0)),
    ({"min_p": 1.0}, np.where(np.arange(VOCAB) < 1, P, 0)),
    (
        {"top_k": 5, "temperature": 2.0, "top_p": 0.8, "min_p": 0.5},
        None,  # see apply_in_order
    ),
    ({"temperature": 2.0, "top_p": 0.8, "min_p": 0.5}, None),
    ({"allowed_token_ids": (1, 4, 99)}, np.where(np.isin(np.arange(VOCAB), (1, 4)), P, 0)),
    ({"bad_words": ((0,), (3,))}, np.where(np.isin(np.arange(VOCAB), (0, 3)), 0, P)),
    ({"logit_bias": ((4, 3.0), (0, -100.0))}, None),
    ({"logit_bias": ((4, 3.0), (0, -100.0)), "top_k": 2}, None),
]


def apply_in_order(knobs: dict[str, Any]) -> Any:
    """bias → top_k → temperature → top_p → min_p, in this order, in numpy."""
    logits = np.array(LOGITS)
    for token, bias in knobs.get("logit_bias", ()):
        logits[token] += bias
    if "top_k" in knobs:
        logits[np.argsort(-logits)[knobs["top_k"] :]] = -np.inf
    p = softmax(logits / knobs.get("temperature", 1.0))
    p = np.where(in_nucleus(p, knobs.get("top_p", 1.0)), p, 0)
    return np.where(p >= knobs.get("min_p", 0.0) * p.max(), p, 0)


@rows(("knobs", "expected"), DISTRIBUTIONS, ids=lambda v: str(v)[:40])
def test_draws_follow_the_distribution(knobs: dict[str, Any], expected: Any) -> None:
    expected = apply_in_order(knobs) if expected is None else expected
    expected = expected / expected.sum()
    got = draw_frequencies(LOGITS, **knobs)
    assert (got[expected == 0] == 0).all(), "a filtered token was drawn"
    # five standard deviations of a binomial share
    assert (abs(got - expected) <= 5 * np.sqrt(expected / DRAWS) + 1e-9).all(), (got, expected)


@given(logits=Logits)
def test_temperature_zero_is_argmax_with_any_filters(logits: list[float]) -> None:
    best = max(logits)
    for knobs in ({}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}):
        assert logits[greedy(logits, **knobs)] == best


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert sample_once(LOGITS, make_state(temperature=1e-40)).tokens.tolist() == [0]


@given(logits=Logits, prompt=st.lists(st.integers(0, VOCAB + 2), min_size=1, max_size=20))
@pytest.mark.parametrize(
    ("knobs", "last"),
    [
        ({"repetition_penalty": 1.7}, -1),
        ({"presence_penalty": 1.1}, -1),
        ({"frequency_penalty": 0.6}, -1),
        ({"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3}, -1),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.9}, 3),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.9}, 1),
        ({"frequency_penalty": 0.9}, 2**31 - 1),
        ({"presence_penalty": 2.0}, 0),
    ],
)
@settings(max_examples=20)
def test_penalties_use_the_window_of_prompt_and_samples(
    logits: list[float], prompt: list[int], knobs: dict[str, Any], last: int
) -> None:
    """The window moves over prompt and samples. A prompt may contain ids that are never sampled;
    they count in the window."""
    rows = SamplerBatch([make_state(prompt=prompt, repeat_last_n=last, temperature=0.0, **knobs)])
    history = list(prompt)
    # read only afterwards: the loop is a step ahead of what it knows
    tokens = [rows.sample(mx.array([logits])).tokens for _ in range(6)]
    for token in tokens:
        window = history if last < 0 else history[len(history) - min(last, len(history)) :]
        expected = np.array(logits)
        for seen in {id for id in window if id < VOCAB}:
            scale = knobs.get("repetition_penalty", 1.0)
            expected[seen] = (
                expected[seen] * scale if expected[seen] < 0 else expected[seen] / scale
            )
            expected[seen] -= knobs.get("presence_penalty", 0.0)
            expected[seen] -= knobs.get("frequency_penalty", 0.0) * window.count(seen)
        chosen = cast(int, token[0].item())
        assert expected[chosen] == pytest.approx(expected.max(), abs=1e-5)
        history.append(chosen)


@pytest.mark.parametrize("largest", [1.0, 60000.0])
def test_the_smallest_repetition_penalty_draws_a_token_by_its_logit(largest: float) -> None:
    """With a much smaller one, the logits became infinite or NaN, and token 0 was drawn."""
    [knob] = [knob for knob in SAMPLING_KNOBS if knob.name == "repetition_penalty"]
    state = make_state(prompt=tuple(range(VOCAB)), repetition_penalty=knob.low, temperature=1.0)
    drawn = sample_once([-largest, *[0.0] * (VOCAB - 2), largest], state)
    assert (drawn.tokens.tolist(), drawn.valid.tolist()) == ([VOCAB - 1], [True])


def test_a_wide_window_takes_no_more_memory_than_the_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "can_fuse", lambda stages: False)
    state = make_state(repeat_last_n=2**31 - 1, frequency_penalty=0.1)
    rows = SamplerBatch([state])
    for _ in range(100):
        rows.sample(mx.array([LOGITS]))
    rows.release()
    [penalties] = [stage for stage in state.stages if isinstance(stage, PenaltyState)]
    assert penalties.window is not None
    assert penalties.window.shape == (101,)


def test_draws_depend_on_the_seed() -> None:
    def sequence(seed: int) -> list[int]:
        rows = SamplerBatch([make_state(seed=seed)])
        return [cast(int, rows.sample(mx.array([LOGITS])).tokens[0].item()) for _ in range(20)]

    assert sequence(1) == sequence(1)
    assert sequence(1) != sequence(2)


@given(logits=Logits, count=st.integers(0, 20))
def test_logprobs_are_of_the_raw_logits_most_likely_first(logits: list[float], count: int) -> None:
    expected = np.log(softmax(logits))
    state = make_state(top_k=1, repetition_penalty=5.0, prompt=(0, 1), temperature=0.5)
    got = sample_once(logits, state, top_logprobs=count)
    assert got.logprobs is not None
    assert got.logprobs[0].item() == pytest.approx(expected[got.tokens[0].item()], abs=1e-5)
    if count == 0:
        assert got.top_ids is None
        return
    assert got.top_ids is not None
    assert got.top_logprobs is not None
    size = min(count, VOCAB)
    np.testing.assert_allclose(got.top_logprobs[0].tolist(), -np.sort(-expected)[:size], atol=1e-5)
    np.testing.assert_allclose(
        expected[np.array(got.top_ids[0])], got.top_logprobs[0].tolist(), atol=1e-5
    )


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
def test_logprobs_of_large_logits_are_as_exact_as_those_of_small_ones(offset: float) -> None:
    """The logits are exact in float32, so only our own arithmetic can lose digits."""
    logits = [offset + value for value in LOGITS]
    got = sample_once(logits, make_state(temperature=0.0), top_logprobs=VOCAB)
    assert got.logprobs is not None
    assert got.top_logprobs is not None
    expected = np.log(P)
    assert got.logprobs[0].item() == pytest.approx(expected[0], abs=1e-6)
    np.testing.assert_allclose(got.top_logprobs[0].tolist(), expected, atol=1e-6)


def test_half_precision_logits_are_scored_in_float32() -> None:
    rows = SamplerBatch([make_state()])
    got = rows.sample(mx.array([LOGITS]).astype(mx.bfloat16), top_logprobs=1)
    assert got.logprobs is not None
    assert got.logprobs.dtype == mx.float32
