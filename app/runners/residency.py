"""Who is in memory: a pure policy.

Knows: names, bytes, clock readings, who waits for whom. Must not know: processes, asyncio, models.
`plan` looks at everything once and says what to do; called again after that was done, or with
nothing changed, it says nothing new.

    total   [ pinned | ready ... | leaving ... | loading |   free   ]
                       least recently used first: out

The rules:

- One load at a time, in the order in which the first request of each model came. Requests for a
  model that is in memory have nothing to do with this queue.
- A model gets the bytes that suit it (`Need.wanted`) where they are free. Nobody is evicted to give
  it more than it needs (`Need.least`): that is only a larger prefix cache, and an eviction costs
  others a load. For the same reason it gets no more than the least where models that were here just
  now could come back beside it, so that two models which fit side by side end up side by side.
- Room is made by the fewest evictions, of idle models before busy ones, of those least recently
  used; never of a pinned one. Idle ones go at once, and only when that will be enough.
- A busy one is closed first: its requests end, new ones wait, and it goes. It is not closed as long
  as it has a request older than the one that waits for its room. That one could not be served
  before it ends anyway, so others may be served meanwhile. The one who waits for room therefore
  waits for one request that was before it and one that came after it, not for more; and those who
  find the model closed stand in the queue, behind it but before whoever comes later.
- A model that is closed stays the one that is closed, unless idle ones now make the room or nobody
  waits for it any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.core.amounts import in_memory
from app.runners.tenancy import Action, Applicant, Evict, Forgo, Limits, Load, Plan, Refuse, Tenant


def plan(now: float, queue: Sequence[Applicant], tenants: Sequence[Tenant], limits: Limits) -> Plan:
    """queue: in the order in which they are to be served."""
    idle = [t for t in tenants if t.phase == "ready" and t.busy_since is None and not t.pinned]
    over = [t for t in idle if t.dismissed or t.expires <= now]
    wake = min((t.expires for t in idle if t not in over), default=None)
    actions: list[Action] = [Evict(name=t.name) for t in over]
    closed = {t.name for t in tenants if t.dismissed and t.phase == "ready"}
    staying = [t for t in tenants if t not in over]
    for applicant in queue:
        step = _admit(applicant, staying, tenants, limits)
        actions += step.actions
        closed |= step.closed
        if step.last:
            break
    return Plan(
        actions=tuple(actions),
        closed=frozenset(closed),
        wake=None if wake == float("inf") else wake,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What one applicant brings about. last: whether those behind it have to wait."""

    actions: tuple[Action, ...] = ()
    closed: frozenset[str] = frozenset()
    last: bool = True


def _admit(
    applicant: Applicant, staying: Sequence[Tenant], tenants: Sequence[Tenant], limits: Limits
) -> _Step:
    """staying: all tenants but those whose time is over."""
    here = next((t for t in tenants if t.name == applicant.name), None)
    if here is not None and here.phase != "leaving":
        # it was closed for somebody who is not there any more, or has been dismissed
        return _Step(last=False)
    if loading := [t for t in tenants if t.phase == "loading"]:
        useless = [t for t in loading if not (t.wanted or t.pinned)]
        return _Step(actions=tuple(Evict(name=t.name) for t in useless))
    if here is not None or not applicant.measured:
        return _Step()
    missing = _missing(applicant, tenants, limits)
    if why := _hopeless(applicant, tenants, limits):
        return _Step(actions=(Refuse(name=applicant.name, why=why),), last=False)
    if missing.met:
        share = _share(applicant, tenants, limits)
        return _Step(actions=(Load(name=applicant.name, share=share),))
    missing = missing.without([t for t in tenants if t not in staying or t.phase == "leaving"])
    if missing.met:
        return _Step()
    if not applicant.evicts:
        why = "other models would be evicted for it; its first request will load it"
        return _Step(actions=(Forgo(name=applicant.name, why=why),), last=False)
    candidates = [t for t in staying if t.phase == "ready" and not t.pinned]
    return _make_room(applicant, missing, candidates)


def _make_room(applicant: Applicant, missing: "_Missing", candidates: Sequence[Tenant]) -> _Step:
    by_use = sorted(candidates, key=lambda t: t.used)
    idle = [t for t in by_use if t.busy_since is None]
    busy = [t for t in by_use if t.busy_since is not None]
    if missing.without(idle).met:
        # who was told to finish and did is gone before others are looked at
        idle.sort(key=lambda t: not t.closed)
        return _Step(actions=tuple(Evict(name=t.name) for t in _fewest(idle, missing)))
    # idle ones that were closed are as good as gone; others may yet be needed before room is made
    leaving = [t for t in idle if t.closed]
    chosen = [t for t in busy if t.closed]
    if not missing.without([*idle, *chosen]).met:
        open_ones = [t for t in busy if not t.closed]
        chosen += _fewest(open_ones, missing.without([*idle, *chosen]))
    for tenant in reversed(chosen):
        if missing.without([*idle, *(t for t in chosen if t is not tenant)]).met:
            chosen.remove(tenant)
    closed = (t for t in chosen if t.busy_since is not None and t.busy_since >= applicant.since)
    return _Step(
        actions=tuple(Evict(name=t.name) for t in leaving),
        closed=frozenset(t.name for t in closed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    """What has to become free: bytes, and places. Negative where more is free than needed."""

    bytes: int
    places: int

    @property
    def met(self) -> bool:
        return self.bytes <= 0 and self.places <= 0

    def without(self, gone: Sequence[Tenant]) -> "_Missing":
        return _Missing(
            bytes=self.bytes - sum(t.share for t in gone), places=self.places - len(gone)
        )


def _missing(applicant: Applicant, tenants: Sequence[Tenant], limits: Limits) -> _Missing:
    need, total = applicant.need, limits.total
    short = 0
    if need is not None and total is not None:
        short = need.least + sum(t.share for t in tenants) - total
    places = 0 if limits.loaded is None else len(tenants) + 1 - limits.loaded
    return _Missing(bytes=short, places=places)


def _hopeless(applicant: Applicant, tenants: Sequence[Tenant], limits: Limits) -> str | None:
    """A sentence, if it would not fit even with all gone that may go."""
    pinned = [t for t in tenants if t.pinned]
    if limits.loaded is not None and len(pinned) >= limits.loaded:
        return (
            f"{applicant.name} cannot be loaded: {len(pinned)} models are pinned, and at most "
            f"{limits.loaded} can be loaded: raise --max-loaded or pin fewer models"
        )
    if applicant.need is None or limits.total is None:
        return None
    least = applicant.need.least
    needs = f"{applicant.name} needs {in_memory(least)} for weights, KV caches and working space"
    lower = "use a shorter --context, a lower --parallel or --quantize"
    if applicant.most is not None and least > applicant.most:
        return (
            f"{needs}, but may use only {in_memory(applicant.most)}: raise its memory, or {lower}"
        )
    kept = sum(t.share for t in pinned)
    if least <= limits.total - kept:
        return None
    if kept and least <= limits.total:
        names = ", ".join(sorted(t.name for t in pinned))
        return (
            f"{needs}, but the pinned models ({names}) leave only "
            f"{in_memory(limits.total - kept)}: "
            f"pin fewer models, lower their memory, raise --memory, or {lower}"
        )
    together = in_memory(limits.total)
    return f"{needs}, but all models together may use only {together}: raise --memory, or {lower}"


def _share(applicant: Applicant, tenants: Sequence[Tenant], limits: Limits) -> int | None:
    """Bytes: those that suit it, as far as they are free and not left for those who return."""
    need, total = applicant.need, limits.total
    if need is None or total is None:
        return None
    spare = total - sum(t.share for t in tenants) - need.least
    places = len(limits.returning)
    if limits.loaded is not None:
        places = limits.loaded - len(tenants) - 1
    for least in limits.returning[:places]:
        if least <= spare:
            spare -= least
    wanted = max(need.least, min(need.wanted, applicant.most or need.wanted))
    return min(wanted, need.least + spare)


def _fewest(candidates: Sequence[Tenant], missing: _Missing) -> list[Tenant]:
    """Of the smallest sets that make up for what is missing, the one with the first candidates; all
    of them, where that is not enough."""
    left = list(candidates)
    chosen: list[Tenant] = []
    while not missing.met and left:
        count = _least_count(left, missing)
        tenant = next(
            t
            for t in left
            if _least_count([o for o in left if o is not t], missing.without([t])) < count
        )
        chosen.append(tenant)
        left.remove(tenant)
        missing = missing.without([tenant])
    return chosen


def _least_count(candidates: Sequence[Tenant], missing: _Missing) -> int:
    """How many of them make up for what is missing; more than there are, if all do not. No set is
    smaller than one of the largest shares."""
    count = 0
    for tenant in sorted(candidates, key=lambda t: t.share, reverse=True):
        if missing.met:
            return count
        missing = missing.without([tenant])
        count += 1
    return count if missing.met else len(candidates) + 1
