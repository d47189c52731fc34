"""Injects faults into the server under load: one after the other, drawn from a seed."""

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

# bytes that a runner may still allocate
_SPARE_BYTES = 1 << 20

# how many seconds the server's processes cannot write to files
_DISK_FULL_SECONDS = 2.0


class FaultInjector:
    """pid: of the server process. Every other process is recorded in `pids`, to find those that
    outlive the server."""

    def __init__(self, pid: int, url: str, *, pause: tuple[float, float], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.pids: set[int] = set()
        self._pid = pid
        self._url = url
        self._pause = pause
        self._rng = random.Random(seed)

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(self._rng.uniform(*self._pause))
            self.pids.update(processes.list_descendants(self._pid))
            faults = [self._kill, self._stop, self._starve, self._fill_disk, self._unload]
            [fault] = self._rng.choices(faults, weights=[3, 2, 2, 1, 1])
            # the target may have ended just now
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
        target = self._pick_runner()
        if target is not None:
            os.kill(target, number)
        return target is not None

    async def _starve(self) -> bool:
        target = self._pick_runner()
        if target is None:
            return False
        limit = processes.read_address_space(target) + _SPARE_BYTES
        resource.prlimit(target, resource.RLIMIT_AS, (limit, limit))
        return True

    async def _fill_disk(self) -> bool:
        """No file may grow: writes fail with EFBIG. Processes started during this time inherit the
        limit and keep it."""
        for pid in (self._pid, *processes.list_runners(self._pid)):
            _, hard_limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard_limit))
        await asyncio.sleep(_DISK_FULL_SECONDS)
        _, hard_limit = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        return True

    async def _unload(self) -> bool:
        """Not a fault, but an unload at an inconvenient time. It may wait for long answers."""
        async with httpx.AsyncClient(base_url=self._url) as http:
            with contextlib.suppress(httpx.TimeoutException):
                await http.post(
                    "/v1/models/unload",
                    json={"model": self._rng.choice(list(SHAPES))},
                    timeout=1.0,
                )
        return True
