"""Several streams as one.

Knows: asyncio. Must not know: what flows. Whoever stops listening ends all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StreamEnd:
    """A stream has ended; error: what it broke off with."""

    error: Exception | None = None


async def merge_async_iterators(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """What all of them bring, as it comes, each in its own order; over when all are. The first that
    fails ends it. Closing it closes the streams, and returns when they are closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    heard: asyncio.Queue[tuple[T] | _StreamEnd] = asyncio.Queue()

    async def listen(stream: AsyncGenerator[T]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    heard.put_nowait((item,))
        except Exception as raised:
            error = raised
        heard.put_nowait(_StreamEnd(error))

    listeners = [asyncio.create_task(listen(stream)) for stream in streams]
    try:
        left = len(listeners)
        while left:
            match await heard.get():
                case (item,):
                    yield item
                case _StreamEnd(error=error):
                    if error is not None:
                        raise error
                    left -= 1
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
