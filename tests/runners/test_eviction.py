"""The eviction policy: single decisions, and invariants of random histories."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.models import MemoryRequirement
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


def loaded_model(name: str, allocation: int, **changes: Any) -> LoadedModel:
    """An idle model that never expires."""
    defaults: dict[str, Any] = {
        "phase": "ready",
        "busy_since": None,
        "last_used": NOW - 10,
        "expires_at": math.inf,
        "has_demand": False,
        "pinned": False,
        "unload_requested": False,
        "draining": False,
    }
    return LoadedModel(name=name, allocation=allocation, **{**defaults, **changes})


def load_request(
    name: str, minimum: int, preferred: int | None = None, **changes: Any
) -> LoadRequest:
    requirement = MemoryRequirement(
        min_bytes=minimum,
        preferred_bytes=minimum if preferred is None else preferred,
        device_budget=0,
    )
    defaults: dict[str, Any] = {
        "waiting_since": NOW,
        "requirement_known": True,
        "requirement": requirement,
        "max_bytes": None,
        "may_evict": True,
    }
    return LoadRequest(name=name, **{**defaults, **changes})


def limits(
    total: int | None, loaded: int | None = None, *evicted: int, shared: int | None = None
) -> PoolLimits:
    return PoolLimits(
        total_bytes=total, max_loaded=loaded, evicted_min_bytes=evicted, shared_bytes=shared
    )


def decide(*queue: LoadRequest, loaded: Sequence[LoadedModel] = (), under: PoolLimits) -> Plan:
    return plan(NOW, queue, loaded, under)


def test_a_model_gets_its_preferred_allocation_if_free():
    assert decide(load_request("a", 4, 7), under=limits(10)).actions == (
        Load(name="a", allocation=7),
    )


def test_a_smaller_allocation_comes_before_an_eviction():
    decided = decide(load_request("b", 4, 9), loaded=[loaded_model("a", 5)], under=limits(10))
    assert decided.actions == (Load(name="b", allocation=5),)


def test_an_allocation_leaves_memory_for_evicted_models():
    """Otherwise two models that fit together would evict each other forever."""
    decided = decide(load_request("b", 4, 9), under=limits(10, None, 5))
    assert decided.actions == (Load(name="b", allocation=5),)
    decided = decide(load_request("b", 4, 9), under=limits(10, None, 8, 5))
    assert decided.actions == (Load(name="b", allocation=5),), (
        "a model that does not fit next to it does not count"
    )
    decided = decide(load_request("b", 4, 9), under=limits(10, 1, 5))
    assert decided.actions == (Load(name="b", allocation=9),), "nor does one beyond max_loaded"


def test_max_bytes_bounds_the_allocation():
    decided = decide(load_request("a", 4, 9, max_bytes=6), under=limits(10))
    assert decided.actions == (Load(name="a", allocation=6),)


def test_a_single_model_has_no_allocation():
    request = load_request("a", 0, requirement=None)
    assert decide(request, under=limits(None)).actions == (Load(name="a", allocation=None),)


def test_the_least_recently_used_model_is_evicted():
    loaded = [
        loaded_model("a", 3, last_used=3.0),
        loaded_model("b", 3, last_used=1.0),
        loaded_model("c", 3, last_used=2.0),
    ]
    assert decide(load_request("d", 3), loaded=loaded, under=limits(9)).actions == (
        Evict(name="b"),
    )


def test_few_models_are_evicted_rather_than_many():
    loaded = [
        loaded_model("a", 1, last_used=1.0),
        loaded_model("b", 1, last_used=2.0),
        loaded_model("c", 4, last_used=3.0),
    ]
    assert decide(load_request("d", 4), loaded=loaded, under=limits(6)).actions == (
        Evict(name="c"),
    )
    decided = decide(load_request("d", 5), loaded=loaded, under=limits(6))
    assert decided.actions == (Evict(name="a"), Evict(name="c")), "of two, the older one"


def test_an_idle_model_is_evicted_before_any_busy_one():
    loaded = [
        loaded_model("a", 5, last_used=1.0, busy_since=1.0),
        loaded_model("b", 5, last_used=999.0),
    ]
    assert decide(load_request("c", 5), loaded=loaded, under=limits(10)).actions == (
        Evict(name="b"),
    )


def test_a_pinned_model_is_unloaded_only_if_it_is_loaded_again():
    """Its settings have changed. A busy one drains first."""
    pinned = loaded_model("a", 40, pinned=True, has_demand=True, unload_requested=True)
    assert plan(NOW, [], [pinned], limits(100)).actions == (Evict(name="a"),)
    busy = replace(pinned, busy_since=NOW - 1)
    decided = plan(NOW, [], [busy], limits(100))
    assert (decided.actions, decided.draining) == ((), frozenset({"a"}))


def test_a_busy_model_drains_and_is_evicted_when_idle():
    busy = loaded_model("a", 9, busy_since=NOW + 1)
    decided = decide(load_request("b", 9), loaded=[busy], under=limits(10))
    assert (decided.actions, decided.draining) == ((), {"a"})
    idle = loaded_model("a", 9, draining=True)
    assert decide(load_request("b", 9), loaded=[idle], under=limits(10)).actions == (
        Evict(name="a"),
    )


def test_a_busy_model_does_not_drain_while_it_has_an_older_request():
    """The waiting request could not be served before the older one ends anyway."""
    busy = loaded_model("a", 9, busy_since=NOW - 1)
    decided = decide(load_request("b", 9), loaded=[busy], under=limits(10))
    assert (decided.actions, decided.draining) == ((), frozenset())


def test_an_idle_model_stays_until_its_eviction_frees_enough():
    """Its own requests would wait for a load that cannot begin yet."""
    loaded = [loaded_model("a", 5), loaded_model("b", 5, busy_since=NOW + 1)]
    decided = decide(load_request("c", 10), loaded=loaded, under=limits(10))
    assert (decided.actions, decided.draining) == ((), {"b"})


def test_a_draining_model_stays_the_victim():
    loaded = [
        loaded_model("a", 5, busy_since=NOW + 2, last_used=NOW + 2, draining=True),
        loaded_model("b", 5, busy_since=NOW + 1, last_used=NOW + 1),
    ]
    assert decide(load_request("c", 5), loaded=loaded, under=limits(10)).draining == {"a"}


def test_a_draining_model_reopens_without_a_waiting_load():
    loaded = [loaded_model("a", 9, busy_since=NOW + 1, draining=True)]
    assert decide(under=limits(10), loaded=loaded).draining == frozenset()
    waits_for_itself = load_request("a", 9, requirement_known=False)
    assert decide(waits_for_itself, loaded=loaded, under=limits(10)).draining == frozenset()


def test_a_draining_model_reopens_if_an_idle_one_can_be_evicted():
    loaded = [loaded_model("a", 5, busy_since=NOW + 1, draining=True), loaded_model("b", 5)]
    decided = decide(load_request("c", 5), loaded=loaded, under=limits(10))
    assert (decided.actions, decided.draining) == ((Evict(name="b"),), frozenset())


def test_a_pinned_model_is_never_evicted():
    loaded = [
        loaded_model("a", 6, pinned=True, expires_at=NOW - 1, last_used=0.0),
        loaded_model("b", 4),
    ]
    assert decide(load_request("c", 4), loaded=loaded, under=limits(10)).actions == (
        Evict(name="b"),
    )


def test_a_model_that_does_not_fit_next_to_pinned_ones_is_rejected_with_figures():
    loaded = [loaded_model("a", 6 << 30, pinned=True), loaded_model("b", 4 << 30)]
    [rejected] = decide(load_request("c", 5 << 30), loaded=loaded, under=limits(10 << 30)).actions
    assert rejected == RejectLoad(
        name="c",
        reason="c needs 5.00 GiB for weights, KV caches and working space, but the pinned "
        "models (a) leave only 4.00 GiB: pin fewer models, lower their memory, raise --memory, "
        "or use a shorter --context, a lower --parallel or --quantize",
    )


def test_a_model_that_does_not_fit_alone_is_rejected_without_evictions():
    decided = decide(load_request("b", 11), loaded=[loaded_model("a", 9)], under=limits(10))
    [rejected] = decided.actions
    assert isinstance(rejected, RejectLoad)
    assert "all models together may use only 10 B: raise --memory" in rejected.reason


def test_a_model_that_needs_more_than_max_bytes_is_rejected():
    [rejected] = decide(load_request("a", 5, max_bytes=4), under=limits(10)).actions
    assert isinstance(rejected, RejectLoad)
    assert "may use only 4 B" in rejected.reason


def test_max_loaded_counts_like_bytes():
    loaded = [loaded_model("a", 1, last_used=1.0), loaded_model("b", 1, last_used=2.0)]
    assert decide(load_request("c", 1), loaded=loaded, under=limits(10, 2)).actions == (
        Evict(name="a"),
    )
    [rejected] = decide(
        load_request("c", 1), loaded=[replace(loaded[0], pinned=True)], under=limits(10, 1)
    ).actions
    assert isinstance(rejected, RejectLoad)
    assert "--max-loaded" in rejected.reason


def test_models_are_loaded_one_at_a_time_in_order():
    first, second = load_request("a", 1), load_request("b", 1)
    assert decide(first, second, under=limits(10)).actions == (Load(name="a", allocation=1),)
    loaded = [loaded_model("a", 1, phase="loading", has_demand=True)]
    assert decide(second, loaded=loaded, under=limits(10)).actions == ()


def test_a_request_with_an_unknown_requirement_keeps_its_place():
    unknown = load_request("a", 0, requirement_known=False, requirement=None)
    assert decide(unknown, load_request("b", 1), under=limits(None)).actions == ()


def test_a_rejected_load_does_not_block_others():
    decided = decide(load_request("a", 11), load_request("b", 1), under=limits(10))
    assert [type(action) for action in decided.actions] == [RejectLoad, Load]


def test_a_load_without_demand_is_cancelled_if_another_waits():
    loading = [loaded_model("a", 5, phase="loading")]
    assert decide(load_request("b", 1), loaded=loading, under=limits(10)).actions == (
        Evict(name="a"),
    )
    assert decide(loaded=loading, under=limits(10)).actions == (), "otherwise it continues"
    pinned = [loaded_model("a", 5, phase="loading", pinned=True)]
    assert decide(load_request("b", 1), loaded=pinned, under=limits(10)).actions == ()


def test_memory_of_unloading_models_is_not_free():
    unloading = [loaded_model("a", 9, phase="leaving"), loaded_model("c", 1)]
    assert decide(load_request("b", 5), loaded=unloading, under=limits(10)).actions == ()


def test_a_preload_evicts_nothing():
    preload = load_request("b", 9, may_evict=False)
    decided = decide(preload, load_request("c", 1), loaded=[loaded_model("a", 9)], under=limits(10))
    assert [type(action) for action in decided.actions] == [SkipPreload, Load]


def test_an_expired_idle_model_is_evicted_and_wake_at_is_the_next_expiry():
    loaded = [
        loaded_model("a", 1, expires_at=NOW),
        loaded_model("b", 1, expires_at=NOW + 5),
        loaded_model("c", 1, expires_at=NOW + 1, busy_since=1.0),
        loaded_model("d", 1, expires_at=NOW + 1, pinned=True),
        loaded_model("e", 1),
    ]
    assert decide(loaded=loaded, under=limits(10)) == Plan(
        actions=(Evict(name="a"),),
        draining=frozenset(),
        spare_bytes=dict.fromkeys("abcde", 0),
        wake_at=NOW + 5,
    )
    assert decide(loaded=loaded[-1:], under=limits(10)).wake_at is None


def test_a_model_with_an_unload_request_drains_until_it_is_idle():
    busy = loaded_model("a", 1, busy_since=1.0, unload_requested=True)
    decided = decide(loaded=[busy], under=limits(10))
    assert (decided.actions, decided.draining) == ((), {"a"})
    idle = loaded_model("a", 1, unload_requested=True, draining=True)
    assert decide(loaded=[idle], under=limits(10)).actions == (Evict(name="a"),)


# spare memory


def test_loaded_models_share_the_free_memory():
    loaded = [loaded_model("a", 3), loaded_model("b", 2)]
    assert decide(loaded=loaded[:1], under=limits(10, shared=10)).spare_bytes == {"a": 7}
    assert decide(loaded=loaded, under=limits(10, shared=10)).spare_bytes == {"a": 2, "b": 2}
    assert decide(loaded=loaded, under=limits(10)).spare_bytes == {"a": 0, "b": 0}


def test_spare_memory_is_within_the_memory_setting_of_a_model():
    loaded = [loaded_model("a", 3, max_bytes=4)]
    assert decide(loaded=loaded, under=limits(10, shared=10)).spare_bytes == {"a": 1}


def test_a_load_waits_until_spare_memory_is_given_back():
    under = limits(10, shared=10)
    busy = loaded_model("a", 3, spare_bytes=7, busy_since=1.0)
    decided = decide(load_request("b", 4, 5), loaded=[busy], under=under)
    assert (decided.actions, decided.draining, decided.spare_bytes) == ((), frozenset(), {"a": 2})
    decided = decide(load_request("b", 4, 5), loaded=[replace(busy, spare_bytes=2)], under=under)
    assert decided.actions == (Load(name="b", allocation=5),)


def test_spare_memory_does_not_grow_while_a_requirement_is_unknown():
    waiting = load_request("b", 4, requirement_known=False, requirement=None)
    loaded = [loaded_model("a", 3, spare_bytes=2)]
    decided = decide(waiting, loaded=loaded, under=limits(None, shared=10))
    assert decided.spare_bytes == {"a": 2}


def test_a_model_gets_spare_memory_only_after_another_has_given_it_back():
    loaded = [loaded_model("a", 3, spare_bytes=7), loaded_model("b", 0)]
    decided = decide(loaded=loaded, under=limits(10, shared=10))
    assert decided.spare_bytes == {"a": 3, "b": 0}


def test_a_model_that_the_plan_loads_counts_before_others_get_spare_memory():
    loaded = [loaded_model("a", 1, spare_bytes=3), loaded_model("b", 1), loaded_model("c", 1)]
    decided = decide(load_request("d", 1), loaded=loaded, under=limits(10, shared=10))
    assert [type(action) for action in decided.actions] == [Load]
    assert decided.spare_bytes == {"a": 2, "b": 0, "c": 0}


def test_a_draining_model_gives_its_spare_memory_back():
    loaded = [loaded_model("a", 3, spare_bytes=7, unload_requested=True, busy_since=1.0)]
    assert decide(loaded=loaded, under=limits(10, shared=10)).spare_bytes == {"a": 0}


# random histories

TOTAL = 10
NAMES = "abcde"


@dataclass
class Simulation:
    """Requests arrive and end, and plans are carried out. waiting, holding: by model, the times at
    which requests began to wait, or to hold the model. desired_spare, stuck: by model, the spare
    memory that its engine was last set to, and how much of it its requests use."""

    requirements: dict[str, MemoryRequirement]
    pinned: frozenset[str]
    max_loaded: int | None
    now: float = 0.0
    loaded: dict[str, LoadedModel] = field(default_factory=dict)
    out_at: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in NAMES})
    holding: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in NAMES})
    desired_spare: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)
    rejected: int = 0

    def apply(self, event: str, name: str) -> None:
        self.now += 1
        holds, waits, loaded = self.holding[name], self.waiting[name], self.loaded.get(name)
        match event:
            case "arrives":
                waits.append(self.now)
            case "ends" if holds:
                holds.pop(0)
            case "ends late" if holds:
                holds.pop()
            case "disconnects" if waits:
                waits.pop(0)
            case "advances":
                self.finish_transitions()
                self.answer_spare_memory()
            case "takes spare memory" if holds and loaded is not None:
                actual = min(loaded.spare_bytes, self.desired_spare.get(name, 0))
                self.stuck[name] = actual // 2
            case "crashes" if loaded is not None and loaded.phase == "ready":
                del self.loaded[name]
                holds.clear()
            case _:
                pass
        self.run_plans()

    def finish_transitions(self) -> None:
        """Loading models become ready, and unloading ones are removed."""
        for name, one in list(self.loaded.items()):
            if one.phase == "leaving":
                del self.loaded[name]
            elif one.phase == "loading":
                self.loaded[name] = replace(one, phase="ready", last_used=self.now)
                self.grant(name)

    def answer_spare_memory(self) -> None:
        """Engines give back the spare memory that no request uses."""
        for name, one in self.loaded.items():
            if not self.holding[name]:
                self.stuck[name] = 0
            desired = self.desired_spare.get(name, 0)
            self.loaded[name] = replace(
                one, spare_bytes=max(desired, min(one.spare_bytes, self.stuck.get(name, 0)))
            )

    def set_spare_memory(self, spare_bytes: Mapping[str, int]) -> bool:
        """Tells the engines. Returns whether anything has changed."""
        before = list(self.loaded.values())
        for name, one in self.loaded.items():
            self.desired_spare[name] = desired = spare_bytes.get(name, 0)
            self.loaded[name] = replace(one, spare_bytes=max(one.spare_bytes, desired))
        in_use = sum(one.allocation + one.spare_bytes for one in self.loaded.values())
        assert in_use <= TOTAL, "engines use more than there is"
        return list(self.loaded.values()) != before

    def run_plans(self) -> None:
        """Carry out plans until nothing changes, as the pool does."""
        for _ in range(2 * len(NAMES)):
            decided = self.decide()
            for action in decided.actions:
                self.carry_out(action)
            granted = False
            for name, one in self.loaded.items():
                self.loaded[name] = replace(one, draining=name in decided.draining)
                if one.phase == "ready" and name not in decided.draining:
                    granted |= self.grant(name)
            desired = self.set_spare_memory(decided.spare_bytes)
            if not decided.actions and not granted and not desired:
                assert self.decide() == decided, "nothing has changed"
                return
        raise AssertionError("the plans do not converge")

    def decide(self) -> Plan:
        queue = sorted((min(waits), name) for name, waits in self.waiting.items() if waits)
        loaded = [self.observe(one) for one in self.loaded.values()]
        evicted = [
            requirement.min_bytes
            for name, requirement in self.requirements.items()
            if name not in self.loaded
        ]
        return plan(
            self.now,
            [
                replace(
                    load_request(name, 0), requirement=self.requirements[name], waiting_since=since
                )
                for since, name in queue
            ],
            loaded,
            limits(TOTAL, self.max_loaded, *evicted[:2], shared=TOTAL),
        )

    def observe(self, one: LoadedModel) -> LoadedModel:
        return replace(
            one,
            busy_since=min(self.holding[one.name], default=None),
            has_demand=bool(self.waiting[one.name]),
            pinned=one.name in self.pinned,
        )

    def carry_out(self, action: object) -> None:
        match action:
            case Load(name=name, allocation=allocation):
                assert name not in self.loaded
                assert all(one.phase != "loading" for one in self.loaded.values())
                assert allocation is not None
                assert (
                    self.requirements[name].min_bytes
                    <= allocation
                    <= self.requirements[name].preferred_bytes
                )
                self.loaded[name] = loaded_model(
                    name, allocation, phase="loading", last_used=self.now
                )
                in_use = sum(one.allocation + one.spare_bytes for one in self.loaded.values())
                assert in_use <= TOTAL
                assert self.max_loaded is None or len(self.loaded) <= self.max_loaded
            case Evict(name=name):
                assert name not in self.pinned
                assert not self.holding[name]
                assert self.loaded[name].phase in ("ready", "loading")
                assert not (self.loaded[name].phase == "loading" and self.waiting[name])
                self.loaded[name] = replace(self.loaded[name], phase="leaving")
            case RejectLoad(name=name):
                minimum = self.requirements[name].min_bytes
                pinned = [one for one in self.loaded.values() if one.name in self.pinned]
                kept = sum(one.allocation for one in pinned)
                assert minimum + kept > TOTAL or len(pinned) == self.max_loaded
                self.rejected += len(self.waiting[name])
                self.waiting[name].clear()
            case _:
                raise AssertionError(action)

    def grant(self, name: str) -> bool:
        granted = bool(self.waiting[name])
        if granted:
            self.holding[name] += [self.now] * len(self.waiting[name])
            self.waiting[name].clear()
            self.loaded[name] = replace(self.loaded[name], last_used=self.now)
        return granted


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    minimums = draw(st.lists(st.integers(1, 12), min_size=len(NAMES), max_size=len(NAMES)))
    requirements = {
        name: MemoryRequirement(
            min_bytes=minimum,
            preferred_bytes=minimum + draw(st.integers(0, 4)),
            device_budget=TOTAL,
        )
        for name, minimum in zip(NAMES, minimums, strict=True)
    }
    return Simulation(
        requirements=requirements,
        pinned=frozenset(draw(st.sets(st.sampled_from(NAMES), max_size=2))),
        max_loaded=draw(st.sampled_from([None, 1, 2, 4])),
    )


EVENTS = (
    "arrives",
    "arrives",
    "arrives",
    "ends",
    "ends late",
    "disconnects",
    "advances",
    "advances",
    "takes spare memory",
    "crashes",
)
histories = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(NAMES)), max_size=60)


@given(simulation=simulations(), history=histories)
def test_no_history_exceeds_the_limits_or_evicts_protected_models(
    simulation: Simulation, history: list[tuple[str, str]]
):
    """The invariants are asserted in `carry_out` and `set_spare_memory`."""
    for event, name in history:
        simulation.apply(event, name)


@given(simulation=simulations(), history=histories)
def test_after_every_history_loads_get_spare_memory_back_and_then_none_is_left_over(
    simulation: Simulation, history: list[tuple[str, str]]
):
    for event, name in history:
        simulation.apply(event, name)
    for name in NAMES:
        simulation.holding[name].clear()
    simulation.pinned = frozenset()
    for _ in range(8 * len(NAMES)):
        simulation.apply("advances", "a")
        for name in NAMES:
            while simulation.holding[name]:
                simulation.apply("ends", name)
    assert not any(simulation.waiting.values()), "all loads took place"
    loaded = simulation.loaded.values()
    left_over = TOTAL - sum(one.allocation + one.spare_bytes for one in loaded)
    assert not loaded or left_over < len(loaded)


@pytest.mark.exhaustive
@given(simulation=simulations(), history=histories, duration=st.integers(1, 4))
def test_every_request_is_served_or_rejected_while_others_are_busy(
    simulation: Simulation, history: list[tuple[str, str]], duration: int
):
    """All models get new requests all the time, and each request holds its model for `duration`
    rounds: earlier requests are not overtaken forever."""
    for event, name in history:
        simulation.apply(event, name)
    before = simulation.now
    for _ in range(3 * len(NAMES) * (duration + 4)):
        for name in NAMES:
            simulation.apply("arrives", name)
        for name in NAMES:
            old = [
                at
                for at in simulation.holding[name]
                if at < simulation.now - duration * len(NAMES) * 3
            ]
            for _ in old:
                simulation.apply("ends", name)
        simulation.apply("advances", "a")
    waiting = [at for waits in simulation.waiting.values() for at in waits if at <= before]
    assert waiting == []


@pytest.mark.parametrize("max_loaded", [None, 2])
def test_two_models_that_fit_together_stay_loaded_together(max_loaded: int | None):
    requirements = {
        name: MemoryRequirement(min_bytes=4, preferred_bytes=9, device_budget=TOTAL)
        for name in NAMES
    }
    simulation = Simulation(requirements=requirements, pinned=frozenset(), max_loaded=max_loaded)
    simulation.requirements = {"a": requirements["a"], "b": requirements["b"]}
    loads = 0
    for name in "abababab":
        loads += name not in simulation.loaded
        simulation.apply("arrives", name)
        for _ in range(4):
            simulation.apply("advances", name)
        assert simulation.holding[name], "it was served"
        simulation.apply("ends", name)
    assert loads == 2
    assert set(simulation.loaded) == {"a", "b"}
