"""Spawns model processes; the first one of a server before the server is imported.

Knows: the command, the environment, the pipes and the socket pair of a process. Must not know: the
event loop, messages, models. It imports little, because the process of the first model, which
imports the engine for half a second, starts while the server is imported.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

# The directory of the packages `app` and `models`.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


class SpawnedProcess:
    """A model process and this process's end of a pair of connected sockets, which the caller
    closes. The process exits when it is closed."""

    def __init__(self, process: Popen[bytes], channel_end: socket.socket) -> None:
        self.process = process
        self.channel_end = channel_end


# The argument is the name of the model, which appears in `ps`. Raises OSError if the process cannot
# be started.
Spawn = Callable[[str], SpawnedProcess]


def spawn(name: str) -> SpawnedProcess:
    """Implements `Spawn`."""
    with contextlib.ExitStack() as on_error:
        end, child_end = socket.socketpair()
        on_error.callback(end.close)
        with child_end:
            process = Popen(
                build_command("app.runners.worker_main", name, str(child_end.fileno())),
                stdin=PIPE,  # see `parent_watch`
                stdout=PIPE,
                stderr=STDOUT,
                bufsize=0,
                pass_fds=(child_end.fileno(),),
                # Ctrl-C at the terminal must reach only the parent, which stops its children
                # gracefully. The process therefore has its own process group, but not its own
                # session; see `parent_watch`. Linux also schedules by session (autogroup). On a
                # busy machine, the 99th percentile of the token delay was 0.1 s with a separate
                # session, and 0.02 s with the same session.
                process_group=0,
                env={**build_environment(), **request_huge_pages(os.environ)},
            )
        on_error.pop_all()
    return SpawnedProcess(process, end)


@contextlib.contextmanager
def spawn_early(name: str) -> Generator[Spawn]:
    """Spawns a process now, and yields a `Spawn` that returns this process the first time. The
    process is killed when the context exits, unless it was returned before. If it cannot be
    started, the first call tries again."""
    early: list[SpawnedProcess] = []
    with contextlib.suppress(OSError):
        early.append(spawn(name))
    try:
        yield lambda later_name: early.pop() if early else spawn(later_name)
    finally:
        for unused in early:
            unused.process.kill()
            with unused.process, unused.channel_end:
                unused.process.wait()


def build_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module. The option -P keeps the working directory off
    sys.path, because users may start servers in directories with their own `app` package."""
    return (sys.executable, "-P", "-m", module, *arguments)


def request_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that makes malloc request transparent huge pages, unless `environment`
    has a value for it. Weights are read once per token, and with pages of 4 KiB, address
    translation takes up to a third of that time. Linux gives them without a request if it is
    configured so ("always" in /sys/kernel/mm/transparent_hugepage/enabled), but many distributions
    set "madvise". Other systems, other C libraries and glibc before 2.35 ignore the variable, which
    is read when a process starts (https://sourceware.org/glibc/manual/latest/html_node/
    Memory-Allocation-Tunables.html)."""
    known = environment.get(_TUNABLES, "")
    if _HUGE_PAGES in known:
        return {}
    return {_TUNABLES: ":".join(filter(None, [known, f"{_HUGE_PAGES}=1"]))}


def build_environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{_PACKAGE_ROOT}{os.pathsep}{known}" if known else str(_PACKAGE_ROOT),
    }
