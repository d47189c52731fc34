"""The Mamba-2 layer: its formulas, and the operation that replaces them on a CPU."""

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import kernels
from models.base import ModelError
from models.cpu_layout import apply_cpu_layout
from models.kernels.fused_blocks import MAX_FUSED_ROWS
from models.kernels.mamba2_op import get_arguments
from models.mamba2 import (
    CHUNK_LENGTH,
    Mamba2Config,
    Mamba2Half,
    Mamba2Mixer,
    read_step_limits,
    selective_scan,
)
from models.recurrent import RecurrentCache
from tests.models import parity
from tests.models.kernel_switch import use_kernels

OPS = kernels.ops()
needs_kernels = pytest.mark.skipif(OPS is None, reason="no kernels")

HIDDEN = 32
CONFIG = Mamba2Config(
    hidden_size=HIDDEN,
    num_heads=6,
    head_dim=20,
    state_size=12,
    num_groups=2,
    conv_width=4,
    eps=1e-5,
)
Array = np.ndarray[Any, Any]


def make_mixer(config: Mamba2Config = CONFIG, *, with_kernels: bool = False) -> Any:
    rng = np.random.default_rng(0)
    mixer = Mamba2Mixer(config)
    modules: Any = (mixer, *mixer.children().values())
    for module in modules:
        for name, array in list(module.items()):
            if isinstance(array, mx.array):
                noise = rng.standard_normal(array.shape) / math.sqrt(array.shape[-1])
                module[name] = mx.array(noise.astype(np.float32))
    with use_kernels(enabled=with_kernels):
        apply_cpu_layout(mixer)
    return mixer


def draw(length: int, rows: int = 1, seed: int = 1) -> mx.array:
    noise = np.random.default_rng(seed).standard_normal((rows, length, HIDDEN))
    return mx.array(noise.astype(np.float32))


def evaluate(mixer: Any, x: mx.array, lengths: Sequence[int], kv: Any = None) -> Array:
    """The output of a sequence, in chunks of these lengths."""
    kv = kv or RecurrentCache(2)
    ends = np.cumsum(lengths)
    return np.concatenate(
        [
            np.array(mixer(x[:, end - length : end], kv))
            for end, length in zip(ends, lengths, strict=True)
        ],
        axis=1,
    )


def scan_by_definition(
    values: Array, keys: Array, queries: Array, steps: Array, logs: Array, state: Array
) -> tuple[Array, Array]:
    """See `selective_scan`; position by position in float64."""
    repeats = values.shape[2] // keys.shape[2]
    keys, queries = (np.repeat(x, repeats, axis=2) for x in (keys, queries))
    outs: list[Array] = []
    for t in range(values.shape[1]):
        state = np.exp(logs[:, t])[..., None, None] * state
        state = state + np.einsum(
            "bhn,bhp->bhnp", keys[:, t], values[:, t] * steps[:, t][..., None]
        )
        outs.append(np.einsum("bhn,bhnp->bhp", queries[:, t], state))
    return np.stack(outs, axis=1), state


@pytest.mark.parametrize("length", [1, 2, 7, CHUNK_LENGTH, CHUNK_LENGTH + 1, 3 * CHUNK_LENGTH - 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_scan_computes_the_recurrence(length: int, rows: int) -> None:
    rng = np.random.default_rng(length)
    values = rng.standard_normal((rows, length, 6, 5))
    keys, queries = rng.standard_normal((2, rows, length, 3, 4))
    steps = rng.uniform(0, 1, (rows, length, 6))
    logs = -rng.uniform(0, 3, (rows, length, 6))
    state = rng.standard_normal((rows, 6, 4, 5))
    out, last = scan_by_definition(values, keys, queries, steps, logs, state)
    given = (values, keys, queries, steps, logs, state)
    ours, ours_last = selective_scan(*(mx.array(x.astype(np.float32)) for x in given))
    np.testing.assert_allclose(np.array(ours), out, atol=2e-5)
    np.testing.assert_allclose(np.array(ours_last), last, atol=2e-5)


def test_a_decay_to_zero_is_not_a_division_by_zero() -> None:
    ones = mx.ones((1, 2 * CHUNK_LENGTH, 1, 1))
    steps = mx.ones((1, 2 * CHUNK_LENGTH, 1))
    out, _ = selective_scan(ones, ones, ones, steps, -1e4 * steps, mx.ones((1, 1, 1, 1)))
    np.testing.assert_array_equal(np.array(out), 1.0)


WIDE = Mamba2Config(
    hidden_size=HIDDEN,
    num_heads=4,
    head_dim=16,
    state_size=16,
    num_groups=1,
    conv_width=2,
    eps=1e-3,
    bias=True,
    conv_bias=False,
    step_limits=(0.3, 0.6),
)


@needs_kernels
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["uneven", "wide"])
def test_the_operation_agrees_with_the_formulas(config: Mamba2Config) -> None:
    x = draw(100, rows=2)
    plain, fused = (make_mixer(config, with_kernels=on) for on in (False, True))
    expected = evaluate(plain, x, [100])
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(evaluate(fused, x, [100]), expected, atol=1e-5)
    np.testing.assert_allclose(evaluate(fused, x, [1, 2, 97]), expected, atol=1e-5)


@needs_kernels
@settings(max_examples=10)
@given(cuts=st.sets(st.integers(1, 149), max_size=8))
def test_the_bits_do_not_depend_on_chunks(cuts: set[int]) -> None:
    mixer, x = make_mixer(with_kernels=True), draw(150)
    ends = [0, *sorted(cuts), 150]
    lengths = [end - start for start, end in pairwise(ends)]
    np.testing.assert_array_equal(evaluate(mixer, x, lengths), evaluate(mixer, x, [150]))


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(threads: int) -> None:
    before = OPS.num_threads()
    OPS.set_num_threads(threads)
    mixer, lengths = make_mixer(with_kernels=True), (3, 90, 1, 17, 2)
    texts = [draw(length + 4, seed=length) for length in lengths]
    alone = [evaluate(mixer, text, [text.shape[1]])[:, -4:] for text in texts]
    caches = [RecurrentCache(2) for _ in texts]
    for text, cache, length in zip(texts, caches, lengths, strict=True):
        mixer(text[:, :length], cache)
    for step in range(4):
        together = caches[0].make_batch(caches, mx.array([cache.offset for cache in caches]))
        x = mx.concatenate([t[:, n + step][:, None] for t, n in zip(texts, lengths, strict=True)])
        got = np.array(mixer(x, together))
        np.testing.assert_array_equal(
            got, np.concatenate([row[:, step : step + 1] for row in alone])
        )
    OPS.set_num_threads(before)


class Block(Mamba2Half):
    """The half of a block with a Mamba-2 layer."""

    mamba_names = ("norm", "mixer")

    def __init__(self, bits: int | None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mixer = Mamba2Mixer(replace(CONFIG, bias=True, head_dim=16, num_heads=4))
        parity.draw_weights(self, seed=0)
        if bits is not None:
            nn.quantize(self, group_size=32, bits=bits)
        apply_cpu_layout(self)

    def is_fused(self) -> bool:
        return "mamba_residual" in vars(self)


@needs_kernels
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, MAX_FUSED_ROWS + 1])
def test_the_fused_half_of_a_block_has_the_bits_of_its_parts(bits: int | None, rows: int) -> None:
    block = Block(bits)
    assert block.is_fused()
    results: list[list[Array]] = []
    for residual in (block.mamba_residual, partial(Mamba2Half.mamba_residual, block)):
        caches = [RecurrentCache(2) for _ in range(rows)]
        outs: list[Array] = []
        for row, cache in enumerate(caches):
            residual(draw(3 + row % 2, seed=row), cache)
        for step in range(3):
            together: Any = caches[0].make_batch(
                caches, mx.array([cache.offset for cache in caches])
            )
            outs.append(np.array(residual(draw(1, rows, seed=step), together)))
        assert [cache.offset for cache in caches] == [6 + row % 2 for row in range(rows)]
        results.append([*outs, *(np.array(state) for cache in caches for state in cache.state())])
    for fused, parts in zip(*results, strict=True):
        np.testing.assert_array_equal(fused, parts)


@needs_kernels
def test_weights_of_a_fused_half_must_fit() -> None:
    block: Any = Block(None)
    small, large = (OPS.Matmul(OPS.repack(mx.zeros((n, HIDDEN)))) for n in (HIDDEN, 48))
    norm = (block.norm.weight, 1e-5)
    arguments = get_arguments(block.mixer)
    with pytest.raises(ValueError, match="from and to hidden states"):
        OPS.Mamba2Block(norm, small, large, **arguments)
    with pytest.raises(ValueError, match="must take the heads"):
        OPS.Mamba2Block(norm, small, small, **arguments)
    fits = OPS.Mamba2Block(
        norm, block.mixer.in_proj.matmul, block.mixer.out_proj.matmul, **arguments
    )
    with pytest.raises(ValueError, match=r"x must be \[batch, length, hidden\]"):
        fits(mx.zeros((1, 1, HIDDEN + 1)), [], [])
    with pytest.raises(ValueError, match="each row needs a state"):
        fits(mx.zeros((1, 1, HIDDEN)), [], [])


@needs_kernels
def test_half_a_block_of_unsupported_weights_is_not_fused() -> None:
    assert not Block(3).is_fused()


@needs_kernels
def test_a_fused_block_is_freed() -> None:
    block = Block(None)
    gone = weakref.ref(block)
    del block
    gc.collect()
    assert gone() is None


@needs_kernels
def test_a_copied_state_is_not_written() -> None:
    """The operation writes in place, unless another cache has the state."""
    mixer, x = make_mixer(with_kernels=True), draw(60)
    kv = RecurrentCache(2)
    first = evaluate(mixer, x[:, :20], [20], kv)
    twin = kv.copy()
    rest = evaluate(mixer, x[:, 20:], [1, 1, 38], kv)
    np.testing.assert_array_equal(evaluate(mixer, x[:, 20:], [40], twin), rest)
    np.testing.assert_array_equal(np.concatenate([first, rest], 1), evaluate(mixer, x, [60]))


@needs_kernels
def test_a_state_is_advanced_in_place() -> None:
    mixer, x, kv = make_mixer(with_kernels=True), draw(3), RecurrentCache(2)
    mx.eval(mixer(x[:, :1], kv))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mixer(x[:, 1:2], kv))
    assert mx.get_peak_memory() - before < kv.nbytes


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": []}, "each row needs a state"),
        ({"states": [mx.zeros((1, 6, 12, 20))] * 2}, "and a tail"),
        ({"states": [mx.zeros((2, 6, 12, 20))]}, "a tail must be"),
        ({"states": [mx.zeros((1, 6, 12, 20), mx.bfloat16)]}, "the same heads"),
        ({"states": [mx.zeros((1, 6, 12, 21))]}, "the channels must be"),
        ({"projected": mx.zeros((1, 1, 295))}, "the projections must be gates"),
        ({"projected": mx.zeros((2, 1, 294))}, "each row needs a state"),
        ({"projected": mx.zeros((1, 0, 294))}, "at least one row and one position"),
        ({"projected": mx.zeros((1, 294))}, "batch, length, width"),
        ({"conv_weight": mx.zeros((1, 168))}, "2 to 16 taps"),
        ({"conv_weight": mx.zeros((17, 168))}, "2 to 16 taps"),
        ({"conv_bias": mx.zeros((3,))}, "bias must be"),
        ({"d": mx.zeros((5,))}, "dt_bias, a_log and d must be"),
        ({"norm_weight": mx.zeros((5,))}, "norm's weight must be"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"min_step": 2.0, "max_step": 1.0}, "min_step at most max_step"),
    ],
)
def test_inconsistent_arrays_are_rejected(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "projected": mx.zeros((1, 1, 294)),
        "states": [mx.zeros((1, 6, 12, 20))],
        "tails": [mx.zeros((1, 3, 168))],
        "conv_weight": mx.zeros((4, 168)),
        "conv_bias": None,
        "dt_bias": mx.zeros((6,)),
        "a_log": mx.zeros((6,)),
        "d": mx.zeros((6,)),
        "norm_weight": mx.zeros((120,)),
        "eps": 1e-5,
        "min_step": 0.0,
        "max_step": math.inf,
    }
    mx.eval(OPS.mamba2(**arguments)[0])
    with pytest.raises(ValueError, match=message):
        OPS.mamba2(**arguments | change)


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0.001, 100], (0.001, 100.0)),
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
    ],
)
def test_step_limits_are_read(value: Any, limits: tuple[float, float]) -> None:
    assert read_step_limits(value) == limits


@pytest.mark.parametrize(
    "value",
    [
        3,
        "ab",
        [],
        [0.0],
        [0.0, 1.0, 2.0],
        [2.0, 1.0],
        [-1.0, 1.0],
        [math.nan, 1.0],
        [0.0, True],
        [0.0, 10**400],
        [math.inf, math.inf],
        [0.0, {"__float__": "x"}],
    ],
    ids=str,
)
def test_invalid_step_limits_are_rejected(value: Any) -> None:
    with pytest.raises(ModelError, match=r"time_step_limit is .* but must be two numbers"):
        read_step_limits(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 4}, r"6 heads .* cannot be split into 4 groups"),
        ({"num_groups": 0}, r"the number of groups .* is 0"),
        ({"num_heads": 0}, r"the number of heads .* is 0"),
        ({"head_dim": -1}, r"the size of a head .* is -1"),
        ({"state_size": 0}, r"the size of a state .* is 0"),
        ({"conv_width": 1}, "has 1 taps, but must have between 2 and 16"),
        ({"conv_width": 1 << 30}, "taps, but must have between 2 and 16"),
    ],
)
def test_invalid_sizes_are_rejected(change: dict[str, int], message: str) -> None:
    changes: Any = change
    with pytest.raises(ModelError, match=message):
        Mamba2Mixer(replace(CONFIG, **changes))
