"""Sequences that share a slab give the answers of sequences with separate caches. Rows are chosen
by their lengths."""

import itertools
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from app.core.jobs import Job
from app.engine.decode_slab import (
    DecodeSlab,
    SlabPolicy,
    choose_slab_rows,
    count_slots,
    create_decode_slab,
    measure_padding,
)
from app.engine.loop import Loop
from models.base import Model
from tests.engine import hybrid
from tests.engine.harness import (
    Outcome,
    ScheduledJob,
    assert_same,
    job,
    make_loop,
    record,
    run_one,
    run_schedule,
    tiny_model,
)
from tests.engine.test_preemption import footprint
from tests.models.kernel_switch import BOTH, use_kernels

pytestmark = pytest.mark.recorded

LIMITS = SlabPolicy()
Lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=9)

MODELS: Mapping[str, Any] = {
    "llama": tiny_model,
    "hybrid": hybrid.Model,
    "windowed": lambda: hybrid.Model(kinds="wk"),
    "recurrent": lambda: hybrid.Model(kinds="r"),
}
NONE = frozenset[int]()
ALWAYS = SlabPolicy(layout="slab", min_rows=1, join_padding=1e9, stay_padding=1e9)
BY_NUMBERS = SlabPolicy(layout="slab")
PARALLEL, CONTEXT = 4, 512


def choose(lengths: Sequence[int], slots: Sequence[int | None] = ()) -> set[int]:
    choice = choose_slab_rows(lengths, slots or [None] * len(lengths), LIMITS)
    assert choice.rebuild == (not slots), "the other rows keep their slots"
    return set(choice.rows)


def rebuild(lengths: Sequence[int], slots: Sequence[int | None]) -> set[int]:
    choice = choose_slab_rows(lengths, slots, LIMITS)
    assert choice.rebuild
    return set(choice.rows)


def test_similar_lengths_share_a_slab() -> None:
    assert choose([500, 510, 520]) == {0, 1, 2}
    assert choose([500, 510]) == set(), "two rows are too few"


def test_one_long_row_does_not_pad_the_others() -> None:
    """32,000 positions next to seven rows of 500: padded, the batch would be seven times as
    long."""
    lengths = [500, 510, 32_000, 520, 530, 540, 550, 560]
    assert measure_padding(lengths, 0) > 7
    assert choose(lengths) == {0, 1, 3, 4, 5, 6, 7}


def test_skewed_lengths_keep_separate_rows() -> None:
    assert choose([10, 100, 1000, 10_000]) == set()


def test_of_two_equal_groups_the_longer_rows_share_a_slab() -> None:
    assert choose([9, 900, 9, 900, 9, 900]) == {1, 3, 5}


def test_a_row_joins_only_if_the_padding_remains_small() -> None:
    assert choose([1000, 1000, 1000, 10], [0, 1, 2, None]) == {0, 1, 2}
    assert choose([1000, 1000, 1000, 900], [0, 1, 2, None]) == {0, 1, 2, 3}
    assert choose([1000, 1000, 1000, 4000], [0, 1, 2, None]) == {0, 1, 2}, "much longer"


def test_a_row_joins_in_a_hole_even_if_the_padding_is_large() -> None:
    """Rows have left. The padding is above the limit for joining, and the join reduces it."""
    assert choose([100, 100, 100], [0, 3, None]) == {0, 1, 2}


def test_rows_stay_until_the_padding_is_much_larger() -> None:
    assert choose([1000, 1000, 500], [0, 1, 2]) == {0, 1, 2}
    # the rows of the slots between these have left
    assert rebuild([100, 100, 100], [0, 1, 7]) == {0, 1, 2}
    assert rebuild([100, 100], [0, 7]) == set(), "too few for a new slab"
    assert rebuild([100], [0]) == set(), "a single row needs no slab"


@given(lengths=Lengths, data=st.data())
def test_the_padding_is_bounded(lengths: list[int], data: st.DataObject) -> None:
    places = data.draw(st.permutations(range(12)))
    slots = [place if data.draw(st.booleans()) else None for place in places[: len(lengths)]]
    before = {row for row, slot in enumerate(slots) if slot is not None}
    choice = choose_slab_rows(lengths, slots, LIMITS)
    if choice.rebuild:
        span, limit = 0, LIMITS.join_padding
    else:
        assert before <= choice.rows, "a row leaves only with all others"
        span = 1 + max(slot for slot in slots if slot is not None)
        limit = LIMITS.stay_padding
    if choice.rows:
        assert measure_padding([lengths[row] for row in choice.rows], span) <= limit


@given(lengths=Lengths)
def test_no_larger_group_of_similar_lengths_exists(lengths: list[int]) -> None:
    chosen = choose(lengths)
    ordered = sorted(lengths)
    best = max(
        (
            end - start
            for start, end in itertools.combinations(range(len(lengths) + 1), 2)
            if measure_padding(ordered[start:end], 0) <= LIMITS.join_padding
        ),
        default=0,
    )
    assert len(chosen) == (best if best >= LIMITS.min_rows else 0)


def test_slots_are_powers_of_two() -> None:
    assert [count_slots(rows, 32) for rows in (1, 8, 9, 16, 17, 32)] == [8, 8, 16, 16, 32, 32]
    assert count_slots(5, 6) == 6, "no more slots than sequences may run"
    assert count_slots(7, 6) == 7


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


@pytest.fixture(params=BOTH)
def kernels_enabled(request: pytest.FixtureRequest) -> Generator[bool]:
    with use_kernels(enabled=request.param):
        yield request.param


def slab_of(loop: Loop) -> DecodeSlab:
    slab = loop.slab
    assert slab is not None
    return slab


def slots(loop: Loop) -> Mapping[str, int | None]:
    """The slot of each sequence in the slab."""
    return {sequence.job.id: slot for sequence, slot in slab_of(loop).slots.items()}


def slab_loop(model: Model, **changes: Any) -> Loop:
    fields: dict[str, Any] = {"running": PARALLEL, "policy": "radix", "chunk": 16}
    return make_loop(model, **{**fields, "slab_policy": ALWAYS, **changes})


def make_job(name: str, length: int, **changes: Any) -> Job:
    ids = bytes(random.Random(name).choices(range(256), k=length))
    seed = int.from_bytes(name.encode(), "big") % 1000
    return job(name, ids, **{"stop_token_ids": NONE, "temperature": 0.8, "seed": seed, **changes})


def test_answers_do_not_depend_on_the_layout(model: Model, ties: list[int]) -> None:
    """Rows join and leave at different steps, and outgrow the capacity of the slab."""
    rng = random.Random(1)
    schedule = [
        ScheduledJob(
            job=make_job(str(i), rng.randint(3, 250), max_tokens=rng.randint(2, 90)),
            at=rng.randint(0, 60),
        )
        for i in range(14)
    ]
    alone = {item.job.id: run_one(make_loop(model), cast(Job, item.job)) for item in schedule}
    for policy in (
        ALWAYS,
        BY_NUMBERS,
        SlabPolicy(layout="slab", min_rows=2, join_padding=1.1, stay_padding=1.1),
    ):
        loop = slab_loop(model, slab_policy=policy)
        outcomes = run_schedule(loop, schedule)
        for name, expected in alone.items():
            ties.append(assert_same(outcomes[name], expected))
        assert slab_of(loop).nbytes == 0, "an idle engine holds no slab"
        assert loop.stats().ledger.kv == 0


def test_a_slab_follows_the_numbers() -> None:
    """Similar lengths share a slab. A much longer sequence keeps its own caches in the batch."""
    model = hybrid.Model(kinds="kr")
    loop = slab_loop(model, slab_policy=BY_NUMBERS)
    for i in range(3):
        loop.submit(make_job(str(i), 40 + i, max_tokens=60))
    loop.submit(make_job("long", 300, max_tokens=60))
    for _ in range(40):
        loop.step()
    assert slots(loop) == {"0": 0, "1": 1, "2": 2, "long": None}


def test_recurrent_layers_need_no_similar_lengths() -> None:
    loop = slab_loop(hybrid.Model(kinds="rk"), slab_policy=BY_NUMBERS)
    for name, length in (("short", 10), ("long", 200)):
        loop.submit(make_job(name, length, max_tokens=60))
    for _ in range(30):
        loop.step()
    assert set(slab_of(loop).slots.values()) == {None}, "no slot in the attention layer"
    assert slab_of(loop).nbytes > 0


def test_without_the_option_a_cpu_uses_no_slab() -> None:
    assert make_loop(tiny_model(), running=8).slab is None
    assert make_loop(tiny_model(), running=8, slab_policy=SlabPolicy(layout="rows")).slab is None
    assert not slab_loop(tiny_model()).batch_invariant, "a slab rounds differently"


def test_auto_means_rows_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = slab_loop(tiny_model())._scheduler
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.gpu, 0))
    assert create_decode_slab(SlabPolicy(layout="auto"), scheduler, max_rows=8) is None
    assert create_decode_slab(SlabPolicy(layout="slab"), scheduler, max_rows=8) is not None


def test_joins_and_leaves_copy_no_positions_of_other_rows(kernels_enabled: bool) -> None:
    """The memory in use during a join or a leave grows by less than one buffer of the slab."""
    model = tiny_model()
    loop = slab_loop(model, running=8, chunk=256, context=4096)
    for i in range(7):
        loop.submit(make_job(str(i), 2000, max_tokens=500))
    while len(slab_of(loop).slots) < 7:
        loop.step()
    slab = slab_of(loop)
    [buffer_bytes] = {array.nbytes for layer in slab.layers for array in layer.state()}

    def measure(step: Any) -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        step()
        mx.synchronize()
        return mx.get_peak_memory() - before

    loop.cancel("3")  # the next step starts without unfinished work
    loop.submit(make_job("new", 1500, max_tokens=500))
    arrange = slab.arrange
    grown: list[int] = []

    def measured_arrange(sequences: Any) -> Any:
        found: list[Any] = []
        grown.append(measure(lambda: found.append(arrange(sequences))))
        return found[0]

    slab.arrange = measured_arrange
    while len(slab.slots) < 7:
        loop.step()
    del slab.arrange
    sequence = next(iter(slab.slots))
    grown.append(measure(lambda: slab.leave(sequence)))
    assert len(grown) > 5
    assert max(grown) < buffer_bytes // 2
    left = {slot for slot in slab.slots.values() if slot is not None}
    assert left == {*range(1, 7)}, "the new sequence took the slot of the cancelled one"


def test_the_ledger_counts_the_slab_and_the_caches() -> None:
    model = hybrid.Model()
    loop = slab_loop(model)
    for i in range(3):
        loop.submit(make_job(str(i), 100, max_tokens=300))
    for _ in range(280):
        output = loop.step()
        held = sum(layer.nbytes for s in slab_of(loop).slots for layer in s.kv)
        assert output.stats.ledger.kv >= held + slab_of(loop).nbytes
    assert slab_of(loop).nbytes > 0


def test_a_slab_is_given_up_before_a_sequence_waits(ties: list[int]) -> None:
    model = tiny_model()
    budget = 24 * footprint(model, 256)
    jobs = [make_job(str(i), 100, max_tokens=100 + 60 * i) for i in range(3)]
    long = make_job("long", 12 * 256, max_tokens=90)
    loop = slab_loop(model, budget=budget, chunk=256, context=4096)
    schedule = [*(ScheduledJob(job=one) for one in jobs), ScheduledJob(job=long, at=50)]
    seen: list[tuple[int, bool]] = []
    step = loop.step

    def watched() -> Any:
        output = step()
        seen.append((output.stats.running, slab_of(loop).nbytes > 0))
        assert output.stats.waiting == 0
        return output

    loop.step = watched
    outcomes = run_schedule(loop, schedule)
    assert seen[48:51] == [(3, True), (3, True), (4, False)]
    four = [has_slab for running, has_slab in seen if running == 4]
    assert len(four) > 10
    assert not any(four)
    assert (2, True) in seen[50:], "created again"
    for one in (*jobs, long):
        expected = run_one(make_loop(model, chunk=256, context=4096), one)
        ties.append(assert_same(outcomes[one.id], expected))


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_a_full_context_shifts_in_a_slab(name: str, ties: list[int]) -> None:
    """A llama's caches shift. The other model's cannot, so it computes the remaining tokens."""
    model = MODELS[name]()
    fields: dict[str, Any] = {"policy": "slots", "context": 64, "shift": True, "running": 3}
    schedule = [
        ScheduledJob(job=make_job(str(i), 20 + 9 * i, max_tokens=150, num_keep=4), at=5 * i)
        for i in range(3)
    ]
    rows = run_schedule(make_loop(model, **fields), schedule)
    slab = run_schedule(slab_loop(model, **fields), schedule)
    for outcome in rows:
        assert len(slab[outcome].tokens) == 150
        ties.append(assert_same(slab[outcome], rows[outcome]))


def test_a_slot_hides_what_its_last_row_left(ties: list[int]) -> None:
    """A mask multiplies by zero, and zero times infinity is NaN."""
    model = tiny_model()
    loop = slab_loop(model)
    loop.submit(make_job("first", 20, max_tokens=100))
    other = make_job("other", 30, max_tokens=150)
    outcomes = {"other": Outcome(), "next": Outcome()}
    loop.submit(other)
    following = make_job("next", 30, max_tokens=80)
    step, first = 0, None
    while not loop.idle:
        if step == 30:
            first = slots(loop)["first"]
            for layer in slab_of(loop).layers:
                for array in cast(Any, layer)._buffers:
                    by_slot = array.reshape(PARALLEL, -1, 256, array.shape[1])
                    by_slot[first, :, :40] = mx.inf
                    array[:] = by_slot.reshape(array.shape)
            loop.cancel("first")
            loop.submit(following)
        for update in loop.step().updates:
            if update.job_id in outcomes:
                record(outcomes[update.job_id], update)
        if step == 36:
            assert slots(loop)["next"] == first
        step += 1
    for one in (other, following):
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))


class TwoLayouts(RuleBasedStateMachine):
    """The same commands for a loop with slabs and a loop without: joins, leaves, growth, cancelled
    and preempted sequences, and context shifts."""

    @initialize(
        kind=st.sampled_from(sorted(MODELS)),
        policy=st.sampled_from(["radix", "slots", "shift"]),
        slab_policy=st.sampled_from(
            [ALWAYS, BY_NUMBERS, SlabPolicy(layout="slab", min_rows=2, stay_padding=1.4)]
        ),
        sequences=st.sampled_from([2, 3, 100]),
    )
    def start(self, kind: str, policy: str, slab_policy: SlabPolicy, sequences: int) -> None:
        model = MODELS[kind]()
        self.shifts = policy == "shift"
        fields: dict[str, Any] = {
            "running": PARALLEL,
            "policy": "slots" if self.shifts else policy,
            "chunk": 16,
            "budget": sequences * footprint(model, CONTEXT),
            "context": 128 if self.shifts else CONTEXT,
            "shift": self.shifts,
        }
        self.loops = (
            make_loop(model, **fields),
            make_loop(model, slab_policy=slab_policy, **fields),
        )
        self.outcomes: tuple[dict[str, Outcome], ...] = ({}, {})
        self.longest = self.loops[0].capacity.context_length

    @rule(
        length=st.integers(1, 300),
        count=st.integers(1, 200),
        shared=st.sampled_from(["a", "b"]),
        greedy=st.booleans(),
    )
    def submit(self, length: int, count: int, shared: str, greedy: bool) -> None:
        """Half of a prompt is shared, so that prefixes are also reused."""
        name = str(len(self.outcomes[0]))
        length = min(length, self.longest - 1)
        count = count if self.shifts else min(count, self.longest - length)
        rng = random.Random(shared)
        ids = bytes(rng.choices(range(256), k=length // 2)) + bytes(
            random.Random(name).choices(range(256), k=length - length // 2)
        )
        one = job(
            name,
            ids,
            max_tokens=count,
            stop_token_ids=NONE,
            temperature=0.0 if greedy else 0.7,
            seed=length,
            num_keep=4,
        )
        for loop, outcomes in zip(self.loops, self.outcomes, strict=True):
            outcomes[name] = Outcome()
            loop.submit(one)

    @rule(count=st.integers(1, 40))
    def step(self, count: int) -> None:
        for loop, outcomes in zip(self.loops, self.outcomes, strict=True):
            for _ in range(count):
                self._step(loop, outcomes)

    @precondition(lambda self: self.outcomes[0])
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.outcomes[0])))
        for loop in self.loops:
            loop.cancel(name)

    def teardown(self) -> None:
        for loop, outcomes in zip(self.loops, self.outcomes, strict=True):
            while not loop.idle:
                self._step(loop, outcomes)
            assert loop.exceptions == 0
        for rows, slab in zip(*(o.values() for o in self.outcomes), strict=True):
            if "cancelled" in (rows.reason, slab.reason):  # the other layout may be ahead
                both = min(len(rows.tokens), len(slab.tokens))
                rows.tokens, slab.tokens, rows.reason = rows.tokens[:both], slab.tokens[:both], ""
                slab.reason = ""
            assert_same(rows, slab)
        assert slab_of(self.loops[1]).nbytes == 0

    def _step(self, loop: Loop, outcomes: Mapping[str, Outcome]) -> None:
        output = loop.step()
        loop.check()
        assert output.stats.ledger.free >= 0
        for update in output.updates:
            record(outcomes[update.job_id], update)
        if loop.slab is not None:
            for sequence in loop.slab.slots:
                assert sequence.running
                assert all(x.offset <= sequence.num_computed_tokens for x in sequence.kv)
            assert loop.slab.nbytes <= output.stats.ledger.kv


class MoreTwoLayouts(TwoLayouts):
    """The same with more and longer histories."""


TestTwoLayouts = TwoLayouts.TestCase
TestTwoLayouts.settings = examples(max_examples=8, stateful_step_count=20, deadline=None)
TestMoreTwoLayouts = pytest.mark.exhaustive(MoreTwoLayouts.TestCase)
TestMoreTwoLayouts.settings = examples(max_examples=60, stateful_step_count=25, deadline=None)
