"""Norm, rotation and gate kernels: correct by float64, and the bits of a row depend only on it."""

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


def swap_axes(x: np.ndarray) -> mx.array:
    """The same array with the two middle axes swapped in memory."""
    return mx.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)


def make_strided(x: np.ndarray) -> mx.array:
    """The same array with gaps between its elements."""
    return mx.array(np.repeat(x, 2, axis=-1))[..., ::2]


LAYOUTS = {"packed": mx.array, "swapped": swap_axes, "strided": make_strided}
layouts = st.sampled_from(list(LAYOUTS))


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.tobytes() == b.tobytes(), f"largest difference {np.abs(a - b).max()}"


# ---- rms_norm --------------------------------------------------------------------------------


@given(shape=shapes, layout=layouts, weighted=st.booleans(), size=st.sampled_from([1e-6, 1, 1e6]))
def test_a_norm_agrees_with_float64_for_all_layouts(shape, layout, weighted, size):
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
    assert_same_bits(np.array(OPS.rms_norm(mx.array(x[at]), weight, 1e-5)), out[at])


def test_many_rows_have_the_same_bits_on_one_thread_and_on_two():
    x, weight, before = mx.array(numbers(5, 300, 513)), mx.array(numbers(6, 513)), OPS.num_threads()
    try:
        OPS.set_num_threads(1)
        alone = np.array(OPS.rms_norm(x, weight, 1e-5))
        OPS.set_num_threads(2)
        assert_same_bits(np.array(OPS.rms_norm(x, weight, 1e-5)), alone)
    finally:
        OPS.set_num_threads(before)


def test_nan_stays_in_its_row():
    x = numbers(7, 3, 40)
    x[1, 39] = np.nan
    out = np.array(OPS.rms_norm(mx.array(x), None, 1e-5))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_zero_rows_and_empty_arrays_can_be_normalized():
    assert (np.array(OPS.rms_norm(mx.zeros((2, 20)), None, 1e-5)) == 0).all()
    assert OPS.rms_norm(mx.zeros((0, 20)), None, 1e-5).shape == (0, 20)


# ---- rope ------------------------------------------------------------------------------------


def periods(dims: int) -> np.ndarray:
    return np.array([10000 ** (i / dims) for i in range(0, dims, 2)], np.float32)


def rotate_reference(
    x: np.ndarray, offsets: list[int], dims: int, traditional: bool, magnitude: float
):
    """Rotation in float64, with float32 angles."""
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
def test_rotation_agrees_with_float64(
    shape, half, tail, layout, traditional, magnitude, offsets, one
):
    x = numbers(1, *shape, 2 * half + tail)
    given_offset = offsets[0] if one else mx.array(offsets[: shape[0]])
    out = OPS.rope(
        LAYOUTS[layout](x), given_offset, mx.array(periods(2 * half)), 2 * half,
        traditional=traditional, magnitude=magnitude,
    )  # fmt: skip
    of_rows = offsets[:1] * shape[0] if one else offsets[: shape[0]]
    exact = rotate_reference(x, of_rows, 2 * half, traditional, magnitude)
    np.testing.assert_allclose(np.array(out), exact, atol=2e-6)


@given(
    offset=st.integers(0, 100_000), dims=st.sampled_from([16, 48, 64]), traditional=st.booleans()
)
def test_the_rope_kernel_agrees_with_the_rope_of_the_models(offset, dims, traditional):
    x = mx.array(numbers(2, 2, 3, 4, 64))
    model = Rope(dims=dims, periods=mx.array(periods(dims)), magnitude=1.2, traditional=traditional)
    ours = OPS.rope(x, offset, model.periods, dims, traditional=traditional, magnitude=1.2)
    np.testing.assert_allclose(np.array(ours), np.array(model(x, offset)), atol=3e-6)


@given(length=st.integers(1, 30), at=st.integers(0, 29), offset=st.integers(0, 5000))
def test_a_rotated_position_has_the_same_bits_in_any_chunk(length, at, offset):
    at = min(at, length - 1)
    x, by = mx.array(numbers(3, 1, 2, length, 24)), mx.array(periods(24))
    full = np.array(OPS.rope(x, offset, by, 24))
    part = np.array(OPS.rope(x[:, :, at:], offset + at, by, 24))
    assert_same_bits(np.ascontiguousarray(full[:, :, at:]), part)
    row = mx.array([offset + at], mx.int32)
    assert_same_bits(np.array(OPS.rope(x[:, :, at:], row, by, 24)), part)


# ---- gates -----------------------------------------------------------------------------------


def activate_reference(kind: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_has_float32_precision_over_its_whole_range(kind):
    x = np.concatenate([np.linspace(-80, 80, 160_001), np.linspace(-6, 6, 100_001)])
    x = np.concatenate([x, 10.0 ** np.arange(-30, 2)]).astype(np.float32)
    out = np.array(OPS.glu(kind, mx.array(x), mx.ones(x.shape)))
    exact = activate_reference(kind, x)
    units = np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert units[x >= 0].max() <= 2
    # where 1 + tanh and 1 + erf cancel, the error is the sum's
    assert (np.abs(out - exact) <= 1.2e-7 * np.abs(x)).all()
    if kind == "silu":
        assert units.max() <= 3


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_has_the_right_limits_and_propagates_nan(kind):
    x = mx.array([math.nan, math.inf, 1e30, -1e30, -200.0, 0.0])
    out = np.array(OPS.glu(kind, x, mx.ones(x.shape)))
    assert math.isnan(out[0])
    assert out[1] == math.inf
    assert out[2] == np.float32(1e30)
    assert (np.abs(out[3:]) == 0).all()


@given(kind=st.sampled_from(GATES), size=st.integers(1, 70), at=st.integers(0, 69))
def test_the_bits_of_a_gate_do_not_depend_on_the_index(kind, size, at):
    at = min(at, size - 1)
    x, up = numbers(1, 2, size) * 4, numbers(2, 2, size)
    out = np.array(OPS.glu(kind, mx.array(x), mx.array(up)))
    alone = OPS.glu(kind, mx.array(x[1, at : at + 1]), mx.array(up[1, at : at + 1]))
    assert_same_bits(np.array(alone), out[1, at : at + 1])


@given(kind=st.sampled_from(GATES), shape=shapes, layout=layouts)
def test_a_gate_accepts_any_memory_layout(kind, shape, layout):
    x, up = numbers(3, *shape), numbers(4, *shape)
    packed = np.array(OPS.glu(kind, mx.array(x), mx.array(up)))
    assert_same_bits(np.array(OPS.glu(kind, LAYOUTS[layout](x), mx.array(up))), packed)
    assert_same_bits(np.array(OPS.glu(kind, mx.array(x), LAYOUTS[layout](up))), packed)


# ---- invalid arguments -----------------------------------------------------------------------

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
    "an unknown gate": ("unknown activation: softplus", lambda: OPS.glu("softplus", X, X)),
    "a gate of another shape": ("must have the same shape", lambda: OPS.glu("silu", X, X[0])),
    "a gate of float16": (
        "up must be float32",
        lambda: OPS.glu("silu", X, X.astype(mx.float16)),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_refused(what):
    why, call = REFUSED[what]
    with pytest.raises(ValueError, match=why):
        call()


@given(shape=shapes, layout=layouts, cap=st.sampled_from([0.5, 30.0]), seed=st.integers(0, 9))
def test_softcap(shape: tuple[int, ...], layout: str, cap: float, seed: int) -> None:
    x = 40 * numbers(seed, *shape)
    got = np.array(OPS.softcap(LAYOUTS[layout](x), cap))
    np.testing.assert_allclose(got, cap * np.tanh(x.astype(np.float64) / cap), rtol=2e-6, atol=1e-6)
    alone = np.array(OPS.softcap(mx.array(x[:1, :1, :1]), cap))
    assert_same_bits(got[:1, :1, :1], alone)


def test_softcap_of_long_rows() -> None:
    x = 40 * numbers(0, 2, 5001)
    got = np.array(OPS.softcap(mx.array(x), 30.0))
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=2e-6, atol=1e-6)
    assert_same_bits(got[1, 1020:1030], np.array(OPS.softcap(mx.array(x[1, 1020:1030]), 30.0)))


def test_softcap_refuses_invalid_arguments() -> None:
    for x, cap in ((mx.zeros(3, mx.bfloat16), 1.0), (mx.zeros(3), 0.0), (mx.zeros(3), -1.0)):
        with pytest.raises(ValueError, match=r"float32|positive"):
            OPS.softcap(x, cap)
