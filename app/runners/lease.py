"""Requests' holds on a model.

Knows: who waits for a model and who holds it, since when. Must not know: runners, who decides that
it is loaded. Whoever holds a model keeps it in memory; whoever waits makes it wanted.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from app.core.errors import AppError, Kind
from app.core.events import Loading

# seconds that a client is told to wait which is refused because others wait already
_LATER = 5

# seconds by which a client may be late that was told when to come again
_LATE = 5.0


class Lease:
    """What one request has of a model. at: when it came to wait, or to hold."""

    def __init__(self, at: float, told: Callable[[], Loading]) -> None:
        self.at = at
        self.stands: Literal["waits", "holds", "refused"] = "waits"
        self._told = told
        self._error: AppError | None = None
        self._news = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.stands == "holds"

    @property
    def waits(self) -> bool:
        return self.stands == "waits"

    def loading(self) -> Loading:
        return self._told()

    async def wait(self) -> None:
        """Returns when the model is in memory and this holds it. A model that breaks while it is
        waited for is waited for again. Raises AppError: BUSY when too many wait already, STOPPING,
        or whatever it is that keeps the model from being loaded."""
        while self.stands == "waits":
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            # each who waits gets one of its own: raising adds to what an exception carries
            raise again(self._error, self._error.retry_after)

    def put(self, stands: Literal["waits", "holds", "refused"], at: float) -> None:
        self.stands, self.at = stands, at
        self._news.set()

    def refuse(self, error: AppError) -> None:
        self.stands, self._error = "refused", error
        self._news.set()


class Leases:
    """All of one model.

    Not every client can be kept waiting; one that cannot is told to come again. Its place is kept
    until it does: for as long as it is expected, one lease of nobody's stands for all such clients,
    which waits, and holds, as theirs did. Otherwise they would stand behind everybody else each
    time, and a load that takes longer than they wait would be given up for others each time.

    expected_until: when that ends; None where nobody is expected."""

    def __init__(self, told: Callable[[], Loading]) -> None:
        self._told = told
        self._all: dict[Lease, None] = {}
        self._place: Lease | None = None
        self._returning: dict[Lease, None] = {}
        self.expected_until: float | None = None

    def __len__(self) -> int:
        """Of clients that are here."""
        return len(self._all) - (self._place is not None)

    @property
    def waiting(self) -> int:
        """Clients that are here."""
        return sum(lease.waits for lease in self._all if lease is not self._place)

    @property
    def waiting_since(self) -> float | None:
        return min((lease.at for lease in self._all if lease.stands == "waits"), default=None)

    @property
    def held_since(self) -> float | None:
        return min((lease.at for lease in self._all if lease.stands == "holds"), default=None)

    def enter(self, now: float) -> Lease:
        lease = Lease(now, self._told)
        if self._place is not None:
            lease.put(self._place.stands, self._place.at)
        self.expect_nobody()
        self._all[lease] = None
        return lease

    def expect(self, lease: Lease, error: AppError, now: float) -> None:
        """The client is about to leave with this error; perhaps it is told to come again."""
        if not lease.waits or error.kind is not Kind.LOADING or error.retry_after is None:
            return
        if self._place is None:
            self._place = Lease(lease.at, self._told)
            self._all[self._place] = None
        self.expected_until = now + error.retry_after + _LATE

    def expect_nobody(self) -> None:
        """Somebody came, or there is nothing to come for."""
        if self._place is not None:
            del self._all[self._place]
        self._place = self.expected_until = None

    async def ready(self, now: float) -> None:
        """Returns when the model is in memory, for jobs of a request that holds a lease of its own:
        this one counts as nobody. Raises as `Lease.wait` does."""
        lease = Lease(now, self._told)
        self._returning[lease] = None
        try:
            await lease.wait()
        finally:
            del self._returning[lease]

    def give_up_those_who_are_late(self, now: float) -> None:
        if self.expected_until is not None and self.expected_until <= now:
            self.expect_nobody()

    def leave(self, lease: Lease) -> None:
        del self._all[lease]
        if lease.stands == "waits":
            # whoever still waits in another task would do so for ever
            lease.refuse(AppError(Kind.LOADING, "the request has ended"))

    def grant(self, now: float) -> bool:
        """Whether anybody had waited."""
        return self._move("waits", "holds", now)

    def withdraw(self, now: float) -> None:
        """The model is gone, and those who held it wait for it again. Whose answer broke off with
        it leaves at once; the others had not begun."""
        self._move("holds", "waits", now)

    def refuse(self, error: AppError) -> None:
        """To all who wait."""
        self.expect_nobody()
        for lease in (*self._all, *self._returning):
            if lease.stands == "waits":
                lease.refuse(error)

    def _move(
        self, before: Literal["waits", "holds"], after: Literal["waits", "holds"], now: float
    ) -> bool:
        moved = [lease for lease in (*self._all, *self._returning) if lease.stands == before]
        for lease in moved:
            lease.put(after, now)
        return bool(moved)


def again(error: AppError, retry_after: int | None) -> AppError:
    """The same, to be raised by somebody else."""
    return AppError(
        error.kind, error.marked, param=error.param, code=error.code, retry_after=retry_after
    )


def stopping() -> AppError:
    return AppError(Kind.STOPPING, "the server is shutting down", retry_after=_LATER)


def busy(name: str, waiting: int) -> AppError:
    return AppError(
        Kind.BUSY,
        f"the server is busy: {waiting} requests are already waiting for {name} to load; "
        f"try again in about {_LATER} s",
        retry_after=_LATER,
    )
