"""From the command to the first answer of the built-in model: seconds, and the CPU time of both
processes, compared with an older commit.

The request is sent as soon as the server listens, so it also waits for the model. Rounds alternate,
and the ratios compare adjacent starts. The first start of each commit, which writes bytecode, is
not measured.

The older commit is cloned to build/baseline, with a separate environment from its own locks.
"""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.client import format_spread
from benchmarks.delivery import HERE, alternate, clone_baseline
from benchmarks.stream_counter import TIMEOUT, read_server_cpu
from tests.server_process import ServerProcess

ROUNDS = 15

_BODY = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "What is mlxrunner?"}],
    "max_tokens": 1,
}

# of a server that rejects requests while its model is loading
_RETRY_SECONDS = 0.005

# The first start of a checkout must write its bytecode, even if this process must not.
_ENVIRON = {"PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """listening, answered: seconds from the command. server, model: CPU seconds of the two
    processes until the answer."""

    listening: float
    answered: float
    server: float
    model: float

    @property
    def cpu(self) -> float:
        return self.server + self.model


def report(baseline: str | None) -> str:
    """baseline: a commit to compare with; None for no comparison."""
    checkouts: dict[str, Path | None] = {HERE: None}
    if baseline is not None:
        checkouts[baseline] = clone_baseline(baseline)
    for checkout in checkouts.values():
        measure(checkout)
    load = os.getloadavg()[0]
    found: dict[str, list[Start]] = {name: [] for name in checkouts}
    for turn in range(ROUNDS):
        for name in alternate(list(checkouts), turn):
            found[name].append(measure(checkouts[name]))
    heading = (
        f"From the command to the first answer of the built-in model, {ROUNDS} rounds; the load "
        f"average of {os.cpu_count()} cores was {load:.1f} before"
    )
    return f"{heading}\n\n{format_starts(found)}"


def measure(checkout: Path | None) -> Start:
    """Starts a server, asks it once, and stops it. checkout: None for this one."""
    server = ServerProcess([], _ENVIRON, checkout=checkout)
    try:
        url = server.url
        listening = time.monotonic() - server.started
        with httpx.Client(timeout=TIMEOUT) as client:
            while not client.post(f"{url}/v1/chat/completions", json=_BODY).is_success:
                time.sleep(_RETRY_SECONDS)
        answered = time.monotonic() - server.started
        used = read_server_cpu(server)
    finally:
        server.stop()
    return Start(listening=listening, answered=answered, server=used.front, model=used.runner)


def format_starts(found: Mapping[str, Sequence[Start]]) -> str:
    lines = [
        "| server | listening, s | answered, s | CPU, s: server | model | answered, ratio | CPU, "
        "ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, starts in found.items():
        times = [
            format_spread([s.listening for s in starts]),
            format_spread([s.answered for s in starts]),
        ]
        cpu = [
            f"{statistics.median(getattr(s, f) for s in starts):.3g}" for f in ("server", "model")
        ]
        ratios = ["", ""]
        if name != HERE:
            pairs = list(zip(found[HERE], starts, strict=True))
            ratios = [
                format_spread([here.answered / there.answered for here, there in pairs]),
                format_spread([here.cpu / there.cpu for here, there in pairs]),
            ]
        lines.append(f"| {' | '.join([name, *times, *cpu, *ratios])} |")
    return "\n".join(lines)
