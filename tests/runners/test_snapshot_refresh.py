"""Snapshots for watchers: at most one per second, none without a watcher, errors are ignored."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.jobs import PrefixSnapshot
from app.runners import snapshot_refresh
from app.runners.snapshot_refresh import SnapshotRefresh


class Source:
    """Counts the fetches; each returns the number of fetches so far, once it is released."""

    def __init__(self) -> None:
        self.fetches = 0
        self.released = asyncio.Event()
        self.error: Exception | None = None

    async def fetch(self) -> PrefixSnapshot:
        self.fetches += 1
        await self.released.wait()
        if self.error is not None:
            raise self.error
        return PrefixSnapshot(total_nodes=self.fetches)


def run(body: Callable[[Source], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await body(Source())

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_many_watchers_share_one_fetch_and_never_wait():
    async def body(source: Source) -> None:
        refresh = SnapshotRefresh(source.fetch)
        assert source.fetches == 0
        assert [refresh.get() for _ in range(5)] == [None] * 5
        await settle()
        assert source.fetches == 1
        source.released.set()
        await settle()
        assert refresh.get() == PrefixSnapshot(total_nodes=1)
        await settle()
        assert source.fetches == 1, "the last snapshot is less than a second old"

    run(body)


def test_a_later_call_fetches_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot_refresh, "REFRESH_SECONDS", 0.0)

    async def body(source: Source) -> None:
        source.released.set()
        refresh = SnapshotRefresh(source.fetch)
        for expected in (None, 1, 2):
            found = refresh.get()
            assert (found and found.total_nodes) == expected
            await settle()

    run(body)


@pytest.mark.parametrize("error", [AppError(ErrorKind.ENGINE, "gone"), ConnectionError("gone")])
def test_a_lost_engine_leaves_the_last_snapshot(error: Exception):
    async def body(source: Source) -> None:
        source.error = error
        source.released.set()
        refresh = SnapshotRefresh(source.fetch)
        refresh.get()
        await settle()
        assert refresh.get() is None

    run(body)


def test_cancel_ends_a_fetch():
    async def body(source: Source) -> None:
        refresh = SnapshotRefresh(source.fetch)
        refresh.get()
        await settle()
        refresh.cancel()
        await settle()
        assert len(asyncio.all_tasks()) == 1

    run(body)
