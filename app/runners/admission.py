"""Admission control of one model: accepts requests into its queue, or rejects them.

Knows: submissions, capacity, the duration of recent jobs. Must not know: runners, the content of
jobs. All code runs on the event loop.

A request is admitted before any work is done for it. A single limit therefore covers jobs whose
prompt is being prepared, jobs whose grammar is being compiled and jobs in the engine's queue, and
no stage can build up an unnoticed backlog. The engine's own queue is unbounded.
"""

import math
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Protocol

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Job
from app.core.ports import RunnerStatus, Submission
from app.core.requests import EmbedJob
from app.core.units import pluralize

# The maximum Retry-After in seconds. SDKs ignore much larger values.
_MAX_RETRY_AFTER = 60


class JobRunner(Protocol):
    """Runs admitted jobs. Implemented by runners, and by the handle of a model whose runner may be
    replaced."""

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]: ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]: ...

    def status(self) -> RunnerStatus: ...


class LatencyAverage:
    """The average time that a job occupies a slot in the engine: an exponential moving average with
    weight 1/8 per job, as in TCP's smoothed round-trip time (RFC 6298)."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def add(self, seconds: float) -> None:
        self._mean = seconds if self._mean is None else self._mean + (seconds - self._mean) / 8

    def estimate_wait(self, *, waiting: int, parallel: int) -> int:
        """Estimates the number of seconds, from 1 to 60, until all waiting jobs have started,
        assuming that `parallel` jobs start per average job duration."""
        seconds = (self._mean or 0.0) * waiting / parallel
        return max(1, min(math.ceil(seconds), _MAX_RETRY_AFTER))


class Admission:
    """Implements `Engine` for one model. `max_queue` is the maximum number of queued requests."""

    def __init__(self, jobs: JobRunner, max_queue: int) -> None:
        self._jobs = jobs
        self.max_queue = max_queue
        self._slots: set[_Slot] = set()
        self._latency = LatencyAverage()
        self.rejected = 0

    @property
    def preparing(self) -> int:
        """The number of jobs with a reserved slot that have not been submitted yet."""
        return sum(not place.submitted for place in self._slots)

    def status(self) -> RunnerStatus:
        status = self._jobs.status()
        return replace(status, preparing=self.preparing, rejected=status.rejected + self.rejected)

    @contextmanager
    def reserve(self, count: int = 1) -> "Generator[Reservation]":
        """Implements `Engine.reserve`."""
        self._check_capacity(count)
        places = [_Slot() for _ in range(count)]
        self._slots.update(places)
        try:
            yield Reservation(self._jobs, places, self._latency)
        finally:
            self._slots.difference_update(places)

    def _check_capacity(self, count: int) -> None:
        """Raises AppError(BUSY) if `count` more jobs do not fit in the queue."""
        capacity = self._jobs.status().capacity
        # A model that is being reloaded will run at least one job at a time.
        parallel = 1 if capacity is None else capacity.parallel
        # Count admitted jobs here, because the engine's counters lag by one step.
        here = sum(not place.ended for place in self._slots)
        if here + count <= parallel + self.max_queue:
            return
        self.rejected += 1
        seconds = self._latency.estimate_wait(waiting=max(1, here - parallel), parallel=parallel)
        raise AppError(
            ErrorKind.BUSY,
            f"the server is busy: {pluralize(here, 'request')} in progress (at most {parallel} run "
            f"and {self.max_queue} wait); try again in about {seconds} s",
            retry_after=seconds,
        )


class Reservation:
    """The reserved slots of one request. Implements `ReservedSlots`."""

    def __init__(self, jobs: JobRunner, slots: Sequence["_Slot"], latency: LatencyAverage) -> None:
        self._jobs = jobs
        self._slots = slots
        self._latency = latency

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        place = self._take_slot()
        try:
            async with self._jobs.submit(job) as submission:
                place.submission = submission
                yield submission
        except AppError:
            # a rejected job may be replaced by another job
            place.submitted = place.submission is not None
            raise
        finally:
            place.released = True
            if (seconds := place.seconds_in_engine()) is not None:
                self._latency.add(seconds)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        place = self._take_slot()
        try:
            return await self._jobs.embed(job)
        finally:
            place.released = True

    def _take_slot(self) -> "_Slot":
        place = next(place for place in self._slots if not place.submitted)
        place.submitted, place.released = True, False
        return place


class _Slot:
    """The reserved slot of one job.

    submitted: whether the job has been submitted or is being submitted.
    released: whether the client has exited the submission.
    """

    def __init__(self) -> None:
        self.submitted = self.released = False
        self.submission: Submission | None = None

    @property
    def ended(self) -> bool:
        """Whether the job has ended. The client may still be reading the output."""
        return self.released or (
            self.submission is not None and self.submission.ended_ns is not None
        )

    def seconds_in_engine(self) -> float | None:
        submission = self.submission
        if submission is None or submission.started_ns is None:
            return None
        ended = submission.ended_ns or time.monotonic_ns()
        return (ended - submission.started_ns) / 1e9
