"""Concurrent streams of one server, and waiting for their progress."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from app.bench.client import ConnectionPool, ServerAddress, StreamedRequest, make_stream_body

Body = Mapping[str, Any]


class Stream:
    """One streamed completion. Seconds are measured with time.perf_counter."""

    def __init__(self, port: int, body: Body) -> None:
        self._body = body
        self._changed = asyncio.Event()
        self._ended = False
        pool = ConnectionPool(ServerAddress.parse(f"http://127.0.0.1:{port}"))
        self._request = StreamedRequest(
            pool, "/v1/completions", make_stream_body(body), self._changed.set
        )

    async def run(self) -> "Stream":
        """Run to the end. Cancellation disconnects."""
        try:
            record = await self._request.run()
        finally:
            self._ended = True
            self._changed.set()
        assert record.error is None, record.error
        expected, got = self._body["max_tokens"], record.output_tokens
        assert got == expected, f"{got} tokens instead of {expected}"
        return self

    @property
    def sent(self) -> float:
        """Time of the request."""
        return self._request.exchange.sent

    @property
    def arrivals(self) -> Sequence[float]:
        """Times of pieces of text; a token that is half a character has none."""
        return self._request.recorder.arrivals

    @property
    def progress(self) -> Sequence[float]:
        """Times of comments about the prompt."""
        return [now for now, comment in self._request.recorder.comments if b"/" in comment]

    async def wait_for_tokens(self, count: int) -> None:
        """Wait until `count` tokens have arrived."""
        while len(self.arrivals) < count:
            assert not self._ended, f"it ended after {len(self.arrivals)} tokens"
            await self._wait_for_change()

    async def wait_for_prefill(self, limit: float) -> None:
        """Wait until the server reports the prefill, or until the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not self.progress:
                    await self._wait_for_change()

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    def gaps(self, start: float, end: float) -> list[float]:
        """Gaps between tokens that overlap [start, end]."""
        pairs = pairwise(self.arrivals)
        return [after - before for before, after in pairs if after > start and before < end]

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def run_all(streams: Sequence[Stream]) -> None:
    await asyncio.gather(*(stream.run() for stream in streams))


@contextlib.asynccontextmanager
async def run_in_background(streams: Sequence[Stream]) -> AsyncIterator[None]:
    """Run streams in the background, and disconnect them at the end."""
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
