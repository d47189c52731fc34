"""Rank 0's engine: each step that it takes, all take.

Knows: the loop, what the others must be told of it. Must not know: threads, how they are told.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Capacity, EngineStats, Job, Step
from app.core.settings import Settings
from app.engine.grammar import Matcher
from app.engine.load import load
from app.engine.loop import Loop
from app.engine.weights import Report
from app.runners.ranks.crew import Crew
from app.runners.ranks.line import Cancel, Command, Down, Embed, Submit, Turn
from app.runners.ranks.said import Said

# seconds in which it comes out who was lost when a step failed
_FINDING_OUT = 2.0


def leading(files: ModelFiles, settings: Settings, crew: Crew, report: Report) -> "Leading":
    """Load our part while the others load theirs. Raises as `app.engine.load.load`."""
    return Leading(load(files, settings, report, crew.ranks), crew)


class Others(Protocol):
    """Of `Crew`, what a step needs."""

    def tell(self, words: Down) -> None: ...

    def lost(self, within: float = 0.0) -> str | None: ...

    def lose(self, why: str) -> None: ...


class Leading:
    """A loop like any other, whose every turn the crew takes part in: the others are told what it
    was told since the last step, in the same order, and that there is another one."""

    def __init__(self, loop: Loop, crew: Others) -> None:
        self._loop = loop
        self._crew = crew
        self._commands: list[Command] = []
        self._said = Said()

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
    def on_stage(self, told: Callable[[str], None]) -> None:
        self._loop.on_stage = told

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

    def step(self) -> Step:
        """Raises AppError(ENGINE) when it could not be taken together: nobody knows then what the
        others have computed."""
        if (why := self._crew.lost()) is not None:
            raise AppError(Kind.ENGINE, why)
        commands, self._commands = tuple(self._commands), []
        self._crew.tell(Turn(commands=commands, said=self._said.checksum))
        step = self._loop.step()
        if self._loop.faults:
            why = self._crew.lost(within=_FINDING_OUT) or "a step failed on rank 0"
            self._crew.lose(why)
            raise AppError(Kind.ENGINE, why)
        self._said.add(step)
        return step

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def check(self) -> None:
        self._loop.check()
