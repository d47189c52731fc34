"""`mlxrunner serve` until the server runs: the process of the first model, and failures."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.processes import is_alive, list_runners
from tests.server_process import ROOT, UNTRACED
from tests.waiting import wait_until

StartPaused = Callable[..., subprocess.Popen[str]]

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# sitecustomize.py: `serve` prints a line before it imports the server, and waits for one
PAUSE = """
import sys

class Pause:
    def find_spec(self, name, path=None, target=None):
        if name == "app.server" and "serve" in sys.orig_argv:
            print("paused", flush=True)
            input()

sys.meta_path.insert(0, Pause())
"""


@pytest.fixture
def start_paused(plant: Callable[[str], None]) -> StartPaused:
    plant(PAUSE)

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve", "--port", "0", *arguments],
            cwd=ROOT,
            env={**os.environ, **UNTRACED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "paused\n"
        return process

    return start


@linux
def test_the_model_process_starts_before_the_server_is_imported(
    start_paused: StartPaused, tmp_path: Path
) -> None:
    """A missing model fails with one line, and its model process ends before that."""
    with start_paused(str(tmp_path / "missing")) as process:
        [model_process] = list_runners(process.pid)
        _, errors = process.communicate("\n")
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert "missing" in errors
    assert not is_alive(model_process)


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_early_end_leaves_no_model_process(
    number: signal.Signals, start_paused: StartPaused
) -> None:
    with start_paused() as process:
        [model_process] = list_runners(process.pid)
        process.send_signal(number)
        process.wait()
    wait_until(lambda: not is_alive(model_process))


@linux
@pytest.mark.parametrize("arguments", [("a", "b"), ("--runner", "thread")])
def test_no_process_starts_early_without_a_single_model_process(
    arguments: tuple[str, ...], start_paused: StartPaused
) -> None:
    with start_paused(*arguments) as process:
        assert list_runners(process.pid) == []
        process.kill()
