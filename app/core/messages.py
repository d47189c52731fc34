"""What an engine thread says: the model loads, is there, has turned, or is lost.

Knows: counts, words, clock readings. Must not know: threads, processes, how any of it travels.
Plain data, because an engine may live in another process. A clock reading is
`time.monotonic_ns()`, which counts from one and the same moment in all processes of a machine
(CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS).
"""

from dataclasses import dataclass

from app.core.errors import Kind
from app.core.jobs import Capacity, EngineStats, Step

IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """at: monotonic ns. doing: what the thread began then, such as "decode of 8 sequences"; `IDLE`
    while it waits for something to do, for as long as that takes."""

    at: int
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """progress: 0 to 100. memory: bytes held by the allocator."""

    progress: int
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """stats: those of an engine that has done nothing yet, its ledger above all."""

    stats: EngineStats
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The thread has ended. ours: whether it was a fault of ours, an assertion for example, whose
    traceback is in the log; else `kind` and `message` are those of the AppError."""

    kind: Kind
    message: str
    ours: bool = False


Message = Loading | Ready | Failed | Step
