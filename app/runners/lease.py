"""Requests' holds on a model.

Knows: who waits for a model and who holds it, since when. Must not know: runners, who decides that
it is loaded. Whoever holds a model keeps it in memory; whoever waits makes it wanted.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading

# seconds that a client is told to wait which is refused because others wait already
_RETRY_AFTER = 5

# seconds by which a client may be late that was told when to come again
_RETRY_GRACE = 5.0


class ModelLease:
    """What one request has of a model. since: when it came to wait, or to hold."""

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
        """Returns when the model is in memory and this holds it. A model that breaks while it is
        waited for is waited for again. Raises AppError: BUSY when too many wait already, STOPPING,
        or whatever it is that keeps the model from being loaded."""
        while self.state == "waits":
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            # each who waits gets one of its own: raising adds to what an exception carries
            raise copy_error(self._error, self._error.retry_after)

    def set_state(self, state: Literal["waits", "holds", "refused"], since: float) -> None:
        self.state, self.since = state, since
        self._changed.set()

    def fail(self, error: AppError) -> None:
        self.state, self._error = "refused", error
        self._changed.set()


class ModelLeases:
    """All of one model.

    Not every client can be kept waiting; one that cannot is told to come again. Its place is kept
    until it does: for as long as it is expected, one lease of nobody's stands for all such clients,
    which waits, and holds, as theirs did. Otherwise they would stand behind everybody else each
    time, and a load that takes longer than they wait would be given up for others each time.

    placeholder_until: when that ends; None where nobody is expected."""

    def __init__(self, loading: Callable[[], ModelLoading]) -> None:
        self._loading = loading
        self._leases: dict[ModelLease, None] = {}
        self._placeholder: ModelLease | None = None
        self._reacquiring: dict[ModelLease, None] = {}
        self.placeholder_until: float | None = None

    def __len__(self) -> int:
        """Of clients that are here."""
        return len(self._leases) - (self._placeholder is not None)

    @property
    def num_waiting(self) -> int:
        """Clients that are here."""
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
        """The client is about to leave with this error; perhaps it is told to come again."""
        if not lease.is_waiting or error.kind is not ErrorKind.LOADING or error.retry_after is None:
            return
        if self._placeholder is None:
            self._placeholder = ModelLease(lease.since, self._loading)
            self._leases[self._placeholder] = None
        self.placeholder_until = now + error.retry_after + _RETRY_GRACE

    def drop_placeholder(self) -> None:
        """Somebody came, or there is nothing to come for."""
        if self._placeholder is not None:
            del self._leases[self._placeholder]
        self._placeholder = self.placeholder_until = None

    async def wait_until_ready(self, now: float) -> None:
        """Returns when the model is in memory, for jobs of a request that holds a lease of its own:
        this one counts as nobody. Raises as `Lease.wait` does."""
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
            # whoever still waits in another task would do so for ever
            lease.fail(AppError(ErrorKind.LOADING, "the request has ended"))

    def grant(self, now: float) -> bool:
        """Whether anybody had waited."""
        return self._set_states("waits", "holds", now)

    def return_to_waiting(self, now: float) -> None:
        """The model is gone, and those who held it wait for it again. Whose answer broke off with
        it leaves at once; the others had not begun."""
        self._set_states("holds", "waits", now)

    def fail_waiting(self, error: AppError) -> None:
        """To all who wait."""
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
    """The same, to be raised by somebody else."""
    return AppError(
        error.kind,
        error.marked_message,
        param=error.param,
        code=error.code,
        retry_after=retry_after,
    )


def build_stopping_error() -> AppError:
    return AppError(ErrorKind.STOPPING, "the server is shutting down", retry_after=_RETRY_AFTER)


def build_busy_error(name: str, waiting: int) -> AppError:
    return AppError(
        ErrorKind.BUSY,
        f"the server is busy: {waiting} requests are already waiting for {name} to load; "
        f"try again in about {_RETRY_AFTER} s",
        retry_after=_RETRY_AFTER,
    )
