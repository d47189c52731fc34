"""The command of an installed wheel: makes `app` and `models` importable, then runs the command
line.

Both packages are in this folder (see deploy/wheel/backend.py in the source tree). The folder goes
to the front of `sys.path`, so that packages of the same names elsewhere are not imported in their
place.
"""

import sys
from pathlib import Path


def main() -> int:
    folder = str(Path(__file__).resolve().parent)
    sys.path.insert(0, folder)
    from app.cli import main as run

    return run()
