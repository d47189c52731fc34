"""The checksum of steps covers the results that determine the next steps."""

from typing import Any

import pytest
from msgspec.structs import replace

from app.core.jobs import (
    Ended,
    EngineStats,
    PixelsNeeded,
    Prefilled,
    PromptLogprobs,
    Started,
    StepOutput,
    Token,
)
from app.core.requests import EmbedResult
from app.runners.ranks.protocol import StepChecksum

TOKEN = Token(job_id="a", id=7, timestamp_ns=1, logprob=-0.5, top_logprobs=((7, -0.5),))
STEP = StepOutput(
    updates=(
        Started(job_id="a", cached_tokens=3, timestamp_ns=1),
        Prefilled(job_id="a", computed_tokens=5),
        PromptLogprobs(job_id="a", logprobs=((-1.0, ()),)),
        TOKEN,
        Ended(job_id="a", reason="stop", timestamp_ns=2),
        PixelsNeeded(job_id="b", keys=(b"1",)),
    ),
    stats=EngineStats(),
    embed_results=(EmbedResult(job_id="b", vectors=(b"1234",)),),
)


def checksum(*steps: StepOutput) -> int:
    result = StepChecksum()
    for step in steps:
        result.update(step)
    return result.value


def change_update(index: int, **fields: Any) -> StepOutput:
    updates = list(STEP.updates)
    updates[index] = replace(updates[index], **fields)
    return replace(STEP, updates=tuple(updates))


@pytest.mark.parametrize(
    "other",
    [
        change_update(3, timestamp_ns=99),
        change_update(3, logprob=-0.50001, top_logprobs=()),
        change_update(0, timestamp_ns=5),
        replace(STEP, stats=EngineStats(allocated_bytes=5)),
        replace(STEP, embed_results=(EmbedResult(job_id="b", vectors=(b"1235",)),)),
    ],
)
def test_timestamps_and_rounding_do_not_change_the_checksum(other: StepOutput) -> None:
    assert checksum(other) == checksum(STEP)


@pytest.mark.parametrize(
    "other",
    [
        change_update(3, id=8),
        change_update(0, cached_tokens=4),
        change_update(1, computed_tokens=4),
        change_update(4, reason="length"),
        change_update(5, keys=(b"2",)),
        replace(STEP, updates=STEP.updates[::-1]),
        replace(STEP, embed_results=(EmbedResult(job_id="b", error="no"),)),
    ],
)
def test_other_differences_change_the_checksum_for_good(other: StepOutput) -> None:
    assert checksum(other) != checksum(STEP)
    assert checksum(other, STEP) != checksum(STEP, STEP)


def test_an_empty_step_does_not_change_the_checksum() -> None:
    empty = StepOutput(updates=(), stats=EngineStats())
    assert checksum(STEP, empty) == checksum(STEP)
