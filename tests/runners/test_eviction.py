"""Who is in memory: single decisions, and what holds after any history."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model_state import MemoryRequirement
from app.runners.eviction import (
    Evict,
    Load,
    LoadedModel,
    LoadRequest,
    Plan,
    PoolLimits,
    RejectLoad,
    SkipPreload,
    plan,
)

NOW = 1000.0


def loaded_model(name: str, share: int, **changes: Any) -> LoadedModel:
    """Idle, here for ever."""
    whole: dict[str, Any] = {
        "phase": "ready",
        "busy_since": None,
        "last_used": NOW - 10,
        "expires_at": math.inf,
        "has_demand": False,
        "pinned": False,
        "unload_requested": False,
        "draining": False,
    }
    return LoadedModel(name=name, allocation=share, **{**whole, **changes})


def load_request(name: str, least: int, wanted: int | None = None, **changes: Any) -> LoadRequest:
    need = MemoryRequirement(
        min_bytes=least, preferred_bytes=least if wanted is None else wanted, device_budget=0
    )
    whole: dict[str, Any] = {
        "waiting_since": NOW,
        "requirement_known": True,
        "requirement": need,
        "max_bytes": None,
        "may_evict": True,
    }
    return LoadRequest(name=name, **{**whole, **changes})


def limits(total: int | None, loaded: int | None = None, *returning: int) -> PoolLimits:
    return PoolLimits(total_bytes=total, max_loaded=loaded, evicted_min_bytes=returning)


def decide(*queue: LoadRequest, here: Sequence[LoadedModel] = (), under: PoolLimits) -> Plan:
    return plan(NOW, queue, here, under)


def test_a_model_gets_what_suits_it_where_that_is_free():
    assert decide(load_request("a", 4, 7), under=limits(10)).actions == (
        Load(name="a", allocation=7),
    )


def test_a_model_gets_less_than_suits_it_before_somebody_goes_for_it():
    decided = decide(load_request("b", 4, 9), here=[loaded_model("a", 5)], under=limits(10))
    assert decided.actions == (Load(name="b", allocation=5),)


def test_a_model_leaves_room_for_those_that_had_to_go():
    """Else two that fit side by side would drive each other out for ever."""
    decided = decide(load_request("b", 4, 9), under=limits(10, None, 5))
    assert decided.actions == (Load(name="b", allocation=5),)
    decided = decide(load_request("b", 4, 9), under=limits(10, None, 8, 5))
    assert decided.actions == (Load(name="b", allocation=5),), (
        "who cannot be beside it does not count"
    )
    decided = decide(load_request("b", 4, 9), under=limits(10, 1, 5))
    assert decided.actions == (Load(name="b", allocation=9),), "nor who may not"


def test_a_model_gets_no_more_than_its_owner_allows():
    decided = decide(load_request("a", 4, 9, max_bytes=6), under=limits(10))
    assert decided.actions == (Load(name="a", allocation=6),)


def test_the_only_model_gets_all_there_is():
    alone = load_request("a", 0, requirement=None)
    assert decide(alone, under=limits(None)).actions == (Load(name="a", allocation=None),)


def test_the_least_recently_used_goes():
    here = [
        loaded_model("a", 3, last_used=3.0),
        loaded_model("b", 3, last_used=1.0),
        loaded_model("c", 3, last_used=2.0),
    ]
    assert decide(load_request("d", 3), here=here, under=limits(9)).actions == (Evict(name="b"),)


def test_few_go_rather_than_many():
    here = [
        loaded_model("a", 1, last_used=1.0),
        loaded_model("b", 1, last_used=2.0),
        loaded_model("c", 4, last_used=3.0),
    ]
    assert decide(load_request("d", 4), here=here, under=limits(6)).actions == (Evict(name="c"),)
    decided = decide(load_request("d", 5), here=here, under=limits(6))
    assert decided.actions == (Evict(name="a"), Evict(name="c")), "of two, the older one"


def test_an_idle_one_goes_before_a_busy_one_however_lately_it_was_used():
    here = [
        loaded_model("a", 5, last_used=1.0, busy_since=1.0),
        loaded_model("b", 5, last_used=999.0),
    ]
    assert decide(load_request("c", 5), here=here, under=limits(10)).actions == (Evict(name="b"),)


def test_a_busy_one_is_closed_and_goes_when_it_is_idle():
    busy = loaded_model("a", 9, busy_since=NOW + 1)
    decided = decide(load_request("b", 9), here=[busy], under=limits(10))
    assert (decided.actions, decided.draining) == ((), {"a"})
    idle = loaded_model("a", 9, draining=True)
    assert decide(load_request("b", 9), here=[idle], under=limits(10)).actions == (Evict(name="a"),)


def test_a_busy_one_stays_open_while_it_has_a_request_that_was_there_before():
    """Whoever waits could not be served before it ends anyway."""
    busy = loaded_model("a", 9, busy_since=NOW - 1)
    decided = decide(load_request("b", 9), here=[busy], under=limits(10))
    assert (decided.actions, decided.draining) == ((), frozenset())


def test_an_idle_one_stays_until_its_room_is_enough():
    """Its own requests would wait for a load that cannot begin yet."""
    here = [loaded_model("a", 5), loaded_model("b", 5, busy_since=NOW + 1)]
    decided = decide(load_request("c", 10), here=here, under=limits(10))
    assert (decided.actions, decided.draining) == ((), {"b"})


def test_one_that_is_closed_stays_the_one():
    here = [
        loaded_model("a", 5, busy_since=NOW + 2, last_used=NOW + 2, draining=True),
        loaded_model("b", 5, busy_since=NOW + 1, last_used=NOW + 1),
    ]
    assert decide(load_request("c", 5), here=here, under=limits(10)).draining == {"a"}


def test_one_that_is_closed_opens_when_nobody_waits_for_its_room():
    here = [loaded_model("a", 9, busy_since=NOW + 1, draining=True)]
    assert decide(under=limits(10), here=here).draining == frozenset()
    waits_for_itself = load_request("a", 9, requirement_known=False)
    assert decide(waits_for_itself, here=here, under=limits(10)).draining == frozenset()


def test_one_that_is_closed_opens_when_an_idle_one_makes_the_room():
    here = [loaded_model("a", 5, busy_since=NOW + 1, draining=True), loaded_model("b", 5)]
    decided = decide(load_request("c", 5), here=here, under=limits(10))
    assert (decided.actions, decided.draining) == ((Evict(name="b"),), frozenset())


def test_a_pinned_one_never_goes():
    here = [
        loaded_model("a", 6, pinned=True, expires_at=NOW - 1, last_used=0.0),
        loaded_model("b", 4),
    ]
    assert decide(load_request("c", 4), here=here, under=limits(10)).actions == (Evict(name="b"),)


def test_what_cannot_be_beside_the_pinned_ones_is_refused_with_the_figures():
    here = [loaded_model("a", 6 << 30, pinned=True), loaded_model("b", 4 << 30)]
    [refused] = decide(load_request("c", 5 << 30), here=here, under=limits(10 << 30)).actions
    assert refused == RejectLoad(
        name="c",
        reason="c needs 5.00 GiB for weights, KV caches and working space, but the pinned "
        "models (a) leave only 4.00 GiB: pin fewer models, lower their memory, raise --memory, "
        "or use a shorter --context, a lower --parallel or --quantize",
    )


def test_what_does_not_fit_alone_is_refused_and_nobody_goes_for_it():
    decided = decide(load_request("b", 11), here=[loaded_model("a", 9)], under=limits(10))
    [refused] = decided.actions
    assert isinstance(refused, RejectLoad)
    assert "all models together may use only 10 B: raise --memory" in refused.reason


def test_what_its_owner_does_not_allow_enough_is_refused():
    [refused] = decide(load_request("a", 5, max_bytes=4), under=limits(10)).actions
    assert isinstance(refused, RejectLoad)
    assert "may use only 4 B" in refused.reason


def test_places_count_like_bytes():
    here = [loaded_model("a", 1, last_used=1.0), loaded_model("b", 1, last_used=2.0)]
    assert decide(load_request("c", 1), here=here, under=limits(10, 2)).actions == (
        Evict(name="a"),
    )
    [refused] = decide(
        load_request("c", 1), here=[replace(here[0], pinned=True)], under=limits(10, 1)
    ).actions
    assert isinstance(refused, RejectLoad)
    assert "--max-loaded" in refused.reason


def test_one_is_loaded_at_a_time_in_the_order_in_which_they_came():
    first, second = load_request("a", 1), load_request("b", 1)
    assert decide(first, second, under=limits(10)).actions == (Load(name="a", allocation=1),)
    here = [loaded_model("a", 1, phase="loading", has_demand=True)]
    assert decide(second, here=here, under=limits(10)).actions == ()


def test_one_whose_need_is_not_known_yet_keeps_its_place():
    unknown = load_request("a", 0, requirement_known=False, requirement=None)
    assert decide(unknown, load_request("b", 1), under=limits(None)).actions == ()


def test_one_that_is_refused_does_not_keep_others_from_their_load():
    decided = decide(load_request("a", 11), load_request("b", 1), under=limits(10))
    assert [type(action) for action in decided.actions] == [RejectLoad, Load]


def test_a_load_that_nobody_wants_any_more_gives_way_if_somebody_waits():
    useless = [loaded_model("a", 5, phase="loading")]
    assert decide(load_request("b", 1), here=useless, under=limits(10)).actions == (
        Evict(name="a"),
    )
    assert decide(here=useless, under=limits(10)).actions == (), "else it goes on"
    pinned = [loaded_model("a", 5, phase="loading", pinned=True)]
    assert decide(load_request("b", 1), here=pinned, under=limits(10)).actions == ()


def test_room_counts_when_it_is_free_not_when_it_will_be():
    leaving = [loaded_model("a", 9, phase="leaving"), loaded_model("c", 1)]
    assert decide(load_request("b", 5), here=leaving, under=limits(10)).actions == ()


def test_nobody_goes_for_what_is_loaded_in_good_time():
    early = load_request("b", 9, may_evict=False)
    decided = decide(early, load_request("c", 1), here=[loaded_model("a", 9)], under=limits(10))
    assert [type(action) for action in decided.actions] == [SkipPreload, Load]


def test_an_idle_one_goes_when_its_time_is_over_and_the_plan_says_when():
    here = [
        loaded_model("a", 1, expires_at=NOW),
        loaded_model("b", 1, expires_at=NOW + 5),
        loaded_model("c", 1, expires_at=NOW + 1, busy_since=1.0),
        loaded_model("d", 1, expires_at=NOW + 1, pinned=True),
        loaded_model("e", 1),
    ]
    assert decide(here=here, under=limits(10)) == Plan(
        actions=(Evict(name="a"),), draining=frozenset(), wake_at=NOW + 5
    )
    assert decide(here=here[-1:], under=limits(10)).wake_at is None


def test_one_that_was_asked_to_go_is_closed_until_its_requests_end():
    busy = loaded_model("a", 1, busy_since=1.0, unload_requested=True)
    decided = decide(here=[busy], under=limits(10))
    assert (decided.actions, decided.draining) == ((), {"a"})
    idle = loaded_model("a", 1, unload_requested=True, draining=True)
    assert decide(here=[idle], under=limits(10)).actions == (Evict(name="a"),)


# any history

TOTAL = 10
NAMES = "abcde"


@dataclass
class World:
    """Requests come and go, and what the plan says is done. waiting, holding: when each request
    came to wait or to hold, by model."""

    needs: dict[str, MemoryRequirement]
    pinned: frozenset[str]
    places: int | None
    now: float = 0.0
    here: dict[str, LoadedModel] = field(default_factory=dict)
    out_at: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in NAMES})
    holding: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in NAMES})
    refused: int = 0

    def happen(self, what: str, name: str) -> None:
        self.now += 1
        holds, waits, here = self.holding[name], self.waiting[name], self.here.get(name)
        match what:
            case "comes":
                waits.append(self.now)
            case "ends" if holds:
                holds.pop(0)
            case "ends late" if holds:
                holds.pop()
            case "hangs up" if waits:
                waits.pop(0)
            case "goes on":
                self.go_on()
            case "breaks" if here is not None and here.phase == "ready":
                del self.here[name]
                holds.clear()
            case _:
                pass
        self.turn()

    def go_on(self) -> None:
        """Loads are done, and who leaves is gone."""
        for name, one in list(self.here.items()):
            if one.phase == "leaving":
                del self.here[name]
            elif one.phase == "loading":
                self.here[name] = replace(one, phase="ready", last_used=self.now)
                self.grant(name)

    def turn(self) -> None:
        """As often as something comes of it, as the pool does."""
        for _ in range(2 * len(NAMES)):
            decided = self.decide()
            for action in decided.actions:
                self.carry_out(action)
            granted = False
            for name, one in self.here.items():
                self.here[name] = replace(one, draining=name in decided.draining)
                if one.phase == "ready" and name not in decided.draining:
                    granted |= self.grant(name)
            if not decided.actions and not granted:
                assert self.decide() == decided, "nothing has changed"
                return
        raise AssertionError("it does not come to rest")

    def decide(self) -> Plan:
        queue = sorted((min(waits), name) for name, waits in self.waiting.items() if waits)
        here = [self.seen(one) for one in self.here.values()]
        returning = [need.min_bytes for name, need in self.needs.items() if name not in self.here]
        return plan(
            self.now,
            [
                replace(load_request(name, 0), requirement=self.needs[name], waiting_since=since)
                for since, name in queue
            ],
            here,
            limits(TOTAL, self.places, *returning[:2]),
        )

    def seen(self, one: LoadedModel) -> LoadedModel:
        return replace(
            one,
            busy_since=min(self.holding[one.name], default=None),
            has_demand=bool(self.waiting[one.name]),
            pinned=one.name in self.pinned,
        )

    def carry_out(self, action: object) -> None:
        match action:
            case Load(name=name, allocation=share):
                assert name not in self.here
                assert all(one.phase != "loading" for one in self.here.values())
                assert share is not None
                assert self.needs[name].min_bytes <= share <= self.needs[name].preferred_bytes
                self.here[name] = loaded_model(name, share, phase="loading", last_used=self.now)
                assert sum(one.allocation for one in self.here.values()) <= TOTAL
                assert self.places is None or len(self.here) <= self.places
            case Evict(name=name):
                assert name not in self.pinned
                assert not self.holding[name]
                assert self.here[name].phase in ("ready", "loading")
                assert not (self.here[name].phase == "loading" and self.waiting[name])
                self.here[name] = replace(self.here[name], phase="leaving")
            case RejectLoad(name=name):
                least = self.needs[name].min_bytes
                pinned = [one for one in self.here.values() if one.name in self.pinned]
                kept = sum(one.allocation for one in pinned)
                assert least + kept > TOTAL or len(pinned) == self.places
                self.refused += len(self.waiting[name])
                self.waiting[name].clear()
            case _:
                raise AssertionError(action)

    def grant(self, name: str) -> bool:
        granted = bool(self.waiting[name])
        if granted:
            self.holding[name] += [self.now] * len(self.waiting[name])
            self.waiting[name].clear()
            self.here[name] = replace(self.here[name], last_used=self.now)
        return granted


@st.composite
def worlds(draw: st.DrawFn) -> World:
    leasts = draw(st.lists(st.integers(1, 12), min_size=len(NAMES), max_size=len(NAMES)))
    needs = {
        name: MemoryRequirement(
            min_bytes=least, preferred_bytes=least + draw(st.integers(0, 4)), device_budget=TOTAL
        )
        for name, least in zip(NAMES, leasts, strict=True)
    }
    return World(
        needs=needs,
        pinned=frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2))),
        places=draw(st.sampled_from([None, 1, 2, 4])),
    )


WHATS = ("comes", "comes", "comes", "ends", "ends late", "hangs up", "goes on", "goes on", "breaks")
histories = st.lists(st.tuples(st.sampled_from(WHATS), st.sampled_from(NAMES)), max_size=60)


@given(world=worlds(), history=histories)
def test_no_history_fills_memory_beyond_its_limits_or_evicts_who_must_stay(
    world: World, history: list[tuple[str, str]]
):
    """What holds is asserted where each action is carried out."""
    for what, name in history:
        world.happen(what, name)


@given(world=worlds(), history=histories, lasts=st.integers(1, 4))
def test_everyone_is_served_or_refused_however_busy_the_others_are(
    world: World, history: list[tuple[str, str]], lasts: int
):
    """All models are asked for again and again, and each request holds its model for `lasts`
    rounds: whoever waited before that is not overtaken for ever."""
    for what, name in history:
        world.happen(what, name)
    before = world.now
    for _ in range(3 * len(NAMES) * (lasts + 4)):
        for name in NAMES:
            world.happen("comes", name)
        for name in NAMES:
            old = [at for at in world.holding[name] if at < world.now - lasts * len(NAMES) * 3]
            for _ in old:
                world.happen("ends", name)
        world.happen("goes on", "a")
    waiting = [at for waits in world.waiting.values() for at in waits if at <= before]
    assert waiting == []


@pytest.mark.parametrize("places", [None, 2])
def test_two_that_fit_side_by_side_end_up_side_by_side(places: int | None):
    needs = {
        name: MemoryRequirement(min_bytes=4, preferred_bytes=9, device_budget=TOTAL)
        for name in NAMES
    }
    world = World(needs=needs, pinned=frozenset(), places=places)
    world.needs = {"a": needs["a"], "b": needs["b"]}
    loads = 0
    for name in "abababab":
        loads += name not in world.here
        world.happen("comes", name)
        for _ in range(4):
            world.happen("goes on", name)
        assert world.holding[name], "it was served"
        world.happen("ends", name)
    assert loads == 2
    assert set(world.here) == {"a", "b"}
