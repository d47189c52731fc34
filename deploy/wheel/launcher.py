"""The command of an installed wheel. It makes `app` and `models` importable and runs the command
line.

Both packages are in this folder (see deploy/wheel/backend.py in the source tree). The folder is
inserted at the front of `sys.path`, so that packages with the same names elsewhere are not imported
instead.
"""

import sys
from pathlib import Path


def main() -> int:
    folder = str(Path(__file__).resolve().parent)
    sys.path.insert(0, folder)
    from app.cli import main as run

    return run()
