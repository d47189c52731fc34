"""What a plan of who is in memory is made from, and what it says.

Knows: names, bytes, clock readings. Must not know: the policy (`app.runners.residency`), runners.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.core.residents import MemoryRequirement


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, or on its way in or out. Times are readings of one monotonic clock.

    allocation: bytes set aside for it. busy_since: when the oldest of the requests that hold it
    came to hold it; None while it is idle. last_used: when a request last began or ended to hold
    it. expires: when it may go if it is idle; math.inf for never. has_demand: somebody waits for
    it, or it is to be here always. unload_requested: it was asked to go, whether there is room or
    not. draining: by the last plan."""

    name: str
    phase: Literal["loading", "ready", "leaving"]
    allocation: int
    busy_since: float | None
    last_used: float
    expires_at: float
    has_demand: bool
    pinned: bool
    unload_requested: bool
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A model that is waited for. waiting_since: how long. requirement_known: whether `requirement`
    is known; the plan goes no further than to the first one whose need is not. requirement: None
    for a model that gets all there is. max_bytes: bytes that its owner allows it. may_evict:
    whether others may go for it; what is loaded in good time, and not because somebody asked for
    it, takes room that is free."""

    name: str
    waiting_since: float
    requirement_known: bool
    requirement: MemoryRequirement | None
    max_bytes: int | None
    may_evict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """total_bytes: bytes for all models; None where there is but one. max_loaded: models at once.
    returning: the least bytes of models that had to go though nobody was done with them."""

    total_bytes: int | None
    max_loaded: int | None
    evicted_min_bytes: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """allocation: bytes; None for all there is."""

    name: str
    allocation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Now: it is idle, or its load is of no use to anybody."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLoad:
    """It cannot be loaded, whoever goes. reason: a sentence for those who wait."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPreload:
    """It is not loaded in good time: others would have to go for it."""

    name: str
    reason: str


Action = Load | Evict | RejectLoad | SkipPreload


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """draining: models that take no new requests. wake_at: when there will be something to do
    though nothing happens until then; None for never."""

    actions: tuple[Action, ...]
    draining: frozenset[str]
    wake_at: float | None
