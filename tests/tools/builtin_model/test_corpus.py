"""The training corpus of the built-in model: reproducible, correct, no evaluation questions."""

import random
from functools import cache
from itertools import chain, pairwise

import pytest

from tools.builtin_model.augmentation import add_noise, add_politeness, expand, normalize
from tools.builtin_model.corpus import Conversation, generate_corpus
from tools.builtin_model.corpus_computed import (
    COUNT_LIMIT,
    SUM_LIMIT,
    make_addition_turn,
    make_counting_turn,
)
from tools.builtin_model.evaluate import HELD_OUT, load_questions


@cache
def conversations() -> list[Conversation]:
    return list(generate_corpus(0, 20_000))


def test_the_corpus_depends_only_on_the_seed() -> None:
    assert list(generate_corpus(7, 200)) == list(generate_corpus(7, 200))
    assert list(generate_corpus(7, 200)) != list(generate_corpus(8, 200))
    assert list(generate_corpus(7, 300))[:200] == list(generate_corpus(7, 200))


@pytest.mark.exhaustive
def test_noise_changes_questions_about_facts_but_no_answers() -> None:
    turns = [turn for conversation in generate_corpus(3, 400, 1.0) for turn in conversation.turns]
    plain = {
        answer for conversation in generate_corpus(3, 8000) for _, answer in conversation.turns
    }
    assert sum(answer in plain for _, answer in turns) > 0.7 * len(turns)
    rng = random.Random(0)
    question = "which endpoint lists the models that I may ask for?"
    blurred = [add_noise(question, rng, 1.0) for _ in range(200)]
    assert add_noise(question, rng, 0.0) == question
    assert len(set(blurred)) > 150
    common_words = [len(set(one.split()) & set(question.split())) for one in blurred]
    assert 6 < sum(common_words) / len(common_words) < 9


@pytest.mark.exhaustive
@pytest.mark.no_cover
def test_a_corpus_has_all_kinds_of_conversations() -> None:
    assert {len(conversation.turns) for conversation in conversations()} >= {0, 1, 2, 3, 4}
    assert any(conversation.system for conversation in conversations())
    texts = [conversation.text for conversation in conversations() if not conversation.turns]
    assert texts
    assert all(texts)
    for ask, answer in chain.from_iterable(conversation.turns for conversation in conversations()):
        assert ask.strip()
        assert answer.strip()
        assert not set("{}$") & set(ask), "an unfilled template"


@pytest.mark.no_cover
@pytest.mark.parametrize("size", [2_000, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_the_corpus_has_no_held_out_question(size: int) -> None:
    corpus = generate_corpus(0, size)
    questions = {normalize(ask) for conversation in corpus for ask, _ in conversation.turns}
    assert not questions & {normalize(question.question) for question in load_questions(HELD_OUT)}


def test_sums_in_the_corpus_are_correct() -> None:
    rng = random.Random(1)
    for _ in range(500):
        for sentence in make_addition_turn(rng)[1].removesuffix(".").split(". "):
            left, _plus, right, _is, total = sentence.split()
            assert int(left) + int(right) == int(total)
            assert max(int(left), int(right)) <= SUM_LIMIT


def test_counts_in_the_corpus_have_steps_of_one() -> None:
    rng = random.Random(1)
    for _ in range(500):
        ask, answer = make_counting_turn(rng)
        if "too far" in answer:
            continue
        numbers = [int(number) for number in answer.split(", ")]
        steps = {after - before for before, after in pairwise(numbers)}
        assert steps in ({1}, {-1}), ask
        assert 0 <= min(numbers) <= max(numbers) <= COUNT_LIMIT


def test_a_template_expands_to_each_of_its_alternatives() -> None:
    rng = random.Random(1)
    expansions = {expand("{a|b{c|d}} $name{|!}", rng, {"name": "{x|y}"}) for _ in range(300)}
    assert expansions == {
        f"{a} {x}{end}" for a in ("a", "bc", "bd") for x in "xy" for end in ("", "!")
    }


def test_a_disguised_question_keeps_its_digits() -> None:
    rng = random.Random(1)
    for _ in range(300):
        question = add_politeness("what is 17 plus 9?", rng)
        assert "".join(char for char in question if char.isdigit()) == "179"
