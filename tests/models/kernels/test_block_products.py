"""Products with the block types of GGUF: exact weights, and bits that depend only on the row."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import kernels
from models.cpu_layout import (
    apply_cpu_layout,
    get_activation_bits,
    is_batch_invariant,
    set_activation_bits,
)
from models.experts import ExpertLinear
from models.gguf.blocks import _DECODERS, dequantize
from models.gguf.ggml_types import GGML_TYPES
from models.gguf.layers import replace_with_gguf_layers
from models.kernels.block_layers import KernelGgufEmbedding, KernelGgufLinear
from models.layers import GatedMLP
from tests.models.gguf.random_blocks import IDS, NAMES, SCALES, make_blocks, store_blocks
from tests.models.kernels.test_isa import list_supported_isas, run_program

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")
each_type = pytest.mark.parametrize("name", NAMES)


def widths(name: str) -> tuple[int, ...]:
    """Short rows, and rows with a partial chunk if the type allows it."""
    return (32, 576) if GGML_TYPES[IDS[name]].elements == 32 else (256, 768)


def make_matmul(name: str, raw: mx.array, **options: Any) -> Any:
    kind = GGML_TYPES[IDS[name]]
    return OPS.Matmul.from_blocks(
        OPS.repack_blocks(raw, IDS[name]),
        type_id=IDS[name],
        outputs=raw.shape[-2],
        inputs=raw.shape[-1] // kind.nbytes * kind.elements,
        **options,
    )


def draw_input(*shape: int, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@each_type
def test_weights_are_bit_identical_to_dequantized_blocks(name: str) -> None:
    for width in widths(name):
        for rows in (1, 16, 21):
            raw = make_blocks(IDS[name], rows, width)
            found = make_matmul(name, raw).dequantize_rows(mx.arange(rows))
            assert mx.array_equal(found, dequantize(raw, IDS[name]))


@each_type
def test_the_memory_of_a_matrix_is_that_of_the_file(name: str) -> None:
    raw = make_blocks(IDS[name], 32, 512)
    assert OPS.repack_blocks(raw, IDS[name]).nbytes <= 1.04 * raw.nbytes


@each_type
@pytest.mark.parametrize(("activations", "error"), [(24, 1e-6), (16, 1e-4), (8, 1e-2)])
def test_products_agree_with_float64(name: str, activations: int, error: float) -> None:
    for width in widths(name):
        raw, x, bias = make_blocks(IDS[name], 45, width), draw_input(9, width), draw_input(45)
        y = np.array(make_matmul(name, raw, bias=bias, activations=activations)(x))
        weights = np.array(dequantize(raw, IDS[name])).astype(np.float64)
        exact = np.array(x).astype(np.float64) @ weights.T + np.array(bias)
        assert np.abs(y - exact).max() <= error * np.abs(exact).max()


@each_type
@pytest.mark.parametrize("activations", [24, 16, 8])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_in_any_order(
    name: str, activations: int
) -> None:
    width = widths(name)[1]
    matmul = make_matmul(name, make_blocks(IDS[name], 37, width), activations=activations)
    x = draw_input(40, width)
    y = np.array(matmul(x))
    for cut in range(1, 40):  # sizes of batches with few and with many rows
        parts = [np.array(matmul(part)) for part in (x[:cut], x[cut:])]
        assert np.array_equal(np.concatenate(parts), y)
    order = np.random.default_rng(2).permutation(40)
    assert np.array_equal(np.array(matmul(x[mx.array(order)])), y[order])


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_products_with_integer_scales_have_the_bits_of_their_definition(
    name: str,
) -> None:
    raw, x = make_blocks(IDS[name], 21, 768), draw_input(2, 768)
    x[0, 256:512] = 0.0
    y = make_matmul(name, raw, activations=16)(x)
    assert np.array_equal(np.array(y), multiply_by_definition(name, raw, x))


def multiply_by_definition(name: str, raw: mx.array, x: mx.array) -> np.ndarray:
    """The sums of matmul_block_integers.hpp."""
    kind = GGML_TYPES[IDS[name]]
    blocks = np.array(raw).reshape(-1, kind.nbytes)
    first, *rest = (blocks[:, i : i + 2].copy().view(np.float16) for i in SCALES[kind.id])
    d, negative_dmin = (
        part.astype(np.float32).reshape(21, -1) for part in (first, -(rest or [first])[0])
    )
    found = _DECODERS[kind.id](mx.array(blocks))
    codes = np.array(found.codes.astype(mx.int64)) - found.offset
    groups = codes.shape[1]
    codes = codes.reshape(21, -1, groups, 256 // groups)
    small = np.rint(np.array(found.scales).reshape(21, -1, groups) / d[..., None]).astype(np.int64)
    limit = np.float32(0x7F7F)
    y = np.zeros((2, 21), np.float32)
    for chunk, numbers in enumerate(np.array(x).reshape(2, -1, 256).swapaxes(0, 1)):
        size = np.abs(numbers).max(axis=1, keepdims=True)
        inverse = np.divide(limit, size, out=np.zeros_like(size), where=size > 0)
        integers = np.rint(numbers * inverse).astype(np.int64).reshape(2, 1, groups, -1)
        products = (codes[:, chunk] * integers).sum(axis=-1) * small[:, chunk]
        assert np.abs(products).max() < 1 << 31
        total = np.zeros((2, 21), np.float32)
        for group in range(groups):
            total += products[..., group].astype(np.float32)
        total *= d[:, chunk]
        if found.biases is not None:
            minima = np.array(found.biases).reshape(21, -1, groups)[:, chunk]
            minima = np.rint(minima / negative_dmin[:, chunk, None]).astype(np.int64)
            sums = (minima * integers.sum(axis=-1)).sum(axis=-1).astype(np.float32)
            total = add_product(total, negative_dmin[:, chunk], sums)
        y = add_product(y, total, size / limit)
    return y


def add_product(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """total + a * b, rounded once."""
    exact = total.astype(np.longdouble) + a.astype(np.longdouble) * b.astype(np.longdouble)
    return exact.astype(np.float32)


@each_type
def test_the_number_of_threads_does_not_change_bits(name: str) -> None:
    matmul, before = make_matmul(name, make_blocks(IDS[name], 1040, 512)), OPS.num_threads()
    x = draw_input(9, 512)
    found: list[mx.array] = []
    try:
        for threads in (1, 2, 3):
            OPS.set_num_threads(threads)
            found.append(matmul(x))
            mx.eval(found)
    finally:
        OPS.set_num_threads(before)
    assert all(mx.array_equal(one, found[0]) for one in found)


@each_type
def test_a_stack_has_the_same_bits_as_its_matrices(name: str) -> None:
    raw, x = make_blocks(IDS[name], 3, 21, 256), draw_input(5, 1, 256)
    chosen = mx.array([[0, 2], [1, 1], [2, 0], [0, 1], [2, 1]])
    found = make_matmul(name, raw).gather(x[:, None], chosen)
    for i in range(5):
        for j in range(2):
            one = make_matmul(name, raw[chosen[i, j].item()])
            assert mx.array_equal(found[i, j], one(x[i]))


# one line: the instruction set in use, and a hash of products of all types
PROGRAM = """
import hashlib
import mlx.core as mx
import numpy as np
from models.kernels import ops
from models.gguf.ggml_types import GGML_TYPES
from tests.models.gguf.random_blocks import IDS, make_blocks
k, digest = ops(), hashlib.sha256()
for name, type_id in IDS.items():
    for width in (256, 320, 768):
        if width % GGML_TYPES[type_id].elements:
            continue
        panels = k.repack_blocks(make_blocks(type_id, 45, width), type_id)
        for activations in (24, 16, 8):
            matmul = k.Matmul.from_blocks(
                panels, type_id=type_id, outputs=45, inputs=width, activations=activations
            )
            for rows in (1, 3, 7, 13, 40):
                x = np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)
                digest.update(np.array(matmul(mx.array(x))).tobytes())
            digest.update(np.array(matmul.dequantize_rows(mx.array([0, 44]))).tobytes())
print(k.isa(), digest.hexdigest())
"""


@pytest.mark.recorded
def test_instruction_sets_with_fused_multiply_add_give_the_same_bits() -> None:
    supported = [isa for isa in list_supported_isas() if isa != "scalar"]
    lines = {isa: run_program(isa, PROGRAM).stdout.split() for isa in supported}
    assert [line[0] for line in lines.values()] == supported
    assert len({line[1] for line in lines.values()}) <= 1


def test_every_machine_has_the_scalar_instruction_set() -> None:
    done = run_program("scalar", PROGRAM)
    assert done.stdout.startswith("scalar "), done.stderr


class Model(nn.Module):
    """All layers that can have blocks."""

    batch_invariant = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 256)
        self.mlp = GatedMLP(256, 512)
        self.experts = ExpertLinear(256, 24, 3)
        self.head = nn.Linear(256, 21, bias=True)

    def __call__(self, ids: mx.array, expert_ids: mx.array) -> list[mx.array]:
        x = self.mlp(self.embed(ids))
        return [self.embed.as_linear(x), self.head(x), self.experts(x[:, None, None], expert_ids)]


def make_model(name: str) -> Model:
    model = Model()
    shapes = {"embed": (40, 256), "experts": (3, 24, 256), "head": (21, 256)}
    shapes |= {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    stored = [store_blocks(IDS[name], *shape, seed=i) for i, shape in enumerate(shapes.values())]
    weights = {f"{path}.weight": one.weight for path, one in zip(shapes, stored, strict=True)}
    assert replace_with_gguf_layers(model, weights, stored)
    model.load_weights([*weights.items(), ("head.bias", draw_input(21))])
    return model


@each_type
def test_kernel_layers_compute_the_same_as_dequantized_layers(name: str) -> None:
    model, ids, experts = make_model(name), mx.array([3, 39, 0]), mx.array([[0, 2], [1, 1], [2, 0]])
    expected = model(ids, experts)
    apply_cpu_layout(model)
    assert isinstance(model.embed, KernelGgufEmbedding)
    found = model(ids, experts)
    for one, other in zip(found, expected, strict=True):
        size = float(np.abs(np.array(other)).max())
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5 * size)


def test_a_model_with_blocks_is_batch_invariant_and_has_activation_bits() -> None:
    model: Any = make_model("Q4_K")
    assert not is_batch_invariant(model)
    apply_cpu_layout(model)
    assert is_batch_invariant(model)
    assert get_activation_bits(model) == 24
    before = model.head(draw_input(2, 256))
    set_activation_bits(model, 8)
    assert get_activation_bits(model) == 8
    assert not mx.array_equal(model.head(draw_input(2, 256)), before)


def test_the_weight_of_a_kernel_layer_is_dequantized_and_can_be_replaced_by_blocks() -> None:
    model: Any = make_model("Q6_K")
    apply_cpu_layout(model)
    assert isinstance(model.head, KernelGgufLinear)
    raw = make_blocks(IDS["Q6_K"], 21, 256, seed=9)
    model.head.weight = raw
    assert mx.array_equal(model.head.weight, dequantize(raw, IDS["Q6_K"]))
    x = draw_input(1, 256)
    assert mx.array_equal(model.head(x), make_matmul("Q6_K", raw, bias=draw_input(21))(x))


def test_shapes_and_types_are_checked() -> None:
    raw = make_blocks(IDS["Q4_K"], 21, 256)
    panels = OPS.repack_blocks(raw, IDS["Q4_K"])
    for type_id, outputs, inputs in ((12, 33, 256), (12, 21, 512), (12, 21, 64), (8, 21, 256)):
        with pytest.raises(ValueError, match="repack_blocks"):
            OPS.Matmul.from_blocks(panels, type_id=type_id, outputs=outputs, inputs=inputs)
    with pytest.raises(ValueError, match="whole blocks"):
        OPS.repack_blocks(raw[:, :-1], IDS["Q4_K"])
    with pytest.raises(ValueError, match="no block type has the number 16"):
        OPS.repack_blocks(raw, 16)
    with pytest.raises(ValueError, match="uint8"):
        OPS.repack_blocks(raw.astype(mx.float32), IDS["Q4_K"])
    with pytest.raises(ValueError, match="8, 16 or 24"):
        make_matmul("Q4_K", raw, activations=12)
    with pytest.raises(ValueError, match="a bias"):
        make_matmul("Q4_K", raw, bias=draw_input(22))
