"""Admission of requests to one model: slots in its queue, and leases that keep it in memory.

Knows: submissions, capacity, the duration of recent jobs; waiting and held leases, their start
times. Must not know: runners, the content of jobs, the eviction policy. All code runs on the event
loop.

A request is admitted before any work is done for it. A single limit therefore covers jobs whose
prompt is being prepared, jobs whose grammar is being compiled and jobs in the engine's queue, and
no stage can build up an unnoticed backlog. The engine's own queue is unbounded.

A held lease keeps the model in memory. A waiting lease causes it to be loaded.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Literal, Protocol

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading
from app.core.jobs import Job
from app.core.ports import RunnerStatus, Submission
from app.core.requests import EmbedJob
from app.core.units import pluralize

# The maximum Retry-After in seconds. SDKs ignore much larger values.
_MAX_RETRY_AFTER = 60

# The Retry-After value in seconds for a request that is rejected because the queue is full.
_RETRY_AFTER = 5

# How long the client's place in the queue is kept after Retry-After, in seconds.
_RETRY_GRACE = 5.0


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


class ModelLease:
    """The lease of one request. `since` is the time at which the request started to wait, or to
    hold the model."""

    def __init__(self, since: float, loading: Callable[[], ModelLoading]) -> None:
        self.since = since
        self.state: Literal["waits", "holds", "refused"] = "waits"
        self._loading = loading
        self._error: AppError | None = None
        self._changed = asyncio.Event()

    @property
    def is_held(self) -> bool:
        return self.state == "holds"

    @property
    def is_waiting(self) -> bool:
        return self.state == "waits"

    def loading_event(self) -> ModelLoading:
        return self._loading()

    async def wait(self) -> None:
        """Returns when the model is loaded and this lease holds it. If the model fails before that,
        the lease waits for the next load. Raises AppError(BUSY) if the queue is full,
        AppError(STOPPING), or the error that prevents the load."""
        while self.state == "waits":
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            # Each waiting task gets a copy, because raising an exception adds a traceback to it.
            raise copy_error(self._error, self._error.retry_after)

    def set_state(self, state: Literal["waits", "holds", "refused"], since: float) -> None:
        self.state, self.since = state, since
        self._changed.set()

    def fail(self, error: AppError) -> None:
        self.state, self._error = "refused", error
        self._changed.set()


class ModelLeases:
    """The leases of one model.

    A client that cannot wait for the load gets an error with Retry-After. A placeholder keeps its
    place in the queue until it retries. The placeholder is a single lease for all such clients,
    which waits for the model and holds it on their behalf. Without a placeholder, these clients
    would lose their place with each attempt, and a load that takes longer than they wait would be
    abandoned for other models every time.

    `placeholder_until` is the time at which the placeholder expires; None if there is none.
    """

    def __init__(self, loading: Callable[[], ModelLoading]) -> None:
        self._loading = loading
        self._leases: dict[ModelLease, None] = {}
        self._placeholder: ModelLease | None = None
        self._reacquiring: dict[ModelLease, None] = {}
        self.placeholder_until: float | None = None

    def __len__(self) -> int:
        """The number of leases of connected clients, without the placeholder."""
        return len(self._leases) - (self._placeholder is not None)

    @property
    def num_waiting(self) -> int:
        """The number of waiting leases of connected clients."""
        return sum(lease.is_waiting for lease in self._leases if lease is not self._placeholder)

    @property
    def waiting_since(self) -> float | None:
        return min((lease.since for lease in self._leases if lease.state == "waits"), default=None)

    @property
    def held_since(self) -> float | None:
        return min((lease.since for lease in self._leases if lease.state == "holds"), default=None)

    def add(self, now: float) -> ModelLease:
        lease = ModelLease(now, self._loading)
        if self._placeholder is not None:
            lease.set_state(self._placeholder.state, self._placeholder.since)
        self.drop_placeholder()
        self._leases[lease] = None
        return lease

    def keep_place(self, lease: ModelLease, error: AppError, now: float) -> None:
        """Adds a placeholder if the client is expected to retry. Called before a request fails with
        `error`."""
        if not lease.is_waiting or error.kind is not ErrorKind.LOADING or error.retry_after is None:
            return
        if self._placeholder is None:
            self._placeholder = ModelLease(lease.since, self._loading)
            self._leases[self._placeholder] = None
        self.placeholder_until = now + error.retry_after + _RETRY_GRACE

    def drop_placeholder(self) -> None:
        """Removes the placeholder, because a client has arrived or the model will not be loaded."""
        if self._placeholder is not None:
            del self._leases[self._placeholder]
        self._placeholder = self.placeholder_until = None

    async def wait_until_ready(self, now: float) -> None:
        """Returns when the model is loaded. For jobs whose request already has a lease, so this
        call does not count as a lease. Raises the same errors as `ModelLease.wait`."""
        lease = ModelLease(now, self._loading)
        self._reacquiring[lease] = None
        try:
            await lease.wait()
        finally:
            del self._reacquiring[lease]

    def expire_placeholder(self, now: float) -> None:
        if self.placeholder_until is not None and self.placeholder_until <= now:
            self.drop_placeholder()

    def release(self, lease: ModelLease) -> None:
        del self._leases[lease]
        if lease.state == "waits":
            # Otherwise, other tasks waiting for this lease would wait forever.
            lease.fail(AppError(ErrorKind.LOADING, "the request has ended"))

    def grant(self, now: float) -> bool:
        """Grants all waiting leases. Returns whether there were any."""
        return self._set_states("waits", "holds", now)

    def return_to_waiting(self, now: float) -> None:
        """Returns all held leases to the waiting state, because the model was unloaded. Requests
        that had started fail immediately; all other requests continue to wait."""
        self._set_states("holds", "waits", now)

    def fail_waiting(self, error: AppError) -> None:
        """Fails all waiting leases with this error."""
        self.drop_placeholder()
        for lease in (*self._leases, *self._reacquiring):
            if lease.state == "waits":
                lease.fail(error)

    def _set_states(
        self, before: Literal["waits", "holds"], after: Literal["waits", "holds"], now: float
    ) -> bool:
        moved = [lease for lease in (*self._leases, *self._reacquiring) if lease.state == before]
        for lease in moved:
            lease.set_state(after, now)
        return bool(moved)


def copy_error(error: AppError, retry_after: int | None) -> AppError:
    """Returns a copy of the error with a different retry_after, which can be raised in another
    task."""
    return AppError(
        error.kind,
        error.marked_message,
        param=error.param,
        code=error.code,
        retry_after=retry_after,
        excess=error.excess,
    )


def build_stopping_error() -> AppError:
    return AppError(ErrorKind.STOPPING, "the server is shutting down", retry_after=_RETRY_AFTER)


def build_busy_error(name: str, waiting: int) -> AppError:
    return AppError(
        ErrorKind.BUSY,
        f"the server is busy: the queue for {name}, which is loading, already has "
        f"{pluralize(waiting, 'request')}; "
        f"try again in about {_RETRY_AFTER} s",
        retry_after=_RETRY_AFTER,
    )
