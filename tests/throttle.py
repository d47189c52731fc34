"""Slow engines, so that a test can act while they work on a known request.

For requests that must be running at some moment and must end afterwards; requests that may run
forever need no throttle, but `tiny.UNENDING`.
"""

import os
from pathlib import Path

from tests.server_process import ROOT

# Seconds per step of a throttled engine: 900 tokens take longer than the timeout of any test.
STEP_SECONDS = 0.1

_SITECUSTOMIZE = """
import os, time
from app.core.jobs import LoadProgress
from app.engine.loop import Loop
from app.engine.scheduler import StepPacing
from app.engine.thread import EngineThread

step, run_loop, count_rounds = Loop.step, EngineThread._run_loop, StepPacing.count_next

def throttled(loop):
    if os.path.exists({file!r}):
        time.sleep({seconds})
    return step(loop)

def count_throttled(pacing):
    return 1 if os.path.exists({file!r}) else count_rounds(pacing)

def held(thread):
    if os.path.exists({hold!r}):
        thread._post(LoadProgress(progress={progress}, allocated_bytes=0))
    while os.path.exists({hold!r}):
        time.sleep(0.02)
    run_loop(thread)

Loop.step, EngineThread._run_loop, StepPacing.count_next = throttled, held, count_throttled
"""

# The progress of a load that is held, in percent.
HELD_PROGRESS = 42


class Throttle:
    """Engines in processes with `variables` in their environment are slow while the throttle is
    on, and take one round of prompt chunks per step. While loads are held, no engine begins to load
    its model."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file, self._hold_file = folder / "on", folder / "hold"
        code = _SITECUSTOMIZE.format(
            file=str(self._file),
            seconds=STEP_SECONDS,
            hold=str(self._hold_file),
            progress=HELD_PROGRESS,
        )
        (folder / "sitecustomize.py").write_text(code)
        # sitecustomize imports our package, which may be installed from different sources than
        # these
        self.variables = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    def on(self) -> "Throttle":
        self._file.touch()
        return self

    def off(self) -> "Throttle":
        self._file.unlink(missing_ok=True)
        return self

    def hold_loads(self) -> "Throttle":
        self._hold_file.touch()
        return self

    def release_loads(self) -> "Throttle":
        self._hold_file.unlink(missing_ok=True)
        return self
