"""Engines that were told the same are compared by what decides what is computed next."""

from dataclasses import replace
from typing import Any

import pytest

from app.core.embeddings import Embedded
from app.core.jobs import Ended, EngineStats, Prefilled, PromptScores, Started, Step, Token
from app.runners.ranks.said import Said

TOKEN = Token(job="a", id=7, at=1, logprob=-0.5, top=((7, -0.5),))
STEP = Step(
    updates=(
        Started(job="a", cached=3, at=1),
        Prefilled(job="a", done=5),
        PromptScores(job="a", scores=((-1.0, ()),)),
        TOKEN,
        Ended(job="a", reason="stop", at=2),
    ),
    stats=EngineStats(),
    embedded=(Embedded(job="b", vectors=(b"1234",)),),
)


def checksum(*steps: Step) -> int:
    said = Said()
    for step in steps:
        said.add(step)
    return said.checksum


def changed(place: int, **fields: Any) -> Step:
    updates = list(STEP.updates)
    updates[place] = replace(updates[place], **fields)
    return replace(STEP, updates=tuple(updates))


@pytest.mark.parametrize(
    "other",
    [
        changed(3, at=99),
        changed(3, logprob=-0.50001, top=()),
        changed(0, at=5),
        replace(STEP, stats=EngineStats(memory=5)),
        replace(STEP, embedded=(Embedded(job="b", vectors=(b"1235",)),)),
    ],
)
def test_times_and_last_bits_do_not_matter(other: Step) -> None:
    assert checksum(other) == checksum(STEP)


@pytest.mark.parametrize(
    "other",
    [
        changed(3, id=8),
        changed(0, cached=4),
        changed(1, done=4),
        changed(4, reason="length"),
        replace(STEP, updates=STEP.updates[::-1]),
        replace(STEP, embedded=(Embedded(job="b", error="no"),)),
    ],
)
def test_whatever_else_differs_is_seen_and_stays_seen(other: Step) -> None:
    assert checksum(other) != checksum(STEP)
    assert checksum(other, STEP) != checksum(STEP, STEP)


def test_a_step_in_which_nothing_was_said_changes_nothing() -> None:
    empty = Step(updates=(), stats=EngineStats())
    assert checksum(STEP, empty) == checksum(STEP)
