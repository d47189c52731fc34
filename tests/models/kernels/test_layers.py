"""Kernel layers: what mlx.nn's and our own layers compute, from the same arrays, in float32."""

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


def drawn(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def filled(layer: Any) -> Any:
    for name, array in layer.items():
        layer[name] = drawn(*array.shape, seed=len(name)) / 8
    return layer


def twin(layer: Any) -> Any:
    return layers.to_kernel_layer(
        layer, OPS, {**layers.KERNEL_LAYERS, **stacked_layers.STACKED_KERNEL_LAYERS}
    )


def in_float32(layer: Any) -> Any:
    """What the numbers that are stored mean, as MLX computes with them."""
    layer.set_dtype(mx.float32)
    return layer


def is_like(got: mx.array, wanted: mx.array) -> None:
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), np.array(wanted), atol=2e-5)


KINDS = [*PLAIN, *PACKED]


def of_kind(layer: Any, kind: Any) -> Any:
    layer = filled(layer)
    if isinstance(kind, tuple):
        layer.set_dtype(mx.bfloat16)
        return layer.to_quantized(kind[1], kind[0])
    layer.set_dtype(kind)
    return layer


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestATwinComputesTheSame:
    @pytest.mark.parametrize("bias", [False, True])
    def test_of_a_linear_layer(self, kind: Any, bias: bool) -> None:
        plain, x = of_kind(nn.Linear(WIDTH, OUT, bias=bias), kind), drawn(2, 3, WIDTH)
        made = twin(plain)
        assert made is not plain
        assert isinstance(made, type(plain))
        is_like(made(x), in_float32(plain)(x))

    def test_of_an_embedding_that_is_the_head_too(self, kind: Any) -> None:
        plain, x = of_kind(nn.Embedding(OUT, WIDTH), kind), drawn(2, WIDTH)
        made, ids = twin(plain), mx.array([[3, 0], [23, 3]])
        assert made is not plain
        in_float32(plain)
        is_like(made(ids), plain(ids))
        is_like(made.as_linear(x), plain.as_linear(x))

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("sorted_indices", [False, True])
    def test_of_experts(self, kind: Any, bias: bool, sorted_indices: bool) -> None:
        plain = of_kind(ExpertLinear(WIDTH, OUT, STACK, bias=bias), kind)
        made = twin(plain)
        assert made is not plain
        in_float32(plain)
        if sorted_indices:
            x, chosen = drawn(6, 1, WIDTH), mx.array([0, 0, 1, 3, 3, 4])
        else:
            x, chosen = drawn(2, 3, 1, 1, WIDTH), mx.array([[[1, 4], [0, 0], [2, 1]]] * 2)
        is_like(
            made(x, chosen, sorted_indices=sorted_indices),
            plain(x, chosen, sorted_indices=sorted_indices),
        )

    @pytest.mark.parametrize("heads", [1, STACK])
    def test_of_maps_for_each_head(self, kind: Any, heads: int) -> None:
        """Where one head is given, it is every head's; the way back is MLX's own."""
        plain, x = of_kind(MultiLinear(WIDTH, 64, STACK), kind), drawn(2, heads, 3, WIDTH)
        made = twin(plain)
        assert made is not plain
        in_float32(plain)
        is_like(made(x), plain(x))
        back = drawn(2, heads, 3, 64)
        is_like(made.apply_transposed(back), plain.apply_transposed(back))


def test_sorting_rows_by_experts_changes_no_bit() -> None:
    """What is worth it for MLX's products, the kernels do by themselves."""
    model = nn.Sequential(Experts(WIDTH, 32, STACK))
    for projection in ("gate_proj", "up_proj", "down_proj"):
        filled(model.layers[0][projection])
    apply_cpu_layout(model)
    experts: Any = model.layers[0]
    x, chosen = drawn(1, 40, WIDTH), mx.random.randint(0, STACK, (1, 40, 2), key=mx.random.key(0))
    one_by_one = experts._apply(x[..., None, None, :], chosen, sorted_indices=False)
    assert mx.array_equal(one_by_one, experts._apply_sorted(x, chosen))


def test_a_norm_takes_any_type() -> None:
    """What comes out of an embedding in mxfp4 is a bfloat16, and the first norm after it was
    refused."""
    plain, x = nn.RMSNorm(WIDTH), drawn(3, WIDTH).astype(mx.bfloat16)
    plain.weight = drawn(WIDTH)
    is_like(twin(plain)(x), plain(x.astype(mx.float32)))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_packings_stay_mlx_own(mode: str) -> None:
    group, bits = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    for plain in (nn.Linear(WIDTH, OUT), ExpertLinear(WIDTH, OUT, STACK)):
        packed = filled(plain).to_quantized(group, bits, mode=mode)
        assert twin(packed) is packed
    odd = filled(nn.Linear(WIDTH, OUT)).to_quantized(32, 3)
    assert twin(odd) is odd


class Custom(nn.Linear):
    pass


def test_a_class_of_its_own_computes_as_it_says() -> None:
    layer = Custom(WIDTH, OUT)
    assert twin(layer) is layer


def test_a_twin_has_the_names_and_nothing_to_train() -> None:
    for kind in (mx.bfloat16, (4, 32)):
        plain = of_kind(nn.Linear(WIDTH, OUT), kind)
        flat: Any = [tree_flatten(layer.parameters()) for layer in (plain, twin(plain))]
        assert [name for name, _ in flat[0]] == [name for name, _ in flat[1]]
        assert not twin(plain).trainable_parameters()


def test_a_weight_that_is_replaced_is_the_one_that_counts() -> None:
    """mlx-lm's gemma3n clips the weights of two layers at every call."""
    for kind in KINDS:
        made = twin(of_kind(nn.Linear(WIDTH, OUT), kind))
        other = of_kind(drawn_linear(seed=9), kind)
        for name, array in other.items():
            setattr(made, name, array)
        x = drawn(2, WIDTH)
        is_like(made(x), in_float32(other)(x))


def drawn_linear(*, seed: int) -> nn.Linear:
    layer = nn.Linear(WIDTH, OUT)
    layer.weight, layer.bias = drawn(OUT, WIDTH, seed=seed), mx.zeros((OUT,))
    return layer


def test_a_matrix_that_lies_otherwise_is_laid_out_when_it_is_read() -> None:
    plain = nn.Linear(WIDTH, OUT, bias=False)
    plain.weight = drawn(WIDTH, OUT).T
    is_like(twin(plain)(drawn(2, WIDTH)), plain(drawn(2, WIDTH)))


@pytest.mark.parametrize("activation", [nn.silu, nn.gelu, nn.gelu_approx, nn.relu, mx.tanh])
@pytest.mark.parametrize("kinds", [(mx.bfloat16, mx.bfloat16), (mx.bfloat16, (8, 64))], ids=str)
def test_a_gated_mlp_is_one_operation_or_several(activation: Any, kinds: Any) -> None:
    """Of a gate and what it gates in different packings, and of an activation that only MLX has."""
    mlp = GatedMLP(WIDTH, 64, activation=activation)
    for name, kind in zip(mlp.projection_names, (*kinds, mx.float32), strict=True):
        mlp[name] = of_kind(mlp[name], kind)
    model, x = nn.Sequential(mlp), drawn(3, WIDTH)
    wanted = activation(in_float32(mlp.gate_proj)(x)) * in_float32(mlp.up_proj)(x)
    for name, kind in zip(mlp.projection_names, kinds, strict=False):
        mlp[name] = of_kind(nn.Linear(WIDTH, 64, bias=False), kind)
    apply_cpu_layout(model)
    is_like(mlp.gate_up(x), wanted)


def test_shared_parts_take_the_kernels_where_types_allow() -> None:
    gate, up, weight = drawn(3, WIDTH), drawn(3, WIDTH, seed=1), drawn(OUT, WIDTH, seed=2)
    is_like(apply_glu(nn.silu, gate, up), nn.silu(gate) * up)
    halves = apply_glu(nn.silu, gate.astype(mx.bfloat16), up.astype(mx.bfloat16))
    assert halves.dtype == mx.bfloat16
    is_like(router_logits(gate, weight.T.T), gate @ weight.T)
    is_like(router_logits(gate, mx.contiguous(weight.T).T), gate @ weight.T)
