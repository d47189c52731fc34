"""Each sampling stage against its definition, and the draw against its distribution."""

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.requests import Sampling
from app.engine.sampler import RowState, sample

VOCAB = 12
DRAWS = 4000

Logits = st.lists(st.integers(-60, 60).map(lambda n: n / 10), min_size=VOCAB, max_size=VOCAB)


def row(prompt: Any = (0,), seed: int = 0, **knobs: Any) -> RowState:
    return RowState(Sampling(**knobs), seed=seed, prompt=prompt, vocab=VOCAB)


def softmax(logits: Any) -> Any:
    exp = np.exp(np.array(logits, dtype=np.float64) - np.max(logits))
    return exp / exp.sum()


def drawn(logits: Any, **knobs: Any) -> Any:
    """Frequencies of many draws of one row."""
    state, table = row(**knobs), mx.array([logits])
    tokens = [sample(table, [state]).tokens for _ in range(DRAWS)]
    return np.bincount(np.array(mx.concatenate(tokens)), minlength=VOCAB) / DRAWS


def greedy(logits: Any, **knobs: Any) -> int:
    token = sample(mx.array([logits]), [row(temperature=0.0, **knobs)]).tokens
    return cast(int, token[0].item())


def nucleus(p: Any, top_p: float) -> Any:
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros(len(p), bool)
    kept[order[(before < top_p) | (np.arange(len(p)) == 0)]] = True
    return kept


LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -9.0]
P = softmax(LOGITS)

DISTRIBUTIONS: list[tuple[dict[str, Any], Any]] = [
    ({}, P),
    ({"temperature": 0.5}, softmax(np.array(LOGITS) / 0.5)),
    ({"temperature": 1.7}, softmax(np.array(LOGITS) / 1.7)),
    ({"top_k": 3}, np.where(np.arange(VOCAB) < 3, P, 0)),
    ({"top_k": 1}, np.where(np.arange(VOCAB) < 1, P, 0)),
    ({"top_k": 10**6}, P),
    ({"top_p": 0.7}, np.where(nucleus(P, 0.7), P, 0)),
    ({"top_p": 0.0}, np.where(np.arange(VOCAB) < 1, P, 0)),
    ({"min_p": 0.3}, np.where(0.3 * P.max() <= P, P, 0)),
    ({"min_p": 1.0}, np.where(np.arange(VOCAB) < 1, P, 0)),
    (
        {"top_k": 5, "temperature": 2.0, "top_p": 0.8, "min_p": 0.5},
        None,  # see below: the stages in their order
    ),
    ({"logit_bias": ((4, 3.0), (0, -100.0))}, None),
]


def in_order(knobs: dict[str, Any]) -> Any:
    """bias → top_k → temperature → top_p → min_p, one after the other, in numpy."""
    logits = np.array(LOGITS)
    for token, bias in knobs.get("logit_bias", ()):
        logits[token] += bias
    if "top_k" in knobs:
        logits[np.argsort(-logits)[knobs["top_k"] :]] = -np.inf
    p = softmax(logits / knobs.get("temperature", 1.0))
    p = np.where(nucleus(p, knobs.get("top_p", 1.0)), p, 0)
    return np.where(p >= knobs.get("min_p", 0.0) * p.max(), p, 0)


@pytest.mark.parametrize(("knobs", "wanted"), DISTRIBUTIONS, ids=lambda v: str(v)[:40])
def test_draws_follow_the_distribution(knobs: dict[str, Any], wanted: Any) -> None:
    wanted = in_order(knobs) if wanted is None else wanted
    wanted = wanted / wanted.sum()
    got = drawn(LOGITS, **knobs)
    assert (got[wanted == 0] == 0).all(), "a filtered token was drawn"
    # five standard deviations of a binomial share
    assert (abs(got - wanted) <= 5 * np.sqrt(wanted / DRAWS) + 1e-9).all(), (got, wanted)


@given(logits=Logits)
def test_temperature_zero_is_argmax_whatever_the_filters(logits: list[float]) -> None:
    best = max(logits)
    for knobs in ({}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}):
        assert logits[greedy(logits, **knobs)] == best


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    token = sample(mx.array([LOGITS]), [row(temperature=1e-40)]).tokens
    assert token.tolist() == [0]


@given(logits=Logits, prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
@pytest.mark.parametrize(
    ("knobs", "last"),
    [
        ({"repetition_penalty": 1.7}, -1),
        ({"presence_penalty": 1.1}, -1),
        ({"frequency_penalty": 0.6}, -1),
        ({"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3}, -1),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.9}, 3),
        ({"presence_penalty": 2.0}, 0),
    ],
)
def test_penalties_look_at_the_window_prompt_included(
    logits: list[float], prompt: list[int], knobs: dict[str, Any], last: int
) -> None:
    """The window moves over prompt and samples alike, the newest of which is still lazy."""
    state = row(prompt=prompt, repeat_last_n=last, temperature=0.0, **knobs)
    history = list(prompt)
    for _ in range(5):
        window = history if last < 0 else history[len(history) - min(last, len(history)) :]
        wanted = np.array(logits)
        for token in set(window):
            scale = knobs.get("repetition_penalty", 1.0)
            wanted[token] = wanted[token] * scale if wanted[token] < 0 else wanted[token] / scale
            wanted[token] -= knobs.get("presence_penalty", 0.0)
            wanted[token] -= knobs.get("frequency_penalty", 0.0) * window.count(token)
        token = sample(mx.array([logits]), [state]).tokens
        chosen = cast(int, token[0].item())
        assert wanted[chosen] == pytest.approx(wanted.max(), abs=1e-5)
        state.saw(token, history)
        history.append(chosen)


def test_a_draw_depends_on_the_seed_and_its_number_only() -> None:
    def sequence(seed: int, neighbours: int = 0) -> list[int]:
        state, out = row(seed=seed), []
        for i in range(20):
            beside = [row(seed=100 + i + n, top_k=2, temperature=0.3) for n in range(neighbours)]
            table = mx.array([LOGITS] * (1 + neighbours))
            out.append(cast(int, sample(table, [state, *beside]).tokens[0].item()))
        return out

    assert sequence(1) == sequence(1)
    assert sequence(1) == sequence(1, neighbours=3)
    assert sequence(1) != sequence(2)
    assert sequence(-1) != sequence(1)
    assert sequence(0xFFFFFFFFFFFFFFFF) == sequence(-1), "seeds are taken modulo 2^64"


def test_rows_of_a_batch_are_sampled_as_if_alone() -> None:
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 2},
        {"top_p": 0.4, "temperature": 3.0},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "prompt": (1, 2, 0)},
        {"logit_bias": ((7, 8.0),)},
        {},
    ]
    rng = np.random.default_rng(0)
    for _ in range(30):
        tables = rng.standard_normal((len(requests), VOCAB)).astype(np.float32) * 3
        rows = [row(seed=i, **r) for i, r in enumerate(requests)]
        together = sample(mx.array(tables), rows, top_logprobs=3)
        for i, request in enumerate(requests):
            alone = sample(mx.array(tables[i : i + 1]), [row(seed=i, **request)], top_logprobs=3)
            assert together.tokens[i].item() == alone.tokens[0].item()
            for a, b in (
                (together.logprobs, alone.logprobs),
                (together.top_ids, alone.top_ids),
                (together.top_logprobs, alone.top_logprobs),
            ):
                assert a is not None
                assert b is not None
                assert a[i].tolist() == b[0].tolist()


@given(logits=Logits, count=st.integers(0, 20))
def test_logprobs_are_of_the_raw_logits_most_likely_first(logits: list[float], count: int) -> None:
    wanted = np.log(softmax(logits))
    state = row(top_k=1, repetition_penalty=5.0, prompt=(0, 1), temperature=0.5)
    got = sample(mx.array([logits]), [state], top_logprobs=count)
    assert got.logprobs is not None
    assert got.logprobs[0].item() == pytest.approx(wanted[got.tokens[0].item()], abs=1e-5)
    if count == 0:
        assert got.top_ids is None
        return
    assert got.top_ids is not None
    assert got.top_logprobs is not None
    size = min(count, VOCAB)
    np.testing.assert_allclose(got.top_logprobs[0].tolist(), -np.sort(-wanted)[:size], atol=1e-5)
    np.testing.assert_allclose(
        wanted[np.array(got.top_ids[0])], got.top_logprobs[0].tolist(), atol=1e-5
    )


def test_half_precision_logits_are_scored_in_float32() -> None:
    got = sample(mx.array([LOGITS]).astype(mx.bfloat16), [row()], top_logprobs=1)
    assert got.logprobs is not None
    assert got.logprobs.dtype == mx.float32
