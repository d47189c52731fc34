"""The end of a model process that wires memory: it unwires first, and is killed last.

The processes are real. They run on the CPU, but MLX says that Metal is available, and writes each
wired limit to a file.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.core.jobs import Capacity, Ledger
from app.runners import restart_policy
from app.runners.restart_policy import stop_grace
from tests.runners.contract import answer, ids
from tests.runners.spawning import is_alive, pid, start_runner, suspend, wait_for_end
from tests.server_process import ROOT

GIB = 1 << 30

# Runs at the start of each interpreter. An import hook, because the backend must be set up before
# MLX is imported.
SITE = """
import importlib.util, sys, time
from pathlib import Path

FOLDER = Path({folder!r})


def pretend_metal(mx):
    evaluate = mx.async_eval

    def set_wired_limit(num_bytes):
        with (FOLDER / "limits").open("a") as file:
            file.write(str(num_bytes) + "\\n")

    def async_eval(*arrays):
        while (FOLDER / "hang").exists():
            time.sleep(0.05)
        evaluate(*arrays)

    mx.metal.is_available = lambda: True
    mx.device_info = lambda: {{
        "max_recommended_working_set_size": 6 << 30, "memory_size": 16 << 30,
        "resource_limit": 499_000,
    }}
    mx.set_wired_limit, mx.async_eval = set_wired_limit, async_eval


def shorten_grace(policy):
    policy._MIN_WIRED_GRACE = {grace}


PATCHES = {{"mlx.core": pretend_metal, "app.runners.restart_policy": shorten_grace}}


class Finder:
    def find_spec(self, name, path, target=None):
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""

GRACE = 6.0


@pytest.fixture
def metal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model processes believe that they run on Metal. Returns the folder with their limits."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format(folder=str(tmp_path), grace=GRACE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(restart_policy, "_MIN_WIRED_GRACE", GRACE)
    return tmp_path


def read_limits(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "limits").read_text().split()]


def test_a_stopped_process_unwires_its_memory(tiny_model: Path, metal: Path) -> None:
    async def run() -> None:
        async with start_runner(tiny_model, experimental_metal=True) as running:
            assert ids(await answer(running, "a", b"hello"))
            capacity = running.status().capacity
            assert capacity is not None
            assert capacity.wirable == 6 * GIB
            assert running.status().stats.ledger.wired == read_limits(metal)[-1] > 0

    asyncio.run(run())
    assert read_limits(metal)[-1] == 0


def test_a_hung_process_unwires_its_memory_instead_of_being_killed(
    long_model: Path, metal: Path
) -> None:
    async def run() -> None:
        async with start_runner(long_model, watchdog=2.0, experimental_metal=True) as running:
            process = pid(running)
            (metal / "hang").touch()
            ended = await wait_for_end(running, "a")
            assert ended.error is not None
            assert "no progress" in ended.error
            while is_alive(process):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.05)
            (metal / "hang").unlink()
            assert read_limits(metal)[-1] == 0

    asyncio.run(run())


def test_a_process_that_cannot_unwire_is_killed_after_the_grace_period(
    long_model: Path, metal: Path
) -> None:
    async def run() -> None:
        async with start_runner(long_model, watchdog=2.0, experimental_metal=True) as running:
            process = pid(running)
            suspend(process)
            since = time.monotonic()
            failure = await running.wait_for_failure()
            assert "nothing for" in failure.message
            while is_alive(process):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.05)
            assert time.monotonic() - since >= GRACE

    asyncio.run(run())
    assert read_limits(metal)[-1] > 0


ORPHAN = """
import os, threading
from app.runners import parent_watch
parent_watch.exit_with_parent(os.getppid(), before_exit=lambda: print("unwired", flush=True))
print("started", flush=True)
threading.Event().wait()
"""


def test_a_process_whose_parent_has_exited_unwires_its_memory_before_it_exits() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.stdin.close()
        assert process.stdout.read() == "unwired\n"
        assert process.wait(20) == 3


def _capacity(wirable: int) -> Capacity:
    return Capacity(
        parallel=1, context_length=1, kv_budget=1, kv_bytes_per_sequence=1, wirable=wirable
    )


@pytest.mark.parametrize(
    ("wirable", "in_use", "seconds"),
    [(0, 300, 5), (6, 1, 30), (96, 96, 30), (384, 200, 50), (384, 384, 96), (384, 500, 96)],
)
def test_the_grace_period_grows_with_the_wired_memory(
    wirable: int, in_use: int, seconds: float
) -> None:
    """Sizes in GiB. A process without wired memory can be killed at once."""
    ledger = Ledger(weights=in_use * GIB)
    assert stop_grace(_capacity(wirable * GIB), ledger) == seconds
    assert stop_grace(None, ledger) == 5
