"""Served models, their state and memory requirement, and the limit on the length of a request.

Knows: names, bytes, seconds. Must not know: who loads models, how they generate.
"""

from dataclasses import dataclass, field
from typing import Literal

from app.core.jobs import Capacity, ComputeBackend, EngineStats
from app.core.settings import MEBIBYTE, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The maximum length of a request and its cause. model_context: maximum number of positions of
    the model. configured_context: Settings.context. capacity: None until the model is loaded."""

    model_context: int
    configured_context: int | None
    capacity: Capacity | None

    @property
    def context_length(self) -> int:
        if self.capacity is not None:
            return self.capacity.context_length
        return (
            self.model_context
            if self.configured_context is None
            else min(self.model_context, self.configured_context)
        )

    def explain_too_long(self, num_tokens: int) -> str:
        """The reason why a prompt of `num_tokens` tokens is rejected, and a remedy. The reason is
        permanent: such a prompt would not fit even without other requests."""
        capacity = self.capacity
        need = "at least one of which is needed for the output"
        if capacity is not None and capacity.limited_by_memory:
            wanted = (
                (num_tokens + 1)
                / capacity.context_length
                * capacity.kv_bytes_per_sequence
                / MEBIBYTE
            )
            return (
                f"but only {capacity.context_length} tokens fit in memory, {need} (it needs about "
                f"{wanted:.1f} MiB of KV cache, and a request can have "
                f"{capacity.kv_bytes_per_sequence / MEBIBYTE:.1f} MiB): shorten the "
                "prompt, or increase --memory"
            )
        if self.context_length < self.model_context:
            return (
                f"but the server's context is {self.context_length} tokens, {need} (the "
                f"model's own is {self.model_context}): shorten the prompt, or increase --context"
            )
        return (
            f"but the model's context is {self.context_length} tokens, {need}: shorten the prompt"
        )


# unloaded: on disk only · queued: to be loaded after another model was loaded or unloaded ·
# unloading: its process is being stopped · refused: it failed too often, see `error`
ModelPhase = Literal[
    "unloaded", "queued", "loading", "ready", "stalled", "failed", "unloading", "refused"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that clients may request.

    name: name used by clients. source: argument of `store.find`; None is the built-in model.
    settings: the model's settings, from `Settings.for_model`. keep_alive: seconds that it stays
    loaded without requests; math.inf is forever. pinned: never evicted."""

    name: str
    source: str | None
    settings: Settings
    keep_alive: float
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirement:
    """The estimated memory of a model before it is loaded, including KV caches.

    min_bytes: minimum to serve it with its settings. preferred_bytes: recommended size; more
    enlarges only the prefix cache. device_budget: bytes that the device currently has for all
    models of this server together."""

    min_bytes: int
    preferred_bytes: int
    device_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The current state of one model.

    progress: 0 to 100 while loading. stats: counters since the server started, summed over all
    runners of the model, and gauges of the current runner. leases: requests that hold the model or
    wait for it. preparing, compiling: admitted jobs whose prompt is being prepared or whose grammar
    is being compiled. rejected: jobs that were rejected because the queue was full. allocation:
    bytes that it may use; None while it is not loaded or has the whole device. expires_at: Unix
    time at which it will be unloaded without further requests; None while it has requests, is not
    loaded, or stays loaded forever. loads: number of completed loads. evictions: number of times it
    was unloaded for another model before its keep-alive had expired. restarts: number of times its
    runner was restarted. backend: set while it is loaded."""

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
