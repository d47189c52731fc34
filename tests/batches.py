"""Streams of batches, as runners and `Generate` return them."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def flatten(batches: AsyncIterable[Sequence[T]]) -> AsyncIterator[T]:
    """The items of all batches."""
    async for batch in batches:
        for item in batch:
            yield item
