"""Served models, their state and their memory requirements.

Knows: names, bytes, seconds. Must not know: model loading, generation.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.core.jobs import ComputeBackend, EngineStats
from app.core.settings import Settings

# unloaded: on disk only · queued: waiting until another model is loaded or unloaded · unloading:
# its process is being stopped · refused: the model failed too often, see `error`
ModelPhase = Literal[
    "unloaded", "queued", "loading", "ready", "stalled", "failed", "unloading", "refused"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that clients may request.

    name: the name used by clients. aliases: further names that requests may use. source: the
    argument of `store.find`; None means the built-in model. folder: the folder that `source` names,
    without links; None if it names none. settings: the model's settings, from
    `Settings.for_model`. keep_alive: the number of seconds that the model stays loaded without
    requests; math.inf means forever. pinned: whether the model is never evicted.
    """

    name: str
    source: str | None
    settings: Settings
    keep_alive: float
    pinned: bool = False
    aliases: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirement:
    """The memory that a model needs, including KV caches, estimated before it is loaded.

    min_bytes: the minimum for serving the model with its settings. preferred_bytes: the recommended
    size; more memory only enlarges the prefix cache. device_budget: the number of bytes currently
    available on the device for all models of this server.
    """

    min_bytes: int
    preferred_bytes: int
    device_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The current state of one model.

    progress: the load progress from 0 to 100. stats: counters since the server started, summed over
    all runners of the model, and gauges of the current runner. leases: the number of requests that
    hold the model or wait for it. preparing, compiling: the number of admitted jobs whose prompt is
    being prepared, or whose grammar is being compiled. rejected: the number of jobs that were
    rejected because the queue was full. allocation: the number of bytes that the model may use;
    None while it is not loaded, or if it may use the whole device. expires_at: the Unix time at
    which the model will be unloaded if no further request arrives; None while it has requests, is
    not loaded, or stays loaded forever. loads: the number of completed loads. evictions: the number
    of times that the model was unloaded before its keep-alive expired, to free memory for another
    model. restarts: the number of times that its runner was restarted. backend: the compute
    backend, and kv_dtype: the type of the keys and values in its KV caches; both are set while the
    model is loaded.
    """

    name: str
    phase: ModelPhase
    progress: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    context_length: int | None = None
    parallel: int | None = None
    leases: int = 0
    preparing: int = 0
    compiling: int = 0
    rejected: int = 0
    pinned: bool = False
    allocation: int | None = None
    expires_at: float | None = None
    loads: int = 0
    evictions: int = 0
    restarts: int = 0
    error: str | None = None
    pid: int | None = None
    backend: ComputeBackend | None = None
    kv_dtype: str | None = None
