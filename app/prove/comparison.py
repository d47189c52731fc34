"""Compares two answers to the same request: token IDs, and the bits of log probabilities.

Knows: answers as IDs and floats. Must not know: engines, the reason for a difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from app.core.jobs import EndReason, Token

Verdict = Literal["equal", "near-tie", "different"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of an engine. tokens: the tokens with their logprobs. reason: how it ended. error:
    the error of an answer that failed. cached_tokens: the number of prompt tokens found in the
    prefix cache."""

    tokens: tuple[Token, ...]
    reason: EndReason
    error: str | None = None
    cached_tokens: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison. difference: describes the first difference; None if equal.
    largest: the largest difference of two log probabilities before the answers diverge."""

    verdict: Verdict
    difference: str | None = None
    largest: float = 0.0


def compare(expected: Answer, got: Answer, tolerance: float | None) -> Comparison:
    """Compares two answers. A cancelled answer is compared up to its end.

    tolerance: None requires equal bits. Otherwise, log probabilities may differ by up to this, and
    two answers may diverge at a token whose alternatives have log probabilities within the
    tolerance in both answers. This is a near-tie: rounding decided which token was sampled.
    """
    if got.error is not None:
        return Comparison(verdict="different", difference=f"the answer failed: {got.error}")
    largest = 0.0
    for position, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if _bits(a) == _bits(b):
            continue
        distance, what = _compare_logprobs(a, b)
        largest = max(largest, distance)
        if a.id != b.id and distance <= (tolerance or 0.0):
            what = f"ID {b.id} instead of {a.id}"
        verdict: Verdict = "different"
        if tolerance is not None and distance <= tolerance:
            if a.id == b.id:
                continue
            verdict = "near-tie"
        return Comparison(verdict=verdict, difference=f"token {position}: {what}", largest=largest)
    return _compare_ends(expected, got, largest)


def _compare_ends(expected: Answer, got: Answer, largest: float) -> Comparison:
    cancelled = "cancelled" in (expected.reason, got.reason)
    if not cancelled and (len(expected.tokens), expected.reason) != (len(got.tokens), got.reason):
        return Comparison(
            verdict="different",
            difference=f"it ends after {len(got.tokens)} tokens ({got.reason}) instead of after "
            f"{len(expected.tokens)} ({expected.reason})",
            largest=largest,
        )
    return Comparison(verdict="equal", largest=largest)


def _bits(token: Token) -> tuple[object, ...]:
    return token.id, token.logprob, token.top_logprobs


def _compare_logprobs(a: Token, b: Token) -> tuple[float, str]:
    """Returns the largest difference of the log probabilities of the same ID, and describes it. IDs
    are compared only if both tokens list them."""
    ours, theirs = _list_logprobs(a), _list_logprobs(b)
    worst, what = 0.0, "the list of the most likely IDs differs"
    for token in ours.keys() & theirs.keys():
        distance = _distance(ours[token], theirs[token])
        if distance > worst:
            worst = distance
            what = f"log probability of ID {token} is {theirs[token]!r} instead of {ours[token]!r}"
    return worst, what


def _distance(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    distance = abs(a - b)
    return distance if math.isfinite(distance) else math.inf


def _list_logprobs(token: Token) -> Mapping[int, float]:
    own: Sequence[tuple[int, float]] = () if token.logprob is None else ((token.id, token.logprob),)
    return dict((*token.top_logprobs, *own))
