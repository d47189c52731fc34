"""Products agree with float64, and the bits of a row do not depend on the other rows."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import kernels
from tests.rows import rows

OPS = kernels.ops()
pytestmark = [
    pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}"),
    pytest.mark.recorded,
]

# Products with bfloat16 matrices on tiles use parts of x and count denormal numbers as zero.
BF16_ON_TILES = OPS is not None and not OPS.why_no_bf16_tiles()

EPS = 2.0**-24
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


@dataclass(frozen=True, slots=True)
class Format:
    """dtype: of the matrix, or of the scales and biases of a packed one. activations: the number of
    bits to which a product with a packed matrix, or with a bfloat16 matrix on tiles, rounds x."""

    dtype: mx.Dtype
    bits: int = 0
    group: int = 0
    activations: int = 24

    @property
    def is_on_bf16_tiles(self) -> bool:
        return BF16_ON_TILES and not self.bits and self.dtype == mx.bfloat16

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("mlx.core.")
        rounded = "" if self.activations == 24 else f"-a{self.activations}"
        if not self.bits:
            return name + rounded
        return f"q{self.bits}-{self.group}-{name}{rounded}"


PLAIN = [*(Format(dtype) for dtype in FLOATS), Format(mx.bfloat16, activations=16)]
PACKED = [Format(dtype, b, g) for dtype in FLOATS for b in (4, 8) for g in (32, 64, 128)]
PACKED += [
    Format(mx.bfloat16, b, g, activations)
    for activations in (16, 8)
    for b in (4, 8)
    for g in (32, 64, 128)
]
# the largest integer to which an element of x is rounded
MOST = {24: 0x7F7F70, 16: 0x7F7F, 8: 0x7F}
formats = pytest.mark.parametrize("format", PLAIN + PACKED, ids=str)
each_format = rows("format", PLAIN + PACKED, ids=str)


@dataclass(frozen=True, slots=True)
class Case:
    product: Any
    parts: list[mx.array]  # arrays of the matrix, in row-major order
    format: Format
    weight: np.ndarray  # float32, as the kernel expands it
    bias: np.ndarray | None


def random(draw: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(draw.standard_normal(shape).astype(np.float32))


def case(format: Format, outputs: int, inputs: int, *, seed: int = 0, biased: bool = False) -> Case:
    draw = np.random.default_rng(seed)
    plain = random(draw, outputs, inputs)
    bias = random(draw, outputs) if biased else None
    bias_array = None if bias is None else np.array(bias)
    if not format.bits:
        weight = plain.astype(format.dtype)
        return Case(
            make_product(format, weight, bias=bias), [weight], format, wide(weight), bias_array
        )
    words, *rest = mx.quantize(plain, format.group, format.bits)
    parts = [words, *(one.astype(format.dtype) for one in rest)]
    product = make_product(format, *parts, bias=bias)
    return Case(product, parts, format, dequantize(format, *parts), bias_array)


def make_product(
    format: Format, weight: mx.array, *rest: mx.array, bias: mx.array | None = None
) -> Any:
    """The product with a row-major matrix."""
    parts = OPS.repack(weight, format.bits), *(OPS.repack_scales(one) for one in rest)
    return OPS.Matmul(
        *parts,
        bias=bias,
        group_size=format.group,
        bits=format.bits,
        activations=format.activations,
    )


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def dequantize(format: Format, words: mx.array, scales: mx.array, biases: mx.array) -> np.ndarray:
    """scale * number + bias, rounded once: float64 has the exact value."""
    numbers = np.array(words)[..., None] >> np.arange(0, 32, format.bits, dtype=np.uint32)
    numbers = (numbers & (2**format.bits - 1)).reshape(len(numbers), -1, format.group)
    scale, bias = (wide(one).astype(np.float64)[..., None] for one in (scales, biases))
    return (numbers * scale + bias).astype(np.float32).reshape(len(numbers), -1)


def check_product(case: Case, x: mx.array, y: mx.array, *, more: float = 0.0) -> None:
    """Check the rounding error. Terms are summed in runs of at most 192, then the runs, then the
    bias. more: the relative rounding error of the result type."""
    left, right = wide(x).astype(np.float64), case.weight.astype(np.float64)
    exact, size = left @ right.T, np.abs(left) @ np.abs(right).T
    if case.bias is not None:
        exact, size = exact + case.bias, size + np.abs(case.bias)
    roundings = min(right.shape[1], 192) + right.shape[1] / 192 + 3
    # without a fused multiply-add each weight and each product is rounded once more
    roundings += 0 if OPS.isa() != "scalar" else 4
    allowed = size * EPS * roundings + np.abs(exact) * more
    if case.format.is_on_bf16_tiles and case.format.activations == 16:
        allowed += size * 2.0**-17
    if case.format.bits:
        allowed += rounding_bound(left, case.format) @ np.abs(right).T
        # the bias of a group and its numbers can nearly cancel
        allowed += size.max() * EPS * 16
    assert y.shape == (*x.shape[:-1], len(case.weight))
    assert (np.abs(wide(y) - exact) <= allowed).all()


def rounding_bound(x: np.ndarray, format: Format) -> np.ndarray:
    """Maximum rounding error if the largest value of a group is scaled to MOST."""
    groups = np.abs(x).reshape(*x.shape[:-1], -1, format.group)
    most = np.broadcast_to(groups.max(axis=-1, keepdims=True), groups.shape)
    return most.reshape(x.shape) / MOST[format.activations] * (0.5 + 2.0**-8)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    rows = draw(st.one_of(st.integers(1, 20), st.integers(100, 400)))
    outputs = draw(st.one_of(st.integers(1, 40), st.integers(200, 300)))
    inputs = draw(st.one_of(st.integers(1, 80), st.integers(250, 1100)))
    return rows, outputs, inputs, draw(st.integers(0, 2**32 - 1))


def round_up_inputs(format: Format, inputs: int) -> int:
    return inputs if not format.bits else -(-inputs // format.group) * format.group


@pytest.mark.product
@formats
@settings(max_examples=25)
@given(shape=shapes(), biased=st.booleans())
def test_a_product_agrees_with_float64(
    format: Format, shape: tuple[int, int, int, int], biased: bool
) -> None:
    rows, outputs, inputs, seed = shape
    inputs = round_up_inputs(format, inputs)
    one = case(format, outputs, inputs, seed=seed, biased=biased)
    x = random(np.random.default_rng(seed + 1), rows, inputs)
    check_product(one, x, one.product(x))


@formats
@settings(max_examples=15)
@given(shape=shapes(), cut=st.integers(0, 400), data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    format: Format, shape: tuple[int, int, int, int], cut: int, data: st.DataObject
) -> None:
    rows, outputs, inputs, seed = shape
    inputs = round_up_inputs(format, inputs)
    product = case(format, outputs, inputs, seed=seed, biased=True).product
    x = random(np.random.default_rng(seed + 1), rows, inputs)
    full = np.array(product(x))
    cut = min(cut, rows)
    assert (np.concatenate([np.array(product(x[:cut])), np.array(product(x[cut:]))]) == full).all()
    alone = data.draw(st.integers(0, rows - 1))
    assert (np.array(product(x[alone])) == full[alone]).all()


@pytest.mark.parametrize("format", [PLAIN[0], PLAIN[1], PACKED[0]], ids=str)
@pytest.mark.parametrize("rows", [768, 769, 1600])
def test_a_long_prompt_has_the_same_bits_as_its_chunks(format: Format, rows: int) -> None:
    product = case(format, 17, 96, biased=True).product
    x = random(np.random.default_rng(2), rows, 96)
    chunks = [np.array(product(x[at : at + 100])) for at in range(0, rows, 100)]
    gated = [np.array(OPS.gate_up("silu", product, product, x[at : at + 100])) for at in (0, 700)]
    assert (np.array(product(x)) == np.concatenate(chunks)).all()
    full = np.array(OPS.gate_up("silu", product, product, x))
    assert (full[:100] == gated[0]).all()
    assert (full[700:800] == gated[1]).all()


@each_format
def test_the_number_of_threads_changes_no_bits(format: Format) -> None:
    product = case(format, 517, 640).product
    before = OPS.num_threads()
    try:
        for rows in (1, 5, 8, 9, 70):
            x = random(np.random.default_rng(rows), rows, 640)
            results = set()
            for threads in (1, 2, 3):
                OPS.set_num_threads(threads)
                results.add(np.array(product(x)).tobytes())
            assert len(results) == 1
    finally:
        OPS.set_num_threads(before)


@each_format
def test_the_memory_layout_of_x_changes_no_bits(format: Format) -> None:
    one = case(format, 24, 128)
    base = random(np.random.default_rng(3), 6, 4, 256)
    views = [
        base[:, :, ::2],
        base[::2, 1:3, 128:],
        base[:, :, 127::-1],
        mx.broadcast_to(base[:1, :1, :128], (3, 4, 128)),
        mx.transpose(random(np.random.default_rng(4), 128, 5, 3), (2, 1, 0)),
        base[0, 0, :128],
    ]
    for x in views:
        packed = mx.array(np.array(x))
        assert (np.array(one.product(x)) == np.array(one.product(packed))).all()
        check_product(one, x, one.product(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_fewer_bits_of_activations_are_less_exact(bits: int) -> None:
    """The errors differ by the factor between the largest integers, about 258."""
    x, errors = random(np.random.default_rng(1), 40, 512), list[float]()
    for activations in (24, 16, 8):
        one = case(Format(mx.float32, bits, 64, activations), 64, 512)
        exact = wide(x).astype(np.float64) @ one.weight.astype(np.float64).T
        errors.append(float(np.abs(wide(one.product(x)) - exact).max() / np.abs(exact).max()))
    assert errors[0] < 1e-6
    assert 1e-6 < errors[1] < 1e-4
    assert 100 < errors[2] / errors[1] < 600


def test_matrices_of_another_precision_have_another_format() -> None:
    """Fused operations share the rounded x of several matrices."""
    made = [case(Format(mx.float32, 4, 64, activations), 16, 64) for activations in (24, 16, 24)]
    assert made[0].product.has_same_format(made[2].product)
    assert not made[0].product.has_same_format(made[1].product)
    with pytest.raises(ValueError, match="shape and format"):
        OPS.gate_up("silu", made[0].product, made[1].product, mx.ones((1, 64)))


@each_format
def test_no_rows_give_no_rows(format: Format) -> None:
    product = case(format, 24, 128).product
    assert np.array(product(mx.zeros((2, 0, 128)))).shape == (2, 0, 24)
    assert np.array(product.dequantize_rows(mx.zeros((0,), mx.int32))).shape == (0, 128)


@each_format
@rows(("dtype", "more"), [(mx.bfloat16, 2.0**-8), (mx.float16, 2.0**-10)])
def test_half_precision_inputs_give_results_of_their_type(
    format: Format, dtype: mx.Dtype, more: float
) -> None:
    one = case(format, 40, 256, biased=True)
    x = random(np.random.default_rng(1), 3, 256).astype(dtype)
    y = one.product(x)
    assert y.dtype == dtype
    check_product(one, x, y, more=more)


@each_format
def test_rows_returns_rows_of_the_matrix(format: Format) -> None:
    one = case(format, 50, 256)
    ids = np.array([[0, 49, 3], [3, -1, 17]])
    rows = np.array(one.product.dequantize_rows(mx.array(ids)))
    if OPS.isa() == "scalar":
        assert np.allclose(rows, one.weight[ids], rtol=EPS * 4, atol=EPS * 4)
    else:
        assert (rows == one.weight[ids]).all()


@each_format
@rows("rows", [1, 2, 7, 12])
@rows("strange", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(format: Format, rows: int, strange: float) -> None:
    product = case(format, 33, 256).product
    x = np.random.default_rng(2).standard_normal((rows, 256)).astype(np.float32)
    clean = np.array(product(mx.array(x)))
    x[rows // 2, 77] = strange
    y = np.array(product(mx.array(x)))
    others = np.arange(rows) != rows // 2
    assert (y[others] == clean[others]).all()
    assert not np.isfinite(y[rows // 2]).any()


@each_format
@rows("rows", [1, 12])
def test_denormal_numbers_and_zeros_are_exact(format: Format, rows: int) -> None:
    tiny = np.full((rows, 256), 2.0**-140, np.float32)
    one = case(format, 20, 256)
    result = np.array(one.product(mx.array(tiny)))
    exact = tiny.astype(np.float64) @ one.weight.astype(np.float64).T
    # each step can round to the nearest denormal number; integers and tiles round them to zero
    is_zero = format.bits or format.is_on_bf16_tiles
    assert (np.abs(result - (0 if is_zero else exact)) <= 256 * 2.0**-149).all()
    assert (np.array(one.product(mx.zeros((rows, 256)))) == 0).all()


@rows("format", PACKED, ids=str)
def test_a_group_can_have_any_scale(format: Format) -> None:
    draw = np.random.default_rng(5)
    words = mx.array(draw.integers(0, 2**32, (6, 256 * format.bits // 32), dtype=np.uint32))
    groups = 256 // format.group
    scales = np.ones((6, groups), np.float32)
    scales[1], scales[2, 0], scales[3, 0], scales[4, 0] = 0, np.nan, np.inf, 1e-7
    parts = mx.array(scales).astype(format.dtype), mx.zeros((6, groups)).astype(format.dtype)
    product = make_product(format, words, *parts)
    for count in (1, 12):
        y = np.array(product(mx.ones((count, 256))))
        assert (y[:, 1] == 0).all()
        assert np.isnan(y[:, 2]).all()
        assert not np.isfinite(y[:, 3]).any()
        assert np.isfinite(y[:, [0, 4, 5]]).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 3), (40, 5), (3, 8), (2, 33, 4)])
def test_strips_reorder_the_words_of_a_matrix(shape: tuple[int, ...], bits: int) -> None:
    draw = np.random.default_rng(6)
    words = draw.integers(0, 2**32, shape, dtype=np.uint32)
    strips = OPS.repack(mx.array(words), bits)
    assert (np.array(OPS.repack(strips, bits, undo=True)) == words).all()
    expected = words
    if bits == 4:
        numbers = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        expected = (numbers << np.array([0, 8, 16, 24, 4, 12, 20, 28], np.uint32)).sum(axis=-1)
    for matrix, found in zip(
        expected.reshape(-1, *shape[-2:]), np.array(strips).reshape(-1, *shape[-2:]), strict=True
    ):
        for row in range(0, shape[-2], 16):
            strip = matrix[row : row + 16]
            assert (found[row : row + 16].reshape(strip.T.shape) == strip.T).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_strips_reorder_floats_like_words(dtype: mx.Dtype) -> None:
    scales = random(np.random.default_rng(7), 21, 6).astype(dtype)
    for repack in (OPS.repack_scales, *([] if dtype == mx.bfloat16 else [OPS.repack])):
        strips = repack(scales)
        assert strips.dtype == dtype
        assert (wide(strips)[:16].reshape(6, 16) == wide(scales)[:16].T).all()
        assert (wide(strips)[16:].reshape(6, 5) == wide(scales)[16:].T).all()
        assert (wide(repack(strips, undo=True)) == wide(scales)).all()


@pytest.mark.parametrize("inputs", [1, 2, 7, 40])
def test_strips_of_bfloat16_have_pairs_of_columns(inputs: int) -> None:
    matrices = random(np.random.default_rng(7), 2, 21, inputs).astype(mx.bfloat16)
    strips = OPS.repack(matrices)
    pairs = inputs // 2 * 2
    for matrix, found in zip(wide(matrices), wide(strips), strict=True):
        for first, count in ((0, 16), (16, 5)):
            strip = found[first : first + count].reshape(-1)
            rows = matrix[first : first + count]
            by_pair = rows[:, :pairs].reshape(count, -1, 2).transpose(1, 0, 2)
            assert (strip[: pairs * count] == by_pair.reshape(-1)).all()
            assert (strip[pairs * count :] == rows[:, pairs:].T.reshape(-1)).all()
    assert (wide(OPS.repack(strips, undo=True)) == wide(matrices)).all()


def test_repacking_keeps_the_old_array_only_if_it_is_shared() -> None:
    words = mx.zeros((4096, 1024), mx.uint32) + 0x87654321
    mx.eval(words)
    mx.clear_cache()
    before = mx.get_active_memory()
    words = OPS.repack(words, 4)
    mx.eval(words)
    assert mx.get_active_memory() < before + words.nbytes // 2
    shared = words
    words = OPS.repack(words, 4, undo=True)
    assert int(words[0, 0]) == 0x87654321
    assert int(shared[0, 0]) != 0x87654321


@formats
def test_a_slice_of_an_array_can_be_a_matrix(format: Format, tmp_path) -> None:
    """Rows from the middle of an array, and tensors at odd offsets in a file."""
    full = case(format, 9, 160 if not format.bits else 256)
    x = random(np.random.default_rng(1), 3, full.weight.shape[1])
    expected = np.array(full.product(x))
    names = ("weight", "scales", "biases")[: len(full.parts)]
    # a file orders tensors by the size of their type or by name, so this shifts all offsets
    odd = {name: mx.zeros((3,), mx.uint8) for name in ("a", "n", "z")}
    mx.save_safetensors(
        str(tmp_path / "odd.safetensors"), {**odd, **dict(zip(names, full.parts, strict=True))}
    )
    loaded = mx.load(str(tmp_path / "odd.safetensors"))
    assert isinstance(loaded, dict)
    for parts in (full.parts, [loaded[name] for name in names]):
        rest = [part[1:] for part in parts]
        cut = make_product(format, *rest)
        assert (np.array(cut(x)) == expected[:, 1:]).all()


def test_a_matrix_that_is_not_row_major_is_refused() -> None:
    product = OPS.Matmul(mx.random.normal((48, 64)).T)
    with pytest.raises(RuntimeError, match="row after row"):
        mx.eval(product(mx.zeros((1, 48))))


def test_invalid_arguments_are_refused() -> None:
    f32, words = mx.zeros((4, 64)), mx.zeros((4, 8), mx.uint32)
    ones = mx.ones((4, 1))
    packed: dict[str, Any] = {"group_size": 64, "bits": 4}
    for wrong, arguments, named in [
        ((mx.zeros((4,)),), {}, "two axes"),
        ((mx.zeros((4, 0)),), {}, "columns"),
        ((words,), {}, "float32, bfloat16 or float16"),
        ((f32, ones, ones), packed, "uint32"),
        ((words, ones), packed, "scales and biases"),
        ((words, ones, ones), {"group_size": 16, "bits": 4}, "groups of 32, 64 or 128"),
        ((words, ones, ones), {"group_size": 64, "bits": 3}, "4 or 8 bits"),
        ((words, ones, ones), {**packed, "activations": 12}, "8, 16 or 24 bits"),
        ((words, mx.ones((4, 2)), ones), packed, "out, in / group"),
        ((words, ones, ones.astype(mx.float16)), packed, "one type"),
        ((f32, None, None, mx.zeros((5,))), {}, "bias"),
        ((f32, None, None, mx.zeros((4,), mx.float16)), {}, "bias"),
    ]:
        with pytest.raises(ValueError, match=named):
            OPS.Matmul(*wrong, **arguments)
    for wrong, bits in ((f32, 4), (words, 3), (mx.zeros((4,), mx.uint32), 4), (f32 > 0, 0)):
        with pytest.raises(ValueError, match=r"can be repacked|two axes"):
            OPS.repack(wrong, bits)
    for wrong in (ones[:, 0], f32 > 0):
        with pytest.raises(ValueError, match=r"scales must be|two axes"):
            OPS.repack_scales(wrong)
    with pytest.raises(ValueError, match="64 long"):
        OPS.Matmul(f32)(mx.zeros((2, 63)))
    with pytest.raises(ValueError, match="64 long"):
        OPS.Matmul(f32)(mx.array(1.0))
    with pytest.raises(ValueError, match="x must be float32"):
        OPS.Matmul(f32)(mx.zeros((2, 64), mx.int32))


@rows("format", [f for f in PACKED if f.dtype == mx.bfloat16], ids=str)
@rows("number", [0x7F7E7F, -0x7F7E80])
@rows("rows", [1, 3, 8])
def test_the_largest_integers_of_both_factors_do_not_overflow(
    format: Format, number: int, rows: int
) -> None:
    """The low bytes of the integers of x are 127 or -128, and all weights are the largest integer.
    Some instructions add products of bytes in 16 bits."""
    width, outputs = 2 * format.group, 48
    words = mx.full((outputs, width * format.bits // 32), 0xFFFFFFFF, dtype=mx.uint32)
    ones = mx.ones((outputs, 2), dtype=format.dtype)
    product = make_product(format, words, ones, mx.zeros_like(ones))
    most = MOST[format.activations]
    integer = max(-most, number >> (24 - format.activations))
    numbers = np.full((rows, width), integer, dtype=np.int64)
    numbers[:, :: format.group] = most  # it sets the scale: the integers are these numbers
    y = np.array(product(mx.array(numbers.astype(np.float32)))).astype(np.float64)
    expected = numbers.sum(axis=1, keepdims=True) * (2**format.bits - 1)
    assert np.abs(y - expected).max() <= 4 * EPS * np.abs(numbers).sum() * 2**format.bits
