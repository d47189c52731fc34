"""merge_batches: several streams of batches as one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serving.generation import merge_batches
from tests.batches import flatten
from tests.server_process import TIMEOUT


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), TIMEOUT))  # pyright: ignore[reportArgumentType]


async def stream(
    items: list[Any], closed: list[Any] | None = None
) -> AsyncGenerator[Sequence[Any]]:
    """A stream of items, with a turn of the event loop before each; exceptions in it are raised."""
    try:
        for item in items:
            await asyncio.sleep(0)
            if isinstance(item, Exception):
                raise item
            yield [item]
        if closed is not None:
            await asyncio.Event().wait()
    finally:
        if closed is not None:
            closed.append(items)


@given(st.lists(st.lists(st.integers(), max_size=5), min_size=1, max_size=5))
def test_every_item_comes_once_and_in_the_order_of_its_stream(streams: list[list[int]]) -> None:
    async def main() -> list[tuple[int, int]]:
        numbered_streams = [[(n, item) for item in items] for n, items in enumerate(streams)]
        merged = merge_batches([stream(items) for items in numbered_streams])
        return [item async for item in flatten(merged)]

    merged = run(main)
    assert [[item for m, item in merged if m == n] for n in range(len(streams))] == streams


@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_first_error_closes_all_streams(others: int) -> None:
    closed: list[Any] = []

    async def main() -> None:
        failing = stream([1, ValueError("planted")])
        async for _ in merge_batches([failing, *(stream([7], closed) for _ in range(others))]):
            pass

    with pytest.raises(ValueError, match="planted"):
        run(main)
    assert len(closed) == others


@pytest.mark.parametrize("count", [1, 3])
def test_closing_the_merged_stream_closes_all_streams(count: int) -> None:
    closed: list[Any] = []

    async def main() -> None:
        async with aclosing(
            merge_batches([stream([1, 2], closed) for _ in range(count)])
        ) as merged:
            assert await anext(merged)
        assert len(closed) == count

    run(main)
