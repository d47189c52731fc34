"""Models that may be in memory, and what is known of each.

Knows: names, bytes, seconds. Must not know: who loads them, how they generate.

How long a request may be.
"""

from dataclasses import dataclass, field
from typing import Literal

from app.core.jobs import Capacity, ComputeBackend, EngineStats
from app.core.settings import MEBIBYTE, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """How long a request may be, and what sets it. model_context: positions that the model was made
    for. configured_context: Settings.context. capacity: None until the model is loaded."""

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
        """Why a prompt of `num_tokens` tokens cannot be served, and what to do. Such a prompt will
        not fit later either: it is not others that stand in its way."""
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
                "model's own is "
                f"{self.model_context}): shorten the prompt, or increase --context"
            )
        return (
            f"but the model's context is {self.context_length} tokens, {need}: shorten the prompt"
        )


# unloaded: on disk only · queued: to be loaded, but another one is before it or has to leave first
# · unloading: its process is on its way out · refused: it broke too often, see `error`
ModelPhase = Literal[
    "unloaded", "queued", "loading", "ready", "stalled", "failed", "unloading", "refused"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that clients may name. name: what they call it. source: what `store.find` finds it
    by; None is the built-in model. settings: what holds for it, `Settings.for_model`. keep_alive:
    seconds that it stays without requests, math.inf for ever. pinned: never evicted."""

    name: str
    source: str | None
    settings: Settings
    keep_alive: float
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirement:
    """Bytes that a model asks for before it is loaded, KV caches included. min_bytes: with less it
    cannot be served as it was asked for. preferred_bytes: what suits it; more helps only the prefix
    cache. device_budget: what the device can give to all our models together, as things stand
    now."""

    min_bytes: int
    preferred_bytes: int
    device_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """One model, now. stats: counters since the server started, of all its runners together; gauges
    of the present one. progress: 0 to 100 while loading. leases: requests that hold it or wait for
    it. preparing, compiling: admitted jobs whose prompt, or whose grammar, is being prepared.
    rejected: jobs that were refused because too many were here. allocation: bytes that it may use;
    None while it is not loaded, or has the whole device. expires_at: Unix time at which it will be
    unloaded if nobody asks for it; None while somebody does, while it is not loaded, and for ever.
    loads: times that it was ready. evictions: times that it had to leave for another one before its
    time. restarts: times that its runner had to be started again. backend: while it is loaded."""

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
