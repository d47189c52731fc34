"""How a process of ours is begun: the same Python, the same packages.

Knows: the interpreter, its options and its environment. Must not know: what the process does.
"""

import os
import sys
from pathlib import Path

# where our packages lie, wherever this process found them
_ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """What runs a module of ours. Nothing is looked for in the working directory (-P): people start
    servers where there is an `app` of theirs."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{known}" if known else str(_ROOT)}
