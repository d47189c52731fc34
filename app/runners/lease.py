"""The leases of a model, which are held by running requests or waiting for the model to load.

Knows: waiting and held leases, their start times. Must not know: runners, the eviction policy. A
held lease keeps the model in memory. A waiting lease causes it to be loaded.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading
from app.core.units import pluralize

# The Retry-After value in seconds for a request that is rejected because the queue is full.
_RETRY_AFTER = 5

# How long the client's place in the queue is kept after Retry-After, in seconds.
_RETRY_GRACE = 5.0


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
    """Returns a copy of the error with another retry_after, which can be raised in another task."""
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
