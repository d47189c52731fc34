"""The entry point of a server that `multiprocessing` starts: `mlxrunner serve` with a log file.

The process that forks the servers imports this module, and with it all of ours, because imports
take most of a server's start.
"""

import os
import pkgutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module

import app
import models
from app.cli import main

# entry points of other processes, and scripts
_NOT_IMPORTED = ("__main__", "_main", "training", "builtin", "bench", "prove")


def _import_everything() -> None:
    for package in (app, models):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(name in module.name for name in _NOT_IMPORTED):
                with suppress(ImportError):  # an optional dependency is not installed
                    import_module(module.name)


_import_everything()


def serve(arguments: Sequence[str], environ: Mapping[str, str], log: str) -> None:
    """Runs the server until it is terminated. log: the file for its output."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environ)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.exit(main(["serve", *arguments]))


def _end_with_parent(parent: int) -> None:
    """The tests may be killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
