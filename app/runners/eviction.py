"""Who is in memory: a pure policy.

Knows: names, bytes, clock readings, who waits for whom. Must not know: processes, asyncio, models.
`plan` looks at everything once and says what to do; called again after that was done, or with
nothing changed, it says nothing new.

    total   [ pinned | ready ... | leaving ... | loading |   free   ]
                       least recently used first: out

The rules:

- One load at a time, in the order in which the first request of each model came. Requests for a
  model that is in memory have nothing to do with this queue.
- A model gets the bytes that suit it (`MemoryRequirement.preferred_bytes`) where they are free.
  Nothing is evicted to give it more than it needs (`MemoryRequirement.min_bytes`): that is only a
  larger prefix cache, and an eviction costs others a load. For the same reason it gets no more than
  the minimum where models that were here just now could come back beside it, so that two models
  which fit side by side end up side by side.
- Room is made by the fewest evictions, of idle models before busy ones, of those least recently
  used; never of a pinned one. Idle ones go at once, and only when that will be enough.
- A busy one is closed first: its requests end, new ones wait, and it goes. It is not closed as long
  as it has a request older than the one that waits for its room. That one could not be served
  before it ends anyway, so others may be served meanwhile. The one who waits for room therefore
  waits for one request that was before it and one that came after it, not for more; and those who
  find the model closed stand in the queue, behind it but before whoever comes later.
- A model that is closed stays the one that is closed, unless idle ones now make the room or nobody
  waits for it any more.

What a plan of who is in memory is made from, and what it says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.core.model_state import MemoryRequirement
from app.core.units import format_memory


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


def plan(
    now: float, requests: Sequence[LoadRequest], loaded: Sequence[LoadedModel], limits: PoolLimits
) -> Plan:
    """requests: in the order in which they are to be served."""
    idle = [t for t in loaded if t.phase == "ready" and t.busy_since is None and not t.pinned]
    over = [t for t in idle if t.unload_requested or t.expires_at <= now]
    wake = min((t.expires_at for t in idle if t not in over), default=None)
    actions: list[Action] = [Evict(name=t.name) for t in over]
    closed = {t.name for t in loaded if t.unload_requested and t.phase == "ready"}
    staying = [t for t in loaded if t not in over]
    for applicant in requests:
        step = _decide(applicant, staying, loaded, limits)
        actions += step.actions
        closed |= step.draining
        if step.blocks_queue:
            break
    return Plan(
        actions=tuple(actions),
        draining=frozenset(closed),
        wake_at=None if wake == float("inf") else wake,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What one applicant brings about. blocks_queue: whether those behind it have to wait."""

    actions: tuple[Action, ...] = ()
    draining: frozenset[str] = frozenset()
    blocks_queue: bool = True


def _decide(
    request: LoadRequest,
    remaining: Sequence[LoadedModel],
    loaded: Sequence[LoadedModel],
    limits: PoolLimits,
) -> _Decision:
    """remaining: all tenants but those whose time is over."""
    here = next((t for t in loaded if t.name == request.name), None)
    if here is not None and here.phase != "leaving":
        # it was closed for somebody who is not there any more, or has been dismissed
        return _Decision(blocks_queue=False)
    if loading := [t for t in loaded if t.phase == "loading"]:
        useless = [t for t in loading if not (t.has_demand or t.pinned)]
        return _Decision(actions=tuple(Evict(name=t.name) for t in useless))
    if here is not None or not request.requirement_known:
        return _Decision()
    missing = _compute_shortfall(request, loaded, limits)
    if why := _rejection_reason(request, loaded, limits):
        return _Decision(actions=(RejectLoad(name=request.name, reason=why),), blocks_queue=False)
    if missing.covered:
        share = _choose_allocation(request, loaded, limits)
        return _Decision(actions=(Load(name=request.name, allocation=share),))
    missing = missing.after_evicting(
        [t for t in loaded if t not in remaining or t.phase == "leaving"]
    )
    if missing.covered:
        return _Decision()
    if not request.may_evict:
        why = "other models would be evicted for it; its first request will load it"
        return _Decision(actions=(SkipPreload(name=request.name, reason=why),), blocks_queue=False)
    candidates = [t for t in remaining if t.phase == "ready" and not t.pinned]
    return _make_room(request, missing, candidates)


def _make_room(
    request: LoadRequest, shortfall: "_Shortfall", candidates: Sequence[LoadedModel]
) -> _Decision:
    by_use = sorted(candidates, key=lambda t: t.last_used)
    idle = [t for t in by_use if t.busy_since is None]
    busy = [t for t in by_use if t.busy_since is not None]
    if shortfall.after_evicting(idle).covered:
        # who was told to finish and did is gone before others are looked at
        idle.sort(key=lambda t: not t.draining)
        return _Decision(
            actions=tuple(Evict(name=t.name) for t in _fewest_evictions(idle, shortfall))
        )
    # idle ones that were closed are as good as gone; others may yet be needed before room is made
    leaving = [t for t in idle if t.draining]
    chosen = [t for t in busy if t.draining]
    if not shortfall.after_evicting([*idle, *chosen]).covered:
        open_ones = [t for t in busy if not t.draining]
        chosen += _fewest_evictions(open_ones, shortfall.after_evicting([*idle, *chosen]))
    for tenant in reversed(chosen):
        if shortfall.after_evicting([*idle, *(t for t in chosen if t is not tenant)]).covered:
            chosen.remove(tenant)
    closed = (
        t for t in chosen if t.busy_since is not None and t.busy_since >= request.waiting_since
    )
    return _Decision(
        actions=tuple(Evict(name=t.name) for t in leaving),
        draining=frozenset(t.name for t in closed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shortfall:
    """What has to become free: bytes, and places. Negative where more is free than needed."""

    bytes: int
    models: int

    @property
    def covered(self) -> bool:
        return self.bytes <= 0 and self.models <= 0

    def after_evicting(self, evicted: Sequence[LoadedModel]) -> "_Shortfall":
        return _Shortfall(
            bytes=self.bytes - sum(t.allocation for t in evicted), models=self.models - len(evicted)
        )


def _compute_shortfall(
    request: LoadRequest, loaded: Sequence[LoadedModel], limits: PoolLimits
) -> _Shortfall:
    need, total = request.requirement, limits.total_bytes
    short = 0
    if need is not None and total is not None:
        short = need.min_bytes + sum(t.allocation for t in loaded) - total
    places = 0 if limits.max_loaded is None else len(loaded) + 1 - limits.max_loaded
    return _Shortfall(bytes=short, models=places)


def _rejection_reason(
    request: LoadRequest, loaded: Sequence[LoadedModel], limits: PoolLimits
) -> str | None:
    """A sentence, if it would not fit even with all gone that may go."""
    pinned = [t for t in loaded if t.pinned]
    if limits.max_loaded is not None and len(pinned) >= limits.max_loaded:
        return (
            f"{request.name} cannot be loaded: {len(pinned)} models are pinned, and at most "
            f"{limits.max_loaded} can be loaded: raise --max-loaded or pin fewer models"
        )
    if request.requirement is None or limits.total_bytes is None:
        return None
    least = request.requirement.min_bytes
    needs = f"{request.name} needs {format_memory(least)} for weights, KV caches and working space"
    lower = "use a shorter --context, a lower --parallel or --quantize"
    if request.max_bytes is not None and least > request.max_bytes:
        return (
            f"{needs}, but may use only {format_memory(request.max_bytes)}: raise its "
            f"memory, or {lower}"
        )
    kept = sum(t.allocation for t in pinned)
    if least <= limits.total_bytes - kept:
        return None
    if kept and least <= limits.total_bytes:
        names = ", ".join(sorted(t.name for t in pinned))
        return (
            f"{needs}, but the pinned models ({names}) leave only "
            f"{format_memory(limits.total_bytes - kept)}: "
            f"pin fewer models, lower their memory, raise --memory, or {lower}"
        )
    together = format_memory(limits.total_bytes)
    return f"{needs}, but all models together may use only {together}: raise --memory, or {lower}"


def _choose_allocation(
    request: LoadRequest, loaded: Sequence[LoadedModel], limits: PoolLimits
) -> int | None:
    """Bytes: those that suit it, as far as they are free and not left for those who return."""
    need, total = request.requirement, limits.total_bytes
    if need is None or total is None:
        return None
    spare = total - sum(t.allocation for t in loaded) - need.min_bytes
    places = len(limits.evicted_min_bytes)
    if limits.max_loaded is not None:
        places = limits.max_loaded - len(loaded) - 1
    for least in limits.evicted_min_bytes[:places]:
        if least <= spare:
            spare -= least
    wanted = max(
        need.min_bytes, min(need.preferred_bytes, request.max_bytes or need.preferred_bytes)
    )
    return min(wanted, need.min_bytes + spare)


def _fewest_evictions(
    candidates: Sequence[LoadedModel], shortfall: _Shortfall
) -> list[LoadedModel]:
    """Of the smallest sets that make up for what is missing, the one with the first candidates; all
    of them, where that is not enough."""
    left = list(candidates)
    chosen: list[LoadedModel] = []
    while not shortfall.covered and left:
        count = _min_eviction_count(left, shortfall)
        tenant = next(
            t
            for t in left
            if _min_eviction_count([o for o in left if o is not t], shortfall.after_evicting([t]))
            < count
        )
        chosen.append(tenant)
        left.remove(tenant)
        shortfall = shortfall.after_evicting([tenant])
    return chosen


def _min_eviction_count(candidates: Sequence[LoadedModel], shortfall: _Shortfall) -> int:
    """How many of them make up for what is missing; more than there are, if all do not. No set is
    smaller than one of the largest shares."""
    count = 0
    for tenant in sorted(candidates, key=lambda t: t.allocation, reverse=True):
        if shortfall.covered:
            return count
        shortfall = shortfall.after_evicting([tenant])
        count += 1
    return count if shortfall.covered else len(candidates) + 1
