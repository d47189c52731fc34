"""Kernel layers agree with the layers that they replace, with the same arrays in float32."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import kernels
from models.cpu_layout import apply_cpu_layout
from models.experts import ExpertLinear, Experts
from models.kernels import layers, stacked_layers
from models.layers import GatedMLP, apply_glu, router_logits
from models.mla import MultiLinear

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

PLAIN, PACKED = (mx.float32, mx.bfloat16, mx.float16), ((4, 32), (4, 64), (8, 64), (8, 128))
WIDTH, OUT, STACK = 128, 24, 5


def draw_array(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def randomize(layer: Any) -> Any:
    for name, array in layer.items():
        layer[name] = draw_array(*array.shape, seed=len(name)) / 8
    return layer


def make_kernel_layer(layer: Any) -> Any:
    return layers.to_kernel_layer(
        layer, OPS, {**layers.KERNEL_LAYERS, **stacked_layers.STACKED_KERNEL_LAYERS}
    )


def to_float32(layer: Any) -> Any:
    """The same values in float32, for the reference result of MLX."""
    layer.set_dtype(mx.float32)
    return layer


def assert_close(got: mx.array, expected: mx.array) -> None:
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-5)


KINDS = [*PLAIN, *PACKED]


def convert(layer: Any, kind: Any) -> Any:
    layer = randomize(layer)
    if isinstance(kind, tuple):
        layer.set_dtype(mx.bfloat16)
        return layer.to_quantized(kind[1], kind[0])
    layer.set_dtype(kind)
    return layer


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestKernelLayersComputeTheSame:
    @pytest.mark.parametrize("bias", [False, True])
    def test_linear_layer(self, kind: Any, bias: bool) -> None:
        plain, x = convert(nn.Linear(WIDTH, OUT, bias=bias), kind), draw_array(2, 3, WIDTH)
        kernel = make_kernel_layer(plain)
        assert kernel is not plain
        assert isinstance(kernel, type(plain))
        assert_close(kernel(x), to_float32(plain)(x))

    def test_tied_embedding(self, kind: Any) -> None:
        plain, x = convert(nn.Embedding(OUT, WIDTH), kind), draw_array(2, WIDTH)
        kernel, ids = make_kernel_layer(plain), mx.array([[3, 0], [23, 3]])
        assert kernel is not plain
        to_float32(plain)
        assert_close(kernel(ids), plain(ids))
        assert_close(kernel.as_linear(x), plain.as_linear(x))

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("sorted_indices", [False, True])
    def test_experts(self, kind: Any, bias: bool, sorted_indices: bool) -> None:
        plain = convert(ExpertLinear(WIDTH, OUT, STACK, bias=bias), kind)
        kernel = make_kernel_layer(plain)
        assert kernel is not plain
        to_float32(plain)
        if sorted_indices:
            x, chosen = draw_array(6, 1, WIDTH), mx.array([0, 0, 1, 3, 3, 4])
        else:
            x, chosen = draw_array(2, 3, 1, 1, WIDTH), mx.array([[[1, 4], [0, 0], [2, 1]]] * 2)
        assert_close(
            kernel(x, chosen, sorted_indices=sorted_indices),
            plain(x, chosen, sorted_indices=sorted_indices),
        )

    @pytest.mark.parametrize("heads", [1, STACK])
    def test_maps_for_each_head(self, kind: Any, heads: int) -> None:
        """One head of x is broadcast to all heads; the transposed product is MLX's."""
        plain, x = convert(MultiLinear(WIDTH, 64, STACK), kind), draw_array(2, heads, 3, WIDTH)
        kernel = make_kernel_layer(plain)
        assert kernel is not plain
        to_float32(plain)
        assert_close(kernel(x), plain(x))
        back = draw_array(2, heads, 3, 64)
        assert_close(kernel.apply_transposed(back), plain.apply_transposed(back))


def test_sorting_rows_by_experts_changes_no_bits() -> None:
    """Sorting is an optimization for MLX's products; the kernels group rows themselves."""
    model = nn.Sequential(Experts(WIDTH, 32, STACK))
    for projection in ("gate_proj", "up_proj", "down_proj"):
        randomize(model.layers[0][projection])
    apply_cpu_layout(model)
    experts: Any = model.layers[0]
    x, chosen = (
        draw_array(1, 40, WIDTH),
        mx.random.randint(0, STACK, (1, 40, 2), key=mx.random.key(0)),
    )
    one_by_one = experts._apply(x[..., None, None, :], chosen, sorted_indices=False)
    assert mx.array_equal(one_by_one, experts._apply_sorted(x, chosen))


def test_a_norm_accepts_any_type() -> None:
    """An mxfp4 embedding returns bfloat16, which the next norm used to reject."""
    plain, x = nn.RMSNorm(WIDTH), draw_array(3, WIDTH).astype(mx.bfloat16)
    plain.weight = draw_array(WIDTH)
    assert_close(make_kernel_layer(plain)(x), plain(x.astype(mx.float32)))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_packings_keep_the_layers_of_mlx(mode: str) -> None:
    group, bits = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    for plain in (nn.Linear(WIDTH, OUT), ExpertLinear(WIDTH, OUT, STACK)):
        packed = randomize(plain).to_quantized(group, bits, mode=mode)
        assert make_kernel_layer(packed) is packed
    odd = randomize(nn.Linear(WIDTH, OUT)).to_quantized(32, 3)
    assert make_kernel_layer(odd) is odd


class Custom(nn.Linear):
    pass


def test_a_subclass_is_not_replaced() -> None:
    layer = Custom(WIDTH, OUT)
    assert make_kernel_layer(layer) is layer


def test_a_kernel_layer_has_the_same_names_and_no_trainable_parameters() -> None:
    for kind in (mx.bfloat16, (4, 32)):
        plain = convert(nn.Linear(WIDTH, OUT), kind)
        flat: Any = [
            tree_flatten(layer.parameters()) for layer in (plain, make_kernel_layer(plain))
        ]
        assert [name for name, _ in flat[0]] == [name for name, _ in flat[1]]
        assert not make_kernel_layer(plain).trainable_parameters()


def test_a_replaced_weight_is_used() -> None:
    """mlx-lm's gemma3n clips the weights of two layers in each call."""
    for kind in KINDS:
        kernel = make_kernel_layer(convert(nn.Linear(WIDTH, OUT), kind))
        other = convert(draw_linear(seed=9), kind)
        for name, array in other.items():
            setattr(kernel, name, array)
        x = draw_array(2, WIDTH)
        assert_close(kernel(x), to_float32(other)(x))


def draw_linear(*, seed: int) -> nn.Linear:
    layer = nn.Linear(WIDTH, OUT)
    layer.weight, layer.bias = draw_array(OUT, WIDTH, seed=seed), mx.zeros((OUT,))
    return layer


def test_a_transposed_matrix_is_repacked_when_it_is_read() -> None:
    plain = nn.Linear(WIDTH, OUT, bias=False)
    plain.weight = draw_array(WIDTH, OUT).T
    assert_close(make_kernel_layer(plain)(draw_array(2, WIDTH)), plain(draw_array(2, WIDTH)))


@pytest.mark.parametrize("activation", [nn.silu, nn.gelu, nn.gelu_approx, nn.relu, mx.tanh])
@pytest.mark.parametrize("kinds", [(mx.bfloat16, mx.bfloat16), (mx.bfloat16, (8, 64))], ids=str)
def test_a_gated_mlp_is_fused_or_not(activation: Any, kinds: Any) -> None:
    """Gate and up projections in different packings, and an activation that only MLX has."""
    mlp = GatedMLP(WIDTH, 64, activation=activation)
    for name, kind in zip(mlp.projection_names, (*kinds, mx.float32), strict=True):
        mlp[name] = convert(mlp[name], kind)
    model, x = nn.Sequential(mlp), draw_array(3, WIDTH)
    expected = activation(to_float32(mlp.gate_proj)(x)) * to_float32(mlp.up_proj)(x)
    for name, kind in zip(mlp.projection_names, kinds, strict=False):
        mlp[name] = convert(nn.Linear(WIDTH, 64, bias=False), kind)
    apply_cpu_layout(model)
    assert_close(mlp.gate_up(x), expected)


def test_shared_functions_use_the_kernels_for_supported_types() -> None:
    gate, up, weight = (
        draw_array(3, WIDTH),
        draw_array(3, WIDTH, seed=1),
        draw_array(OUT, WIDTH, seed=2),
    )
    assert_close(apply_glu(nn.silu, gate, up), nn.silu(gate) * up)
    halves = apply_glu(nn.silu, gate.astype(mx.bfloat16), up.astype(mx.bfloat16))
    assert halves.dtype == mx.bfloat16
    assert_close(router_logits(gate, weight.T.T), gate @ weight.T)
    assert_close(router_logits(gate, mx.contiguous(weight.T).T), gate @ weight.T)


def test_panels_begin_at_a_cache_line() -> None:
    raw = mx.zeros((OUT, 18 * WIDTH // 32), mx.uint8)  # blocks of Q4_0, type 2 of GGUF
    panels = [
        OPS.repack(draw_array(OUT, WIDTH)),
        OPS.repack(draw_array(OUT, WIDTH).view(mx.uint16)),
        OPS.repack(mx.zeros((OUT, WIDTH // 8), mx.uint32), 4),
        OPS.repack_scales(mx.zeros((OUT, WIDTH // 64), mx.uint16)),
        OPS.repack_blocks(raw, 2),
    ]
    for panel in panels:
        mx.eval(panel)
        assert np.asarray(panel).ctypes.data % 64 == 0
