"""What an engine thread says: the model loads, is there, has turned, or is lost.

Knows: counts, words, clock readings. Must not know: threads, processes, how any of it travels.
Plain data, because an engine may live in another process. A clock reading is
`time.monotonic_ns()`, which counts from one and the same moment in all processes of a machine
(CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS).
"""

from dataclasses import dataclass

from app.core.errors import ErrorKind
from app.core.jobs import Capacity, EngineStats, StepOutput

IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """timestamp_ns: monotonic ns. stage: what the thread began then, such as (
        "decode of 8 "
        "sequences"
    ); `IDLE`
    while it waits for something to do, for as long as that takes."""

    timestamp_ns: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """progress: 0 to 100. allocated_bytes: bytes held by the allocator."""

    progress: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """stats: those of an engine that has done nothing yet, its ledger above all."""

    stats: EngineStats
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The thread has ended. is_internal_error: whether it was a fault of ours, an assertion for
    example, whose traceback is in the log; else `kind` and `message` are those of the AppError."""

    kind: ErrorKind
    message: str
    is_internal_error: bool = False


EngineMessage = LoadProgress | EngineReady | EngineFailed | StepOutput
