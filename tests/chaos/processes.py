"""The server's processes, as Linux reports them."""

import os
from dataclasses import dataclass
from pathlib import Path

_RUNNER_MODULE = b"app.runners.worker_main"


@dataclass(frozen=True, kw_only=True)
class ProcessResources:
    """The resources of the server process. rss: bytes."""

    rss: int
    descriptors: tuple[str, ...]
    threads: int


def read_resources(pid: int) -> ProcessResources:
    threads = os.listdir(f"/proc/{pid}/task")
    return ProcessResources(
        rss=_read_status_bytes(pid, "VmRSS"),
        descriptors=_list_descriptors(pid),
        threads=len(threads),
    )


def read_address_space(pid: int) -> int:
    """The size of the address space in bytes."""
    return _read_status_bytes(pid, "VmSize")


def list_descendants(pid: int) -> list[int]:
    """The living descendants, children first."""
    pids: list[int] = []
    for child in _list_children(pid):
        pids += [child, *list_descendants(child)]
    return pids


def list_runners(pid: int) -> list[int]:
    return [
        child
        for child in _list_children(pid)
        if _RUNNER_MODULE in _read_file(f"/proc/{child}/cmdline")
    ]


def is_alive(pid: int) -> bool:
    """A zombie that its parent has not reaped yet does not count as alive."""
    state = _read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")


def _list_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in _read_file(str(task)).split()]


def _list_descriptors(pid: int) -> tuple[str, ...]:
    """The target of each descriptor, without the number of the socket or pipe."""
    targets: list[str] = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue
        targets.append(target.partition(":[")[0])
    return tuple(sorted(targets))


def _read_status_bytes(pid: int, name: str) -> int:
    for line in _read_file(f"/proc/{pid}/status").decode().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _read_file(path: str) -> bytes:
    """The content; empty if the process has ended in the meantime."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
