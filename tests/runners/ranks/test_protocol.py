"""Engines that were told the same are compared by what decides what is computed next."""

from dataclasses import replace
from typing import Any

import pytest

from app.core.embeddings import EmbedResult
from app.core.jobs import Ended, EngineStats, Prefilled, PromptLogprobs, Started, StepOutput, Token
from app.runners.ranks.protocol import StepChecksum

TOKEN = Token(job_id="a", id=7, timestamp_ns=1, logprob=-0.5, top_logprobs=((7, -0.5),))
STEP = StepOutput(
    updates=(
        Started(job_id="a", cached_tokens=3, timestamp_ns=1),
        Prefilled(job_id="a", computed_tokens=5),
        PromptLogprobs(job_id="a", logprobs=((-1.0, ()),)),
        TOKEN,
        Ended(job_id="a", reason="stop", timestamp_ns=2),
    ),
    stats=EngineStats(),
    embed_results=(EmbedResult(job_id="b", vectors=(b"1234",)),),
)


def checksum(*steps: StepOutput) -> int:
    said = StepChecksum()
    for step in steps:
        said.update(step)
    return said.value


def changed(place: int, **fields: Any) -> StepOutput:
    updates = list(STEP.updates)
    updates[place] = replace(updates[place], **fields)
    return replace(STEP, updates=tuple(updates))


@pytest.mark.parametrize(
    "other",
    [
        changed(3, timestamp_ns=99),
        changed(3, logprob=-0.50001, top_logprobs=()),
        changed(0, timestamp_ns=5),
        replace(STEP, stats=EngineStats(allocated_bytes=5)),
        replace(STEP, embed_results=(EmbedResult(job_id="b", vectors=(b"1235",)),)),
    ],
)
def test_times_and_last_bits_do_not_matter(other: StepOutput) -> None:
    assert checksum(other) == checksum(STEP)


@pytest.mark.parametrize(
    "other",
    [
        changed(3, id=8),
        changed(0, cached_tokens=4),
        changed(1, computed_tokens=4),
        changed(4, reason="length"),
        replace(STEP, updates=STEP.updates[::-1]),
        replace(STEP, embed_results=(EmbedResult(job_id="b", error="no"),)),
    ],
)
def test_whatever_else_differs_is_seen_and_stays_seen(other: StepOutput) -> None:
    assert checksum(other) != checksum(STEP)
    assert checksum(other, STEP) != checksum(STEP, STEP)


def test_a_step_in_which_nothing_was_said_changes_nothing() -> None:
    empty = StepOutput(updates=(), stats=EngineStats())
    assert checksum(STEP, empty) == checksum(STEP)
