"""What happens to the server while it is asked: one fault after the other, drawn from a seed."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter

import httpx

from tests.chaos import processes
from tests.chaos.questions import SHAPES

# bytes that a runner may still take before its memory is at its end
_SPARE_BYTES = 1 << 20

# seconds for which no process of ours can write to a file
_DISK_FULL_SECONDS = 2.0


class FaultInjector:
    """pid: of the server's first process. Every other one that was seen is kept in `pids`, so that
    nobody who outlives the server goes unnoticed."""

    def __init__(self, pid: int, url: str, *, pause: tuple[float, float], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.pids: set[int] = set()
        self._pid = pid
        self._url = url
        self._pause = pause
        self._rng = random.Random(seed)

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(self._rng.uniform(*self._pause))
            self.pids.update(processes.list_descendants(self._pid))
            faults = [self._kill, self._stop, self._starve, self._fill_disk, self._unload]
            [fault] = self._rng.choices(faults, weights=[3, 2, 2, 1, 1])
            # what was to suffer from it may have ended just now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if await fault():
                    self.counts[fault.__name__.strip("_")] += 1

    def _pick_runner(self) -> int | None:
        runners = processes.list_runners(self._pid)
        return self._rng.choice(runners) if runners else None

    async def _kill(self) -> bool:
        return self._signal(signal.SIGKILL)

    async def _stop(self) -> bool:
        return self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> bool:
        victim = self._pick_runner()
        if victim is not None:
            os.kill(victim, number)
        return victim is not None

    async def _starve(self) -> bool:
        victim = self._pick_runner()
        if victim is None:
            return False
        limit = processes.read_address_space(victim) + _SPARE_BYTES
        resource.prlimit(victim, resource.RLIMIT_AS, (limit, limit))
        return True

    async def _fill_disk(self) -> bool:
        """No file may grow: whoever writes to one gets EFBIG. Who is started meanwhile inherits
        that, and keeps it."""
        for pid in (self._pid, *processes.list_runners(self._pid)):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
        await asyncio.sleep(_DISK_FULL_SECONDS)
        _, most = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (most, most))
        return True

    async def _unload(self) -> bool:
        """No fault, but somebody does it at the wrong moment. It may wait for long answers."""
        async with httpx.AsyncClient(base_url=self._url) as http:
            with contextlib.suppress(httpx.TimeoutException):
                await http.post(
                    "/v1/models/unload",
                    json={"model": self._rng.choice(list(SHAPES))},
                    timeout=1.0,
                )
        return True
