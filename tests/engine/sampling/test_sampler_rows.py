"""Rows in a batch against the same rows alone: with any other rows, broken ones too, and with
grammar masks."""

import functools
import itertools
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.sampling.sampler import SamplerBatch, SamplerOutput, SamplerState
from tests.engine.sampling.cases import (
    LOGITS,
    SETTINGS,
    VOCAB,
    P,
    RowOutput,
    make_state,
    pack_bits,
    row_output,
    sample_once,
    to_list,
)
from tests.rows import rows

pytestmark = [pytest.mark.usefixtures("pipeline"), pytest.mark.recorded]

WIDE = 2000  # where `topk` looks at blocks
TURNS_ALONE = 8


@functools.cache
def tables(name: str) -> Any:
    """[TURNS_ALONE, WIDE + 5] logits of one request, some of them equal; the last 5 are padding."""
    rng = np.random.default_rng(sum(name.encode()))
    logits = rng.standard_normal((TURNS_ALONE, WIDE + 5)) * 2.5
    logits[1::2] = np.round(logits[1::2] * 4) / 4
    logits[:, WIDE:] = 100
    return logits.astype(np.float32)


PROMPT = (1, 2, 1, 3, 4)


def state_of(name: str, prompt: tuple[int, ...] = PROMPT, **options: int) -> SamplerState:
    knobs = {"seed": len(name), **SETTINGS[name]}
    return make_state(prompt=prompt, vocab=WIDE, **knobs, **options)


@functools.cache
def sample_alone(name: str) -> list[RowOutput]:
    rows = SamplerBatch([state_of(name)])
    return [row_output(rows.sample(mx.array(t[None]), top_logprobs=3), 0) for t in tables(name)]


@pytest.fixture(scope="module", autouse=True)
def _forget_other_pipelines(pipeline: str) -> None:
    sample_alone.cache_clear()


@rows("pair", itertools.combinations_with_replacement(SETTINGS, 2), ids=str, parts=2)
def test_two_requests_sample_the_same_together_as_alone(pair: tuple[str, str]) -> None:
    rows = SamplerBatch([state_of(name) for name in pair])
    for turn in range(3):
        logits = mx.array(np.stack([tables(name)[turn] for name in pair]))
        sampled = rows.sample(logits, top_logprobs=3)
        for place, name in enumerate(pair):
            assert row_output(sampled, place) == sample_alone(name)[turn]


Batches = st.lists(
    st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, max_size=6, unique=True).flatmap(
        lambda names: st.tuples(st.permutations(names), st.integers(1, 3))
    ),
    min_size=1,
    max_size=6,
)


@given(batches=Batches)
@settings(max_examples=60)
def test_samples_do_not_depend_on_the_composition_of_batches(
    batches: list[tuple[list[str], int]],
) -> None:
    """Each batch samples a few turns. A request may be in several batches, with other rows and at a
    different index, and be absent between them. Results are read at the end."""
    states = {name: state_of(name) for name in SETTINGS}
    turn_of = dict.fromkeys(SETTINGS, 0)
    results: list[tuple[SamplerOutput, int, str, int]] = []
    for names, turns in batches:
        active = [name for name in names if turn_of[name] + turns <= TURNS_ALONE]
        if not active:
            continue
        rows = SamplerBatch([states[name] for name in active])
        for _ in range(turns):
            logits = mx.array(np.stack([tables(name)[turn_of[name]] for name in active]))
            sampled = rows.sample(logits, top_logprobs=3)
            for place, name in enumerate(active):
                results.append((sampled, place, name, turn_of[name]))
                turn_of[name] += 1
        rows.release()
    for sampled, place, name, turn in results:
        assert row_output(sampled, place) == sample_alone(name)[turn]


@rows("name", SETTINGS)
def test_a_resumed_request_continues_with_the_same_samples(name: str) -> None:
    """A preempted request resumes with all its ids as the prompt."""
    earlier = [token for token, *_ in sample_alone(name)[:4]]
    resumed = state_of(name, prompt=(*PROMPT, *earlier), num_drawn=len(earlier))
    rows = SamplerBatch([resumed])
    for turn in range(4, TURNS_ALONE):
        sampled = rows.sample(mx.array(tables(name)[turn][None]), top_logprobs=3)
        assert row_output(sampled, 0) == sample_alone(name)[turn]


def test_a_released_batch_samples_no_more() -> None:
    rows = SamplerBatch([make_state()])
    rows.release()
    with pytest.raises(AssertionError):
        rows.sample(mx.array([LOGITS]))


def test_top_logprobs_of_other_rows_change_no_alternatives() -> None:
    table = tables("plain")[1].tolist()
    few = sample_once(table, make_state(vocab=WIDE), top_logprobs=2)
    many = sample_once(table, make_state(vocab=WIDE), top_logprobs=20)
    assert few.top_ids is not None
    assert many.top_ids is not None
    assert few.top_ids.tolist() == many.top_ids[:, :2].tolist()


ALL_KINDS = [SETTINGS[name] for name in SETTINGS]


def test_padding_of_the_output_layer_is_never_drawn_nor_listed() -> None:
    """Models round their vocabulary up; the extra rows of the layer are untrained."""
    padded = mx.array([[*LOGITS, 50.0, 60.0]] * len(ALL_KINDS))
    plain = mx.array([LOGITS] * len(ALL_KINDS))
    with_padding = SamplerBatch([make_state(**knobs) for knobs in ALL_KINDS])
    without = SamplerBatch([make_state(**knobs) for knobs in ALL_KINDS])
    for _ in range(10):
        got = with_padding.sample(padded, top_logprobs=VOCAB + 2)
        expected = without.sample(plain, top_logprobs=VOCAB + 2)
        for place in range(len(ALL_KINDS)):
            assert row_output(got, place) == row_output(expected, place)
            assert to_list(got.tokens)[place] < VOCAB


@rows(
    "broken",
    [
        [mx.nan] * VOCAB,
        [*LOGITS[:-1], mx.nan],
        [mx.nan, *LOGITS[1:]],
        [-mx.inf] * VOCAB,
        [*LOGITS[:-1], mx.inf],
    ],
    ids=["nan", "a nan", "first nan", "nothing", "inf"],
)
@rows("knobs", ALL_KINDS, ids=SETTINGS)
def test_a_broken_row_is_reported_and_does_not_affect_others(
    broken: list[float], knobs: dict[str, Any]
) -> None:
    """Its token is a valid id, because it is counted like any other."""
    rows = SamplerBatch([make_state(**knobs), make_state(**knobs), make_state()])
    lone = SamplerBatch([make_state(**knobs)])
    for _ in range(2):
        got = rows.sample(mx.array([LOGITS, broken, LOGITS]))
        assert got.valid.tolist() == [True, False, True]
        assert 0 <= to_list(got.tokens)[1] < VOCAB
        assert got.tokens[0].item() == lone.sample(mx.array([LOGITS])).tokens[0].item()


def test_a_row_with_one_finite_logit_is_valid_and_draws_it() -> None:
    rows = SamplerBatch([make_state(**knobs) for knobs in ALL_KINDS])
    table = mx.array([[-mx.inf] * 5 + [-3.0] + [-mx.inf] * 6] * len(ALL_KINDS))
    got = rows.sample(table)
    assert got.valid.all().item()
    assert set(to_list(got.tokens)) == {5}


@rows("knobs", ALL_KINDS, ids=SETTINGS)
def test_a_row_draws_only_allowed_ids(knobs: dict[str, Any]) -> None:
    """Neither a bias nor a penalty overrides the mask; logprobs ignore it; and an unmasked row in
    the batch is not affected."""
    allowed_ids = [False] * VOCAB
    allowed_ids[3] = allowed_ids[10] = allowed_ids[11] = True
    rows, free = (
        SamplerBatch([make_state(**knobs), make_state(seed=5)]),
        SamplerBatch([make_state(seed=5)]),
    )
    logits = mx.array([LOGITS, LOGITS])
    for _ in range(20):
        # as wide as the layer, padding included
        bitmask = pack_bits([[*allowed_ids, True], [True] * (VOCAB + 1)])
        got = rows.sample(mx.pad(logits, [(0, 0), (0, 1)]), bitmask=bitmask, top_logprobs=2)
        unmasked = free.sample(mx.array([LOGITS]), top_logprobs=2)
        assert got.valid.tolist() == [True, True]
        token = cast(int, got.tokens[0].item())
        assert allowed_ids[token]
        _, logprob, top, _ = row_output(got, 0)
        assert logprob == pytest.approx(np.log(P[token]), abs=1e-5)
        assert top == [0, 1]
        assert row_output(got, 1) == row_output(unmasked, 0)


def test_a_row_without_allowed_ids_is_invalid() -> None:
    bitmask = pack_bits([[False] * VOCAB, [True] * VOCAB, [False] * (VOCAB - 1) + [True]])
    logits = mx.array([LOGITS, LOGITS, [*LOGITS[:-1], -mx.inf]])
    got = SamplerBatch([make_state(), make_state(), make_state()]).sample(logits, bitmask=bitmask)
    assert got.valid.tolist() == [False, True, False]


def test_a_mask_applies_before_the_filters() -> None:
    """top_k counts allowed ids, not forbidden ones."""
    bitmask = pack_bits([[False] * 5 + [True] * 7] * 400)
    rows = SamplerBatch([make_state(seed=seed, top_k=2) for seed in range(400)])
    tokens = rows.sample(mx.array([LOGITS] * 400), bitmask=bitmask).tokens
    assert set(to_list(tokens)) == {5, 6}
