"""One run: a real server, clients, faults, and the state afterwards."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.chaos import processes
from tests.chaos.checks import ChaosReport
from tests.chaos.faults import FaultInjector
from tests.chaos.load import LoadGenerator, Outcome, send_question
from tests.chaos.questions import CONTEXT, SHAPES, ChaosQuestion, write_models
from tests.server_process import TIMEOUT, ServerProcess, run_server

# GiB for all models together: two of the five fit, or three of the smaller ones
_MEMORY = 0.05

# timeout until the server is idle again
_IDLE_TIMEOUT = 120.0


def write_config(root: Path) -> Path:
    models = "\n".join(f'[[models]]\nname = "{root / name}"\nalias = "{name}"' for name in SHAPES)
    file = root / "mlxrunner.toml"
    file.write_text(
        f"memory = {_MEMORY}\nparallel = 2\ncontext = {CONTEXT}\nwatchdog = 5\nload_timeout = 10\n"
        f"access_log = false\n{models}\n"
    )
    return file


def run_chaos(
    root: Path,
    questions: Sequence[ChaosQuestion],
    *,
    seconds: float,
    clients: int,
    pause: tuple[float, float],
    seed: int,
) -> ChaosReport:
    """pause: seconds between two faults, at least and at most."""
    write_models(root)
    # the folder for code that an engine compiles on a CPU, while the server runs
    (root / "tmp").mkdir(exist_ok=True)
    variables = {"TMPDIR": str(root / "tmp"), "HOME": "/proc/nowhere"}
    with run_server("--config", str(write_config(root)), environ=variables) as server:
        pid, faults = server.process.pid, FaultInjector
        before, after, load, faults, afterwards = asyncio.run(
            _run_load_and_faults(server, questions, seconds, clients, pause, seed)
        )
        faults.pids.update(processes.list_descendants(pid))
        status = server.stop()
    deadline = time.monotonic() + TIMEOUT
    while (
        orphans := [p for p in faults.pids if processes.is_alive(p)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    return ChaosReport(
        outcomes=load.outcomes,
        afterwards=afterwards,
        before=before,
        after=after,
        orphan_pids=orphans,
        exit_status=status,
        faults=faults.counts,
        log=server.log_text(),
    )


async def _run_load_and_faults(
    server: ServerProcess,
    questions: Sequence[ChaosQuestion],
    seconds: float,
    clients: int,
    pause: tuple[float, float],
    seed: int,
) -> tuple[
    processes.ProcessResources,
    processes.ProcessResources,
    LoadGenerator,
    FaultInjector,
    list[Outcome],
]:
    url, pid = server.url, server.process.pid
    # warm up: lazy imports and caches must not count as leaks
    await LoadGenerator(url, questions, clients=clients, seed=seed - clients).run(
        min(5.0, seconds / 4)
    )
    before = await _wait_until_idle(url, pid)
    load = LoadGenerator(url, questions, clients=clients, seed=seed)
    faults = FaultInjector(pid, url, pause=pause, seed=seed)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(seconds))
        group.create_task(faults.run(seconds))
    await _wait_until_idle(url, pid)
    async with httpx.AsyncClient(base_url=url, timeout=_IDLE_TIMEOUT) as http:
        afterwards = [await send_question(http, question, streamed=False) for question in questions]
    return before, await _wait_until_idle(url, pid), load, faults, afterwards


async def _wait_until_idle(url: str, pid: int) -> processes.ProcessResources:
    """Unload all models and wait until the server is idle. Returns the resources of its process."""
    async with (
        asyncio.timeout(_IDLE_TIMEOUT),
        httpx.AsyncClient(base_url=url, timeout=_IDLE_TIMEOUT) as http,
    ):
        for model in SHAPES:
            (await http.post("/v1/models/unload", json={"model": model})).raise_for_status()
    async with asyncio.timeout(_IDLE_TIMEOUT):
        while processes.list_descendants(pid) or _descriptors_change(pid):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.1)
    return processes.read_resources(pid)


def _descriptors_change(pid: int) -> bool:
    """Whether connections of clients are still being closed."""
    before = os.listdir(f"/proc/{pid}/fd")
    time.sleep(0.05)
    return os.listdir(f"/proc/{pid}/fd") != before
