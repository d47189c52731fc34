"""Served models, their state and memory requirement, and the limit on the length of a request.

Knows: names, bytes, seconds. Must not know: model loading, generation.
"""

from dataclasses import dataclass, field
from typing import Literal

from app.core.jobs import Capacity, ComputeBackend, EngineStats
from app.core.settings import MEBIBYTE, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """The maximum length of a request, and the cause of this limit. model_context: the maximum
    number of positions that the model supports. configured_context: the value of Settings.context.
    capacity: the engine's capacity; None until the model is loaded. request_context: the request's
    own limit; None if it has none."""

    model_context: int
    configured_context: int | None
    capacity: Capacity | None
    request_context: int | None = None

    @property
    def context_length(self) -> int:
        own = self.server_context
        return own if self.request_context is None else min(own, self.request_context)

    @property
    def server_context(self) -> int:
        """The maximum length without the request's own limit."""
        if self.capacity is not None:
            return self.capacity.context_length
        return (
            self.model_context
            if self.configured_context is None
            else min(self.model_context, self.configured_context)
        )

    def explain_too_long(self, num_tokens: int) -> str:
        """Returns the reason why a prompt of `num_tokens` tokens is rejected, and a remedy. The
        reason is permanent: the prompt would not fit even without other requests."""
        capacity = self.capacity
        need = "at least one of which is needed for the output"
        if self.context_length < self.server_context:
            return (
                f"but the request limits its context to {self.context_length} tokens, {need}: "
                "shorten the prompt, or increase that limit"
            )
        if capacity is not None and capacity.limited_by_memory:
            required = (
                (num_tokens + 1)
                / capacity.context_length
                * capacity.kv_bytes_per_sequence
                / MEBIBYTE
            )
            return (
                f"but only {capacity.context_length} tokens fit in memory, {need} (it needs about "
                f"{required:.1f} MiB of KV cache, and a request can have "
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


# unloaded: on disk only · queued: waiting until another model is loaded or unloaded · unloading:
# its process is being stopped · refused: it failed too often, see `error`
ModelPhase = Literal[
    "unloaded", "queued", "loading", "ready", "stalled", "failed", "unloading", "refused"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that clients may request.

    name: the name used by clients. source: the argument of `store.find`; None is the built-in
    model. settings: the model's settings, from `Settings.for_model`. keep_alive: the number of
    seconds that the model stays loaded without requests; math.inf is forever. pinned: whether the
    model is never evicted.
    """

    name: str
    source: str | None
    settings: Settings
    keep_alive: float
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirement:
    """The memory that a model needs, estimated before it is loaded; it includes KV caches.

    min_bytes: the minimum for serving the model with its settings. preferred_bytes: the recommended
    size; additional memory enlarges only the prefix cache. device_budget: the bytes that the device
    currently has for all models of this server together.
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
    rejected because the queue was full. allocation: the bytes that the model may use; None while it
    is not loaded or has the whole device. expires_at: the Unix time at which the model will be
    unloaded if no further request arrives; None while it has requests, is not loaded, or stays
    loaded forever. loads: the number of completed loads. evictions: the number of times that the
    model was unloaded to make room for another model before its keep-alive time expired. restarts:
    the number of times that its runner was restarted. backend: the compute backend, set while the
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
