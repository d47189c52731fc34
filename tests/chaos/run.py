"""One run: a real server, clients, faults, and what is left when they are over."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.chaos import machine
from tests.chaos.faults import Faults
from tests.chaos.judge import Report
from tests.chaos.load import Load, Outcome, ask
from tests.chaos.questions import CONTEXT, SHAPES, Question, write_models
from tests.serving import Served, serving

# GiB for all models together: two of the five fit, or three of the smaller ones
_MEMORY = 0.05

# seconds that all may take to become quiet again
_QUIET = 120.0


def configuration(root: Path) -> Path:
    models = "\n".join(f'[[models]]\nname = "{root / name}"\nalias = "{name}"' for name in SHAPES)
    file = root / "mlxrunner.toml"
    file.write_text(
        f"memory = {_MEMORY}\nparallel = 2\ncontext = {CONTEXT}\nwatchdog = 5\nload_timeout = 10\n"
        f"access_log = false\n{models}\n"
    )
    return file


def run(
    root: Path,
    asked: Sequence[Question],
    *,
    seconds: float,
    clients: int,
    pause: tuple[float, float],
    seed: int,
) -> Report:
    """pause: seconds between two faults, at least and at most."""
    write_models(root)
    # what an engine compiles for itself on a CPU is kept there, for as long as the server lives
    (root / "tmp").mkdir(exist_ok=True)
    variables = {"TMPDIR": str(root / "tmp"), "HOME": "/proc/nowhere"}
    with serving("--config", str(configuration(root)), variables=variables) as server:
        pid, faults = server.process.pid, Faults
        before, after, load, faults, afterwards = asyncio.run(
            _drive(server, asked, seconds, clients, pause, seed)
        )
        faults.seen.update(machine.descendants(pid))
        status = server.stop()
    gone = time.monotonic() + 5
    while (orphans := [p for p in faults.seen if machine.alive(p)]) and time.monotonic() < gone:
        time.sleep(0.05)
    return Report(
        asked=load.outcomes,
        afterwards=afterwards,
        before=before,
        after=after,
        orphans=orphans,
        status=status,
        faults=faults.done,
        log=server.text(),
    )


async def _drive(
    server: Served,
    asked: Sequence[Question],
    seconds: float,
    clients: int,
    pause: tuple[float, float],
    seed: int,
) -> tuple[machine.Resources, machine.Resources, Load, Faults, list[Outcome]]:
    url, pid = server.url, server.process.pid
    # what is imported and made once, and kept, is there before anything is measured
    await Load(url, asked, clients=clients, seed=seed - clients).run(min(5.0, seconds / 4))
    before = await _emptied(url, pid)
    load = Load(url, asked, clients=clients, seed=seed)
    faults = Faults(pid, url, pause=pause, seed=seed)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(seconds))
        group.create_task(faults.run(seconds))
    await _emptied(url, pid)
    async with httpx.AsyncClient(base_url=url, timeout=_QUIET) as http:
        afterwards = [await ask(http, question, streamed=False) for question in asked]
    return before, await _emptied(url, pid), load, faults, afterwards


async def _emptied(url: str, pid: int) -> machine.Resources:
    """Nobody asks, nothing is loaded, no prompt is suspected: and what the front door has then."""
    async with asyncio.timeout(_QUIET), httpx.AsyncClient(base_url=url, timeout=_QUIET) as http:
        for model in SHAPES:
            (await http.post("/v1/models/unload", json={"model": model})).raise_for_status()
    async with asyncio.timeout(_QUIET):
        while machine.descendants(pid) or _busy(pid):  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.1)
    return machine.resources(pid)


def _busy(pid: int) -> bool:
    """Whether connections of clients are still being closed."""
    mine = os.listdir(f"/proc/{pid}/fd")
    time.sleep(0.05)
    return os.listdir(f"/proc/{pid}/fd") != mine
