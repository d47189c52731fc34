"""Norms, rotations and gates of the kernels: right by float64, and a row's bits are its own."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import kernels
from models.rope import Rope

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

GATES = ["silu", "gelu", "gelu_tanh", "relu"]
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 70))


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turned(x: np.ndarray) -> mx.array:
    """The same array, whose two middle axes lie in memory the other way round."""
    return mx.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)


def scattered(x: np.ndarray) -> mx.array:
    """The same array, every number of which lies apart from the next."""
    return mx.array(np.repeat(x, 2, axis=-1))[..., ::2]


LAYOUTS = {"packed": mx.array, "turned": turned, "scattered": scattered}
layouts = st.sampled_from(list(LAYOUTS))


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert a.tobytes() == b.tobytes(), f"largest difference {np.abs(a - b).max()}"


# ---- rms_norm --------------------------------------------------------------------------------


@given(shape=shapes, layout=layouts, weighted=st.booleans(), size=st.sampled_from([1e-6, 1, 1e6]))
def test_a_norm_is_what_float64_says_however_x_lies(shape, layout, weighted, size):
    x, weight = numbers(1, *shape) * np.float32(size), numbers(2, shape[-1])
    out = OPS.rms_norm(LAYOUTS[layout](x), mx.array(weight) if weighted else None, 1e-6)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (weight if weighted else 1)
    np.testing.assert_allclose(np.array(out), exact, rtol=1e-6, atol=1e-37)


@given(shape=shapes, layout=layouts)
def test_a_normed_row_has_the_same_bits_alone(shape, layout):
    x, weight = numbers(3, *shape), mx.array(numbers(4, shape[-1]))
    out = np.array(OPS.rms_norm(LAYOUTS[layout](x), weight, 1e-5))
    at = tuple(n - 1 for n in shape[:-1])
    same(np.array(OPS.rms_norm(mx.array(x[at]), weight, 1e-5)), out[at])


def test_many_rows_have_the_same_bits_on_one_thread_and_on_two():
    x, weight, before = mx.array(numbers(5, 300, 513)), mx.array(numbers(6, 513)), OPS.threads()
    try:
        OPS.use_threads(1)
        alone = np.array(OPS.rms_norm(x, weight, 1e-5))
        OPS.use_threads(2)
        same(np.array(OPS.rms_norm(x, weight, 1e-5)), alone)
    finally:
        OPS.use_threads(before)


def test_what_is_not_a_number_stays_in_its_row():
    x = numbers(7, 3, 40)
    x[1, 39] = np.nan
    out = np.array(OPS.rms_norm(mx.array(x), None, 1e-5))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_a_row_of_zeros_and_an_array_without_rows_are_normed():
    assert (np.array(OPS.rms_norm(mx.zeros((2, 20)), None, 1e-5)) == 0).all()
    assert OPS.rms_norm(mx.zeros((0, 20)), None, 1e-5).shape == (0, 20)


# ---- rope ------------------------------------------------------------------------------------


def periods(dims: int) -> np.ndarray:
    return np.array([10000 ** (i / dims) for i in range(0, dims, 2)], np.float32)


def rotated(x: np.ndarray, offsets: list[int], dims: int, traditional: bool, magnitude: float):
    """In float64, but for the angle, which is float32's."""
    out = x.astype(np.float64)
    inverse = np.float32(1) / periods(dims)
    at = np.array(offsets)[:, None] + np.arange(x.shape[2])
    angle = (at.astype(np.float32)[..., None] * inverse).astype(np.float64)[:, None]
    cos, sin = np.cos(angle), np.sin(angle)
    half = dims // 2
    first = slice(0, dims, 2) if traditional else slice(0, half)
    second = slice(1, dims, 2) if traditional else slice(half, dims)
    a, b = out[..., first] * magnitude, out[..., second] * magnitude
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    half=st.integers(1, 40),
    tail=st.integers(0, 20),
    layout=layouts,
    traditional=st.booleans(),
    magnitude=st.sampled_from([1.0, 1.3]),
    offsets=st.lists(st.integers(0, 1_000_000), min_size=3, max_size=3),
    one=st.booleans(),
)
def test_heads_are_rotated_as_float64_says(
    shape, half, tail, layout, traditional, magnitude, offsets, one
):
    x = numbers(1, *shape, 2 * half + tail)
    given_offset = offsets[0] if one else mx.array(offsets[: shape[0]])
    out = OPS.rope(
        LAYOUTS[layout](x), given_offset, mx.array(periods(2 * half)), 2 * half,
        traditional=traditional, magnitude=magnitude,
    )  # fmt: skip
    of_rows = offsets[:1] * shape[0] if one else offsets[: shape[0]]
    exact = rotated(x, of_rows, 2 * half, traditional, magnitude)
    np.testing.assert_allclose(np.array(out), exact, atol=2e-6)


@given(
    offset=st.integers(0, 100_000), dims=st.sampled_from([16, 48, 64]), traditional=st.booleans()
)
def test_a_rope_of_ours_is_the_rope_of_the_models(offset, dims, traditional):
    x = mx.array(numbers(2, 2, 3, 4, 64))
    model = Rope(dims=dims, periods=mx.array(periods(dims)), magnitude=1.2, traditional=traditional)
    ours = OPS.rope(x, offset, model.periods, dims, traditional=traditional, magnitude=1.2)
    np.testing.assert_allclose(np.array(ours), np.array(model(x, offset)), atol=3e-6)


@given(length=st.integers(1, 30), at=st.integers(0, 29), offset=st.integers(0, 5000))
def test_a_rotated_position_has_the_same_bits_in_any_chunk(length, at, offset):
    at = min(at, length - 1)
    x, by = mx.array(numbers(3, 1, 2, length, 24)), mx.array(periods(24))
    whole = np.array(OPS.rope(x, offset, by, 24))
    part = np.array(OPS.rope(x[:, :, at:], offset + at, by, 24))
    same(np.ascontiguousarray(whole[:, :, at:]), part)
    row = mx.array([offset + at], mx.int32)
    same(np.array(OPS.rope(x[:, :, at:], row, by, 24)), part)


# ---- gates -----------------------------------------------------------------------------------


def activated(kind: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_is_right_to_float32_over_its_whole_range(kind):
    x = np.concatenate([np.linspace(-80, 80, 160_001), np.linspace(-6, 6, 100_001)])
    x = np.concatenate([x, 10.0 ** np.arange(-30, 2)]).astype(np.float32)
    out = np.array(OPS.gate(kind, mx.array(x), mx.ones(x.shape)))
    exact = activated(kind, x)
    units = np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert units[x >= 0].max() <= 2
    # where 1 + tanh and 1 + erf cancel, what is left is as good as that sum
    assert (np.abs(out - exact) <= 1.2e-7 * np.abs(x)).all()
    if kind == "silu":
        assert units.max() <= 3


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_has_its_limits_and_keeps_what_is_not_a_number(kind):
    x = mx.array([math.nan, math.inf, 1e30, -1e30, -200.0, 0.0])
    out = np.array(OPS.gate(kind, x, mx.ones(x.shape)))
    assert math.isnan(out[0])
    assert out[1] == math.inf
    assert out[2] == np.float32(1e30)
    assert (np.abs(out[3:]) == 0).all()


@given(kind=st.sampled_from(GATES), size=st.integers(1, 70), at=st.integers(0, 69))
def test_what_a_gate_gives_does_not_depend_on_where_it_stands(kind, size, at):
    at = min(at, size - 1)
    x, up = numbers(1, 2, size) * 4, numbers(2, 2, size)
    out = np.array(OPS.gate(kind, mx.array(x), mx.array(up)))
    alone = OPS.gate(kind, mx.array(x[1, at : at + 1]), mx.array(up[1, at : at + 1]))
    same(np.array(alone), out[1, at : at + 1])


@given(kind=st.sampled_from(GATES), shape=shapes, layout=layouts)
def test_a_gate_takes_its_inputs_as_they_lie(kind, shape, layout):
    x, up = numbers(3, *shape), numbers(4, *shape)
    packed = np.array(OPS.gate(kind, mx.array(x), mx.array(up)))
    same(np.array(OPS.gate(kind, LAYOUTS[layout](x), mx.array(up))), packed)
    same(np.array(OPS.gate(kind, mx.array(x), LAYOUTS[layout](up))), packed)


# ---- what is refused -------------------------------------------------------------------------

X, P = mx.zeros((1, 2, 3, 8)), mx.ones((4,))
REFUSED = {
    "a norm of float16": (
        "x must be float32",
        lambda: OPS.rms_norm(X.astype(mx.float16), None, 1e-5),
    ),
    "a weight of another width": ("last axis", lambda: OPS.rms_norm(X, mx.ones((7,)), 1e-5)),
    "a weight of bfloat16": (
        "a weight must be float32",
        lambda: OPS.rms_norm(X, mx.ones((8,), mx.bfloat16), 1e-5),
    ),
    "heads of bfloat16": ("x must be float32", lambda: OPS.rope(X.astype(mx.bfloat16), 0, P, 8)),
    "three axes": ("batch, heads", lambda: OPS.rope(X[0], 0, P, 8)),
    "too many periods": ("dims / 2", lambda: OPS.rope(X, 0, P, 6)),
    "more than a head": ("must be even", lambda: OPS.rope(X, 0, mx.ones((5,)), 10)),
    "an odd number": ("must be even", lambda: OPS.rope(X, 0, P, 7)),
    "too many offsets": ("one, or", lambda: OPS.rope(X, mx.array([1, 2]), P, 8)),
    "an unknown gate": ("unknown activation: softplus", lambda: OPS.gate("softplus", X, X)),
    "a gate of another shape": ("must have the same shape", lambda: OPS.gate("silu", X, X[0])),
    "a gate of float16": (
        "up must be float32",
        lambda: OPS.gate("silu", X, X.astype(mx.float16)),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what):
    why, call = REFUSED[what]
    with pytest.raises(ValueError, match=why):
        call()
