"""How a process of ours is begun: the same Python, the same packages.

Knows: the interpreter, its options and its environment. Must not know: what the process does.
"""

import os
import sys
from pathlib import Path

# where our packages lie, wherever this process found them
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def build_command(module: str, *arguments: str) -> tuple[str, ...]:
    """What runs a module of ours. Nothing is looked for in the working directory (-P): people start
    servers where there is an `app` of theirs."""
    return (sys.executable, "-P", "-m", module, *arguments)


def build_environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{_PACKAGE_ROOT}{os.pathsep}{known}" if known else str(_PACKAGE_ROOT),
    }
