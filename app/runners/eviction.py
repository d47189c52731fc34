"""The policy that decides which models are loaded and evicted, as pure functions.

Knows: names, bytes, clock readings, waiting requests. Must not know: processes, asyncio, models.

`plan` takes the whole state and returns actions. It is idempotent: if it is called again with an
unchanged state, or after these actions were started, it returns no new actions.

    total   [ pinned | ready ... | leaving ... | loading | free: spare memory of ready models ]
                       evicted in order of last use

The rules:

- Models are loaded one at a time, in the order in which the first request of each model arrived.
  Requests for a loaded model bypass this queue.
- A model gets its preferred memory (`MemoryRequirement.preferred_bytes`) if that much is free. No
  model is evicted to give it more than its minimum (`MemoryRequirement.min_bytes`). The additional
  memory only enlarges the prefix cache, whereas an eviction costs another load. For the same
  reason, a model gets only the minimum if a recently evicted model could then be loaded next to it.
  Two models that fit in memory together are therefore eventually loaded together.
- Memory is freed by the fewest evictions. Idle models are evicted before busy ones, and the least
  recently used model comes first. A pinned model is never evicted. Idle models are evicted
  immediately, but only if this frees enough memory.
- A busy model is drained before it is unloaded: its running requests finish, and new ones wait. It
  is not drained while it has a request older than the request that waits for the memory. The
  waiting request could not be served before the older one ends, so the model may serve other
  requests until then. The waiting request therefore waits for at most one older and one newer
  request. Requests for a draining model join the queue after the waiting request, but before later
  ones.
- A draining model keeps draining, unless idle models now free enough memory, or no request is
  waiting for the memory any longer.
- Free memory is divided equally among the loaded models, for their cached prefixes. It is taken
  back from them before it is allocated to a model, so it never prevents or delays a load by more
  than a step, and it is never a reason to evict a model.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from app.core.models import MemoryRequirement
from app.core.units import format_memory, pluralize


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is loaded, being loaded or being unloaded. All times are from one monotonic
    clock.

    allocation: the bytes reserved for the model.
    spare_bytes: the bytes that it may be using in addition.
    max_bytes: the memory limit in the model's settings.
    busy_since: the start time of its oldest running request; None while it is idle.
    last_used: the time at which a request last started or ended.
    expires_at: the time from which it may be unloaded if it is idle; math.inf if it never expires.
    has_demand: whether a request is waiting for it or it must stay loaded.
    unload_requested: whether to unload it even if memory is free, or if it is pinned.
    draining: whether the last plan was draining it.
    """

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
    spare_bytes: int = 0
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A model to load.

    waiting_since: the arrival time of its oldest waiting request.
    requirement_known: whether `requirement` is known. Planning stops at the first request whose
        requirement is unknown.
    requirement: the memory requirement; None for a model that may use all memory.
    max_bytes: the memory limit in the model's settings.
    may_evict: whether other models may be evicted for it. A preload without a request uses only
        free memory.
    """

    name: str
    waiting_since: float
    requirement_known: bool
    requirement: MemoryRequirement | None
    max_bytes: int | None
    may_evict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """The limits of the pool.

    total_bytes: the memory budget for all models; None for a server with one model.
    max_loaded: the maximum number of loaded models.
    evicted_min_bytes: the minimum bytes of each model that was evicted before its keep-alive
        expired.
    shared_bytes: the memory budget for all models, if loaded models may use all of it that is free;
        None if they may use only their allocations.
    """

    total_bytes: int | None
    max_loaded: int | None
    evicted_min_bytes: Sequence[int]
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Loads a model. `allocation` is its memory budget in bytes; None means all memory."""

    name: str
    allocation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Unloads a model immediately, because it is idle or its load is no longer needed."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectLoad:
    """Rejects a load, because the model would not fit even after all possible evictions. `reason`
    is one sentence for the waiting requests."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPreload:
    """Skips the preload of a model, because other models would have to be evicted. `reason` is a
    clause."""

    name: str
    reason: str


Action = Load | Evict | RejectLoad | SkipPreload


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of planning.

    draining: the models that accept no new requests.
    spare_bytes: how many bytes each ready model may use in addition to its allocation.
    wake_at: the time at which to plan again if no event occurs; None for never.
    """

    actions: tuple[Action, ...]
    draining: frozenset[str]
    spare_bytes: Mapping[str, int]
    wake_at: float | None


def plan(
    now: float, requests: Sequence[LoadRequest], loaded: Sequence[LoadedModel], limits: PoolLimits
) -> Plan:
    """Decides which models to load, drain and unload. `requests` lists the load requests in
    scheduling order."""
    idle = [
        t
        for t in loaded
        if t.phase == "ready" and t.busy_since is None and (t.unload_requested or not t.pinned)
    ]
    over = [t for t in idle if t.unload_requested or t.expires_at <= now]
    wake = min((t.expires_at for t in idle if t not in over), default=None)
    actions: list[Action] = [Evict(name=t.name) for t in over]
    closed = {t.name for t in loaded if t.unload_requested and t.phase == "ready"}
    remaining = [t for t in loaded if t not in over]
    for request in requests:
        step = _decide(request, remaining, loaded, limits)
        actions += step.actions
        closed |= step.draining
        if step.blocks_queue:
            break
    return Plan(
        actions=tuple(actions),
        draining=frozenset(closed),
        spare_bytes=_divide_spare_memory(requests, loaded, closed, limits),
        wake_at=None if wake == float("inf") else wake,
    )


def _divide_spare_memory(
    requests: Sequence[LoadRequest],
    loaded: Sequence[LoadedModel],
    closed: Set[str],
    limits: PoolLimits,
) -> Mapping[str, int]:
    """Returns the spare bytes of each ready model. `closed` are the models that accept no requests.
    While the next model to load is being estimated, no model gets more than it has."""
    ready = [t for t in loaded if t.phase == "ready"]
    if limits.shared_bytes is None:
        return {t.name: 0 for t in ready}
    here = {t.name for t in loaded}
    request = next((r for r in requests if r.name not in here), None)
    total = limits.shared_bytes
    if request is not None and request.requirement_known:  # the plan may load it now
        total -= _choose_allocation(request, loaded, limits) or 0
    free = total - sum(t.allocation for t in loaded)
    may_grow = request is None or request.requirement_known
    sharing = [t for t in ready if t.name not in closed]
    shares = {t.name: 0 for t in loaded}
    for t in sharing:
        share = max(0, free) // len(sharing)
        if t.max_bytes is not None:
            share = min(share, max(0, t.max_bytes - t.allocation))
        shares[t.name] = share if may_grow else min(share, t.spare_bytes)
    in_use = sum(t.allocation + max(t.spare_bytes, shares[t.name]) for t in loaded)
    if in_use > total:  # other models must give back memory first
        shares = {t.name: min(t.spare_bytes, shares[t.name]) for t in loaded}
    return {t.name: shares[t.name] for t in ready}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """The decision about one request. `blocks_queue` is True if later requests must wait."""

    actions: tuple[Action, ...] = ()
    draining: frozenset[str] = frozenset()
    blocks_queue: bool = True


def _decide(
    request: LoadRequest,
    remaining: Sequence[LoadedModel],
    loaded: Sequence[LoadedModel],
    limits: PoolLimits,
) -> _Decision:
    """Decides about one request. `remaining` lists the models that this plan has not unloaded."""
    here = next((t for t in loaded if t.name == request.name), None)
    if here is not None and here.phase != "leaving":
        # The model was being drained for a request that has since been cancelled or rejected.
        return _Decision(blocks_queue=False)
    if loading := [t for t in loaded if t.phase == "loading"]:
        unneeded = [t for t in loading if not (t.has_demand or t.pinned)]
        return _Decision(actions=tuple(Evict(name=t.name) for t in unneeded))
    if here is not None or not request.requirement_known:
        return _Decision()
    missing = _compute_shortfall(request, loaded, limits)
    if why := _rejection_reason(request, loaded, limits):
        return _Decision(actions=(RejectLoad(name=request.name, reason=why),), blocks_queue=False)
    if missing.covered:
        share = _choose_allocation(request, loaded, limits)
        if share is not None and limits.total_bytes is not None:
            in_use = sum(t.allocation + t.spare_bytes for t in loaded)
            if in_use + share > limits.total_bytes:
                return _Decision()  # until the loaded models have given back spare memory
        return _Decision(actions=(Load(name=request.name, allocation=share),))
    missing = missing.after_evicting(
        [t for t in loaded if t not in remaining or t.phase == "leaving"]
    )
    if missing.covered:
        return _Decision()
    if not request.may_evict:
        why = "other models would have to be evicted; its first request will load it"
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
        # Evict models that have finished draining first.
        idle.sort(key=lambda t: not t.draining)
        return _Decision(
            actions=tuple(Evict(name=t.name) for t in _fewest_evictions(idle, shortfall))
        )
    # Evict only idle models that were draining. The other candidates may get a request before
    # enough memory is free.
    leaving = [t for t in idle if t.draining]
    chosen = [t for t in busy if t.draining]
    if not shortfall.after_evicting([*idle, *chosen]).covered:
        open_ones = [t for t in busy if not t.draining]
        chosen += _fewest_evictions(open_ones, shortfall.after_evicting([*idle, *chosen]))
    for model in reversed(chosen):
        if shortfall.after_evicting([*idle, *(t for t in chosen if t is not model)]).covered:
            chosen.remove(model)
    closed = (
        t for t in chosen if t.busy_since is not None and t.busy_since >= request.waiting_since
    )
    return _Decision(
        actions=tuple(Evict(name=t.name) for t in leaving),
        draining=frozenset(t.name for t in closed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shortfall:
    """The number of bytes and the number of models to free. A negative number means a surplus."""

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
    """Returns the reason as a sentence if the model would not fit even after all possible
    evictions, otherwise None."""
    pinned = [t for t in loaded if t.pinned]
    if limits.max_loaded is not None and len(pinned) >= limits.max_loaded:
        return (
            f"{request.name} cannot be loaded alongside {pluralize(len(pinned), 'pinned model')}: "
            f"at most {limits.max_loaded} can be loaded; raise --max-loaded or pin fewer models"
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
    """Returns the memory budget for a model, up to its preferred memory, from memory that is free
    and not reserved for recently evicted models. Returns None if the model may use all memory."""
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
    desired = max(
        need.min_bytes, min(need.preferred_bytes, request.max_bytes or need.preferred_bytes)
    )
    return min(desired, need.min_bytes + spare)


def _fewest_evictions(
    candidates: Sequence[LoadedModel], shortfall: _Shortfall
) -> list[LoadedModel]:
    """Returns the smallest set of candidates that covers the shortfall, preferring earlier
    candidates. Returns all candidates if they do not free enough memory together."""
    left = list(candidates)
    chosen: list[LoadedModel] = []
    while not shortfall.covered and left:
        count = _min_eviction_count(left, shortfall)
        model = next(
            t
            for t in left
            if _min_eviction_count([o for o in left if o is not t], shortfall.after_evicting([t]))
            < count
        )
        chosen.append(model)
        left.remove(model)
        shortfall = shortfall.after_evicting([model])
    return chosen


def _min_eviction_count(candidates: Sequence[LoadedModel], shortfall: _Shortfall) -> int:
    """Returns the minimum number of candidates that cover the shortfall, which is found by taking
    the largest allocations first. Returns one more than the number of candidates if all of them
    together do not free enough memory."""
    count = 0
    for model in sorted(candidates, key=lambda t: t.allocation, reverse=True):
        if shortfall.covered:
            return count
        shortfall = shortfall.after_evicting([model])
        count += 1
    return count if shortfall.covered else len(candidates) + 1
