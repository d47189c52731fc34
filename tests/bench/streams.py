"""A client for many concurrent streams. It uses little CPU, because it shares the machine with the
server.

It reads lines from a socket and records their times; JSON is parsed after the last line.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

LINE_LIMIT = 1 << 20

Body = Mapping[str, Any]


class Stream:
    """One streamed completion. Seconds are those of time.perf_counter.

    sent: time of the request. progress: times of comments about the prompt. arrivals: times of
    pieces of text; a token that is half a character has none.
    """

    def __init__(self, port: int, body: Body) -> None:
        self._port = port
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self._last = b""
        self._changed = asyncio.Event()
        self._ended = False
        self.sent = 0.0
        self.progress: list[float] = []
        self.arrivals: list[float] = []

    async def run(self) -> "Stream":
        """Run to the end. Cancellation disconnects."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=LINE_LIMIT)
        try:
            self.sent = time.perf_counter()
            writer.write(encode_post_request("/v1/completions", self._body))
            status = await reader.readline()
            assert b" 200 " in status, status + await reader.read()
            async for line in reader:
                self._record(line, time.perf_counter())
        finally:
            writer.transport.abort()
            self._ended = True
            self._changed.set()
        expected, got = self._body["max_tokens"], self.usage["completion_tokens"]
        assert got == expected, f"{got} tokens instead of {expected}"
        return self

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

    @property
    def usage(self) -> dict[str, Any]:
        last = json.loads(self._last[6:])
        assert last.get("usage"), f"the stream ended with {last}"
        return last["usage"]

    def gaps(self, start: float, end: float) -> list[float]:
        """Gaps between tokens that overlap [start, end]."""
        pairs = pairwise(self.arrivals)
        return [after - before for before, after in pairs if after > start and before < end]

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _record(self, line: bytes, now: float) -> None:
        self._changed.set()
        if line.startswith(b"data: {"):
            self._last = line
            # the last two chunks of a stream have no text: finish reason and usage
            if b'"text":""' not in line and b'"text": ""' not in line and b'"text"' in line:
                self.arrivals.append(now)
        elif line.startswith(b": ") and b"/" in line:
            self.progress.append(now)


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


def encode_post_request(path: str, body: Body) -> bytes:
    """A request with `Connection: close`."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
