"""Rank 0's engine: each step that it takes, all take.

Knows: the loop, what the others must be told of it. Must not know: threads, how they are told.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.files import ModelFiles
from app.core.jobs import Capacity, EngineStats, Job, StepOutput
from app.core.settings import Settings
from app.engine.grammar import Matcher
from app.engine.load import load
from app.engine.loop import Loop
from app.engine.weights import ProgressCallback
from app.runners.ranks.crew import RankGroup
from app.runners.ranks.line import Cancel, Command, Embed, LeaderMessage, RunStep, Submit
from app.runners.ranks.said import StepChecksum

# seconds in which it comes out who was lost when a step failed
_FAILURE_TIMEOUT = 2.0


def load_leader(
    files: ModelFiles, settings: Settings, group: RankGroup, report: ProgressCallback
) -> "LeaderLoop":
    """Load our part while the others load theirs. Raises as `app.engine.load.load`."""
    return LeaderLoop(load(files, settings, report, group.ranks), group)


class StepGroup(Protocol):
    """Of `Crew`, what a step needs."""

    def broadcast(self, message: LeaderMessage) -> None: ...

    def wait_for_failure(self, timeout: float = 0.0) -> str | None: ...

    def fail(self, reason: str) -> None: ...


class LeaderLoop:
    """A loop like any other, whose every turn the crew takes part in: the others are told what it
    was told since the last step, in the same order, and that there is another one."""

    def __init__(self, loop: Loop, group: StepGroup) -> None:
        self._loop = loop
        self._group = group
        self._commands: list[Command] = []
        self._checksum = StepChecksum()

    @property
    def capacity(self) -> Capacity:
        return self._loop.capacity

    @property
    def idle(self) -> bool:
        return self._loop.idle

    @property
    def on_stage(self) -> Callable[[str], None]:
        return self._loop.on_stage

    @on_stage.setter
    def on_stage(self, callback: Callable[[str], None]) -> None:
        self._loop.on_stage = callback

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        if job.sampling.seed is None:  # one for all
            job = replace(job, sampling=replace(job.sampling, seed=secrets.randbits(63)))
        self._commands.append(Submit(job=job))
        self._loop.submit(job, matcher)

    def embed(self, job: EmbedJob) -> None:
        self._commands.append(Embed(job=job))
        self._loop.embed(job)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._commands.append(Cancel(job=job, keep=keep))
        self._loop.cancel(job, keep=keep)

    def step(self) -> StepOutput:
        """Raises AppError(ENGINE) when it could not be taken together: nobody knows then what the
        others have computed."""
        if (why := self._group.wait_for_failure()) is not None:
            raise AppError(ErrorKind.ENGINE, why)
        commands, self._commands = tuple(self._commands), []
        self._group.broadcast(RunStep(commands=commands, checksum=self._checksum.value))
        step = self._loop.step()
        if self._loop.exceptions:
            why = (
                self._group.wait_for_failure(timeout=_FAILURE_TIMEOUT) or "a step failed on rank 0"
            )
            self._group.fail(why)
            raise AppError(ErrorKind.ENGINE, why)
        self._checksum.update(step)
        return step

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def check(self) -> None:
        self._loop.check()
