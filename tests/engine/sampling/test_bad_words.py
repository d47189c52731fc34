"""Sequences of tokens that an output must not contain."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.sampling.sampler import SamplerBatch
from tests.engine.sampling.cases import make_state, to_list

pytestmark = pytest.mark.usefixtures("pipeline")

Words = tuple[tuple[int, ...], ...]

# four ids, so that words occur often; the last id of a word is never 3, which can always be drawn
WORDS = st.lists(
    st.builds(
        lambda begin, last: (*begin, last),
        st.lists(st.integers(0, 3), max_size=3),
        st.integers(0, 2),
    ),
    max_size=5,
).map(tuple)


def draw(words: Words, *, count: int = 24, seed: int = 1, **held: Any) -> list[int]:
    batch = SamplerBatch([make_state(vocab=4, seed=seed, bad_words=words, **held)])
    tokens = [to_list(batch.sample(mx.zeros((1, 4))).tokens)[0] for _ in range(count)]
    batch.release()
    return tokens


def contains(tokens: list[int], word: tuple[int, ...]) -> bool:
    places = range(len(tokens) - len(word) + 1)
    return any(tuple(tokens[place : place + len(word)]) == word for place in places)


@given(WORDS, st.integers(0, 9))
def test_an_output_contains_none_of_them(words: Words, seed: int):
    tokens = draw(words, seed=seed)
    assert not any(contains(tokens, word) for word in words)


@given(WORDS, WORDS)
def test_bad_words_of_other_rows_have_no_effect(words: Words, others: Words):
    batch = SamplerBatch(
        [
            make_state(vocab=4, seed=7, bad_words=others),
            make_state(vocab=4, seed=1, bad_words=words),
        ]
    )
    tokens = [to_list(batch.sample(mx.zeros((2, 4))).tokens)[1] for _ in range(24)]
    assert tokens == draw(words)


@given(WORDS, st.integers(0, 12))
def test_a_preempted_sequence_continues_with_the_same_tokens(words: Words, done: int):
    before = draw(words)[:done]
    again = draw(words, count=24 - done, prompt=(0, 1, *before), num_drawn=done)
    assert before + again == draw(words)


def test_a_word_that_begins_in_the_prompt_is_not_found():
    words = ((0, 1),)
    batch = SamplerBatch([make_state(prompt=(0,), vocab=4, bad_words=words, temperature=0.0)])
    only = mx.array([[0.0, 9.0, 0.0, 0.0]])
    assert to_list(batch.sample(only).tokens) == [1]
