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
from app.engine.loop import Loop

step = Loop.step

def throttled(loop):
    if os.path.exists({file!r}):
        time.sleep({seconds})
    return step(loop)

Loop.step = throttled
"""


class Throttle:
    """Engines in processes with `variables` in their environment are slow while the throttle is
    on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / "on"
        code = _SITECUSTOMIZE.format(file=str(self._file), seconds=STEP_SECONDS)
        (folder / "sitecustomize.py").write_text(code)
        # sitecustomize imports our package, which may be installed from other sources than these
        self.variables = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    def on(self) -> "Throttle":
        self._file.touch()
        return self

    def off(self) -> "Throttle":
        self._file.unlink(missing_ok=True)
        return self
