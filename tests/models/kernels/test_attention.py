"""Attention kernels: correct by float64, with the same bits for any chunks, buffer layout, batch
and number of threads."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import kernels

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Queries, keys and values of one sequence, and its mask, sinks and softcap."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    window: int = 0
    sinks: np.ndarray | None = None
    softcap: float = 0.0

    @property
    def length(self) -> int:
        return self.q.shape[2]

    @property
    def arguments(self) -> dict:
        sinks = None if self.sinks is None else mx.array(self.sinks)
        return {
            "scale": self.q.shape[3] ** -0.5,
            "window": self.window,
            "sinks": sinks,
            "softcap": self.softcap,
        }


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@st.composite
def cases(draw) -> Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    depth, width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    length, seed = draw(st.integers(1, 90)), draw(st.integers(0, 2**16))
    heads = kv_heads * group
    return Case(
        q=numbers(seed, 1, heads, length, depth),
        k=numbers(seed + 1, 1, kv_heads, length, depth),
        v=numbers(seed + 2, 1, kv_heads, length, width),
        window=draw(st.sampled_from([0, 0, 1, 7, 40])),
        sinks=draw(st.sampled_from([None, numbers(seed + 3, heads)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
    )


def exact(case: Case, *, causal: bool = True) -> np.ndarray:
    """Attention in float64."""
    q, k, v = (array.astype(np.float64) for array in (case.q, case.k, case.v))
    group = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, group, 1).swapaxes(-1, -2) * q.shape[3] ** -0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    total, length = k.shape[2], q.shape[2]
    at, key = np.arange(total - length, total)[:, None], np.arange(total)[None]
    if causal:
        hidden = (key > at) | ((key <= at - case.window) if case.window else False)
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    if case.sinks is not None:
        top = np.maximum(top, case.sinks[None, :, None, None])
    weights = np.exp(scores - top)
    totals = weights.sum(-1, keepdims=True)
    if case.sinks is not None:
        totals = totals + np.exp(case.sinks[None, :, None, None] - top)
    return weights / totals @ np.repeat(v, group, 1)


class Sequence:
    """A case in a cache buffer; `see` appends and attends to the next positions."""

    def __init__(self, case: Case, capacity: int) -> None:
        self.case, self.capacity = case, capacity
        shape = (1, case.k.shape[1], capacity)
        # unused positions are NaN, because attention must not read them
        self.keys = mx.full((*shape, case.k.shape[3]), mx.nan)
        self.values = mx.full((*shape, case.v.shape[3]), mx.nan)
        self.end = self.first = 0

    def place(self, count: int) -> tuple[int, int, int, int]:
        """(slot, length, head, first); a position is stored at its number modulo the capacity."""
        end = self.end + count
        first = max(0, end - self.capacity)
        return self.end % self.capacity, end - first, first % self.capacity, first

    def part(self, count: int) -> list[mx.array]:
        return [
            mx.array(array[:, :, self.end : self.end + count])
            for array in (self.case.q, self.case.k, self.case.v)
        ]

    def see(self, count: int) -> np.ndarray:
        return attend_batch([self], count)[0]


def attend_batch(rows: list[Sequence], count: int) -> list[np.ndarray]:
    q, k, v = (
        mx.concatenate(list(parts))
        for parts in zip(*(row.part(count) for row in rows), strict=True)
    )
    places = [list(column) for column in zip(*(row.place(count) for row in rows), strict=True)]
    out, keys, values = OPS.attend(
        q, k, v, [row.keys for row in rows], [row.values for row in rows], *places,
        **rows[0].case.arguments,
    )  # fmt: skip
    for row, own_keys, own_values in zip(rows, keys, values, strict=True):
        row.keys, row.values = own_keys, own_values
        row.end += count
    return [np.array(part) for part in mx.split(out, len(rows))]


def attend_at_once(case: Case) -> np.ndarray:
    return Sequence(case, case.length).see(case.length)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.tobytes() == b.tobytes(), f"largest difference {np.abs(a - b).max()}"


@given(case=cases())
def test_attention_agrees_with_float64(case):
    np.testing.assert_allclose(attend_at_once(case), exact(case), atol=5e-6, rtol=1e-5)


@given(case=cases(), queries=st.integers(1, 8), causal=st.booleans())
def test_attention_accepts_any_memory_layout(case, queries, causal):
    case = Case(
        q=case.q[:, :, -queries:], k=case.k, v=case.v, sinks=case.sinks, softcap=case.softcap,
        window=case.window if causal else 0,
    )  # fmt: skip
    turned = [mx.array(np.ascontiguousarray(a.swapaxes(1, 2))).swapaxes(1, 2)
              for a in (case.q, case.k)]  # fmt: skip
    down = mx.array(np.ascontiguousarray(case.v.swapaxes(2, 3))).swapaxes(2, 3)
    out = np.array(OPS.attention(*turned, down, causal=causal, **case.arguments))
    np.testing.assert_allclose(out, exact(case, causal=causal), atol=5e-6, rtol=1e-5)
    packed = [mx.array(a) for a in (case.q, case.k, case.v)]
    assert_same_bits(np.array(OPS.attention(*packed, causal=causal, **case.arguments)), out)


@given(case=cases(), data=st.data())
def test_any_chunks_give_the_same_bits(case, data):
    row, parts = Sequence(case, case.length + 5), []
    while row.end < case.length:
        parts.append(row.see(data.draw(st.integers(1, case.length - row.end))))
    assert_same_bits(np.concatenate(parts, axis=2), attend_at_once(case))


@pytest.mark.parametrize("spare", [0, 5], ids=lambda spare: f"{spare} more than the window")
@pytest.mark.parametrize("window", [5, 40, 77])
def test_the_start_of_a_window_changes_no_bits(window, spare):
    """Neither for a block of queries with different window starts nor in a ring of any size."""
    shape = (1, 2, 170, 24)
    case = Case(q=numbers(1, *shape), k=numbers(2, *shape), v=numbers(3, *shape), window=window)
    ring, row, chunks = Sequence(case, window + spare), Sequence(case, 170), (1, 50, 3, 116)
    parts = [row.see(count) for count in chunks]
    assert_same_bits(np.concatenate(parts, axis=2), attend_at_once(case))
    assert_same_bits(
        np.concatenate([ring.see(1) for _ in range(170)], axis=2), attend_at_once(case)
    )


@given(case=cases(), spare=st.integers(0, 20))
def test_a_ring_gives_the_same_bits_as_positions_in_order(case, spare):
    case = replace(case, window=case.window or 11)
    ring = Sequence(case, case.window + spare)
    parts = [ring.see(1) for _ in range(case.length)]
    assert_same_bits(np.concatenate(parts, axis=2), attend_at_once(case))


@given(first=cases(), spares=st.lists(st.integers(0, 9), min_size=2, max_size=4), data=st.data())
def test_a_row_of_a_batch_gets_the_same_bits_as_alone(first, spares, data):
    rows = []
    for seed, spare in enumerate(spares):
        case = replace(
            first,
            q=numbers(seed, *first.q.shape),
            k=numbers(seed + 50, *first.k.shape),
            v=numbers(seed + 90, *first.v.shape),
        )
        rows.append(Sequence(case, case.length + spare))
        done = data.draw(st.integers(0, case.length - 1))
        if done:
            rows[-1].see(done)
    ends = [row.end for row in rows]
    for out, row, end in zip(attend_batch(rows, 1), rows, ends, strict=True):
        assert_same_bits(out, np.ascontiguousarray(attend_at_once(row.case)[:, :, end : end + 1]))


def test_two_threads_give_the_same_bits_as_one():
    case = Case(
        q=numbers(1, 1, 8, 150, 64), k=numbers(2, 1, 4, 150, 64), v=numbers(3, 1, 4, 150, 64)
    )
    before = OPS.num_threads()
    try:
        OPS.set_num_threads(1)
        alone = attend_at_once(case)
        OPS.set_num_threads(2)
        assert_same_bits(attend_at_once(case), alone)
    finally:
        OPS.set_num_threads(before)


def test_a_hidden_key_has_no_effect_for_any_value():
    case = Case(q=numbers(1, 1, 2, 40, 16), k=numbers(2, 1, 1, 40, 16), v=numbers(3, 1, 1, 40, 16))
    k, v = case.k.copy(), case.v.copy()
    k[:, :, 30:], v[:, :, 30:] = np.nan, np.inf
    bad = attend_at_once(Case(q=case.q, k=k, v=v))
    assert_same_bits(
        np.ascontiguousarray(bad[:, :, :30]), np.ascontiguousarray(attend_at_once(case)[:, :, :30])
    )
    assert np.isnan(bad[:, :, 30:]).all()


def test_a_query_without_visible_keys_gets_zeros():
    q, k = mx.array(numbers(1, 1, 2, 5, 16)), mx.array(numbers(2, 1, 2, 3, 16))
    out = np.array(OPS.attention(q, k, k, scale=1.0, causal=True))
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:] != 0).all()
    assert (np.array(OPS.attention(q, k[:, :, :0], k[:, :, :0], scale=1.0)) == 0).all()


def test_zero_positions_leave_the_buffers_unchanged():
    none, buffer = mx.zeros((1, 2, 0, 8)), mx.array(numbers(1, 1, 2, 4, 8))
    out, keys, values = OPS.attend(
        none, none, none, [buffer], [buffer], [0], [0], [0], [0], scale=1.0
    )
    assert out.shape == (1, 2, 0, 8)
    assert_same_bits(np.array(keys[0]), np.array(buffer))
    assert_same_bits(np.array(values[0]), np.array(buffer))


def address(array: mx.array) -> int:
    return np.array(array, copy=False).__array_interface__["data"][0]


def steps(row: Sequence, count: int, evaluate) -> tuple[int, int]:
    """Addresses of keys and values after `count` steps."""
    outs = []
    for _ in range(count):
        q, k, v = row.part(1)
        places = [[one] for one in row.place(1)]
        out, keys, values = OPS.attend(
            q, k, v, [row.keys], [row.values], *places, **row.case.arguments
        )
        row.keys, row.values, row.end = keys[0], values[0], row.end + 1
        del keys, values  # these lists reference the buffers too
        evaluate(out)
        outs.append(out)
    mx.eval(outs)
    return address(row.keys), address(row.values)


@pytest.mark.parametrize("evaluate", [mx.eval, mx.async_eval])
def test_an_unshared_buffer_is_written_in_place(evaluate):
    # large enough to detect a copy, and to dispatch a step before the previous one has finished
    shape = (1, 4, 400, 64)
    case = Case(q=numbers(1, *shape), k=numbers(2, *shape), v=numbers(3, *shape))
    row = Sequence(case, 400)
    row.see(300)
    # A step copies the buffers if MLX's thread, which releases those of the previous step, has no
    # core for a while. If every step did, an odd number of steps would not end where it began.
    in_place = []
    for _ in range(11):
        before = address(row.keys), address(row.values)
        in_place.append(steps(row, 9, evaluate) == before)
    assert sum(in_place) > len(in_place) / 2


def test_a_shared_buffer_is_copied():
    case = Case(q=numbers(1, 1, 2, 9, 8), k=numbers(2, 1, 2, 9, 8), v=numbers(3, 1, 2, 9, 8))
    row = Sequence(case, 9)
    row.see(4)
    keys, view = row.keys, row.values[:, :, :4]
    mx.eval(view)
    before = np.array(keys), np.array(view)
    row.see(5)
    assert_same_bits(np.array(keys), before[0])
    assert_same_bits(np.array(view), before[1])
    assert_same_bits(np.array(row.keys), case.k)
    assert_same_bits(np.array(row.values), case.v)


def test_heads_are_merged_without_a_copy():
    case = Case(q=numbers(1, 1, 4, 6, 8), k=numbers(2, 1, 2, 6, 8), v=numbers(3, 1, 2, 6, 8))
    q, k, v = (mx.array(array) for array in (case.q, case.k, case.v))
    out = OPS.attention(q, k, v, causal=True, **case.arguments)
    merged = out.swapaxes(1, 2).reshape(1, 6, 32)
    mx.eval(out, merged)
    assert address(merged) == address(out)


def test_softcap_and_sinks_can_be_combined():
    case = Case(
        q=numbers(1, 1, 2, 9, 8), k=numbers(2, 1, 2, 9, 8), v=numbers(3, 1, 2, 9, 8),
        sinks=numbers(4, 2), softcap=2.0,
    )  # fmt: skip
    np.testing.assert_allclose(attend_at_once(case), exact(case), atol=5e-6)


GOOD = {
    "q": mx.zeros((1, 4, 1, 8)), "k": mx.zeros((1, 2, 1, 8)), "v": mx.zeros((1, 2, 1, 6)),
    "keys": [mx.zeros((1, 2, 4, 8))], "values": [mx.zeros((1, 2, 4, 6))],
    "slots": [2], "lengths": [3], "head_slots": [0], "first_positions": [0], "scale": 1.0,
}  # fmt: skip
REFUSED = {
    "a slot that does not follow the others": ("must follow the existing ones", {"slots": [1]}),
    "more than the buffer has": ("must fit into the buffer", {"slots": [3], "lengths": [5]}),
    "fewer positions than new ones": ("must fit into the buffer", {"lengths": [0]}),
    "a head beyond the buffer": ("must fit into the buffer", {"head_slots": [4]}),
    "a head before the buffer": ("must fit into the buffer", {"head_slots": [-1]}),
    "a position before the first": ("must fit into the buffer", {"first_positions": [-1]}),
    "a list that is too short": ("each sequence needs a slot, a length", {"first_positions": []}),
    "more slots than rows": ("each sequence needs buffers and", {
        "slots": [2, 2], "lengths": [3, 3], "head_slots": [0, 0], "first_positions": [0, 0],
    }),
    "a scale of 0": ("scale must be", {"scale": 0.0}),
    "a scale that is not a number": ("scale must be", {"scale": float("nan")}),
    "a window below 0": ("scale must be", {"window": -1}),
    "a softcap below 0": ("scale must be", {"softcap": -1.0}),
    "sinks of other heads": ("sinks must be", {"sinks": mx.zeros((3,))}),
    "heads that cannot be grouped": ("a multiple", {"q": mx.zeros((1, 3, 1, 8))}),
    "queries of another depth": ("fit each other", {"q": mx.zeros((1, 4, 1, 7))}),
    "more queries than keys": ("each new position", {"q": mx.zeros((1, 4, 2, 8))}),
    "keys of float16": ("of float32", {"k": mx.zeros((1, 2, 1, 8), mx.float16)}),
    "a buffer of bfloat16": ("of float32", {"keys": [mx.zeros((1, 2, 4, 8), mx.bfloat16)]}),
    "buffers of two lengths": ("a buffer must be", {"keys": [mx.zeros((1, 2, 5, 8))]}),
    "a buffer of another width": ("a buffer must be", {"values": [mx.zeros((1, 2, 4, 8))]}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_refused(what):
    mx.eval(OPS.attend(**GOOD)[0])
    why, changed = REFUSED[what]
    with pytest.raises(ValueError, match=why):
        OPS.attend(**(GOOD | changed))
