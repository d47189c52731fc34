"""The verdict on two answers: equal bits, a near-tie, or a difference."""

from dataclasses import replace

import pytest

from app.core.jobs import EndReason, Token
from app.prove.comparison import Answer, compare

TOLERANCE = 0.01


def token(id_: int, logprob: float, *top: tuple[int, float]) -> Token:
    return Token(job_id="", id=id_, timestamp_ns=0, logprob=logprob, top_logprobs=top)


def answer(*tokens: Token, reason: EndReason = "stop", error: str | None = None) -> Answer:
    return Answer(tokens=tokens, reason=reason, error=error)


FIRST, SECOND = token(3, -0.5, (3, -0.5), (4, -1.0)), token(4, -0.7, (4, -0.7), (5, -0.702))
EXPECTED = answer(FIRST, SECOND)


def test_equal_answers_are_equal() -> None:
    result = compare(EXPECTED, replace(EXPECTED, cached_tokens=7), None)
    assert (result.verdict, result.difference, result.largest) == ("equal", None, 0.0)


def test_the_smallest_change_of_a_logprob_is_a_difference() -> None:
    nudged = answer(FIRST, token(4, -0.7, (4, -0.7), (5, -0.7020000000000001)))
    result = compare(EXPECTED, nudged, None)
    assert result.verdict == "different"
    assert result.difference is not None
    assert result.difference.startswith("token 1: log probability of ID 5 is -0.70200")
    assert compare(EXPECTED, nudged, TOLERANCE).verdict == "equal"


def test_a_changed_list_of_alternatives_is_a_difference() -> None:
    other = answer(FIRST, token(4, -0.7, (4, -0.7), (6, -0.702)))
    assert compare(EXPECTED, other, None).verdict == "different"


def test_another_id_with_the_same_logprobs_is_a_near_tie_only_where_bits_may_differ() -> None:
    other = answer(FIRST, token(5, -0.702, (4, -0.7), (5, -0.702)))
    strict, lenient = compare(EXPECTED, other, None), compare(EXPECTED, other, TOLERANCE)
    assert (strict.verdict, lenient.verdict) == ("different", "near-tie")
    assert strict.difference == lenient.difference == "token 1: ID 5 instead of 4"


def test_another_id_with_other_logprobs_is_a_difference() -> None:
    other = answer(FIRST, token(5, -0.1, (5, -0.1), (4, -2.0)))
    result = compare(EXPECTED, other, TOLERANCE)
    assert (result.verdict, result.largest) == ("different", pytest.approx(1.3))


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (answer(FIRST), "it ends after 1 tokens (stop) instead of after 2 (stop)"),
        (answer(FIRST, SECOND, reason="length"), "(length) instead of after 2 (stop)"),
        (answer(error="out of memory", reason="error"), "the answer failed: out of memory"),
    ],
)
def test_another_end_is_a_difference(got: Answer, message: str) -> None:
    result = compare(EXPECTED, got, TOLERANCE)
    assert result.verdict == "different"
    assert message in (result.difference or "")


def test_a_cancelled_answer_is_compared_up_to_its_end() -> None:
    assert compare(EXPECTED, answer(FIRST, reason="cancelled"), None).verdict == "equal"
    wrong = answer(token(9, -0.5, (3, -0.5), (4, -1.0)), reason="cancelled")
    assert compare(EXPECTED, wrong, None).verdict == "different"


def test_numbers_that_are_not_finite_are_compared() -> None:
    infinite = answer(token(3, float("-inf")))
    assert compare(infinite, infinite, TOLERANCE).verdict == "equal"
    assert compare(infinite, answer(token(3, -1.0)), TOLERANCE).verdict == "different"
