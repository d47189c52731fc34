"""Activations and caches have the type of the weights; with the CPU layout, they are float32.

One operation that returns float32 makes all following ones float32: caches are twice as large, and
on a GPU each product has half the speed. One operation that reduces the precision on a CPU loses
the precision of the kernels, and later layers do not use them. Types are known without evaluating
arrays.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from models.cpu_layout import apply_cpu_layout
from models.kernels import layers
from models.kv import KVBuffers, LayerCache
from models.recurrent import RecurrentCache
from tests.models.architectures import Case, build_untrained, cases
from tests.models.kernel_switch import BOTH, use_kernels
from tests.rows import rows

pytestmark = pytest.mark.recorded

# checkpoints have these in float32 and all other tensors in half precision
PRECISE = ("A_log", "dt_bias", "linear_attn.norm.weight", "_correction_bias", "expert_bias")

# one position; more than the limit for separate evaluation; enough to sort rows by experts
PIECES = (1, 40, 20, 1)


each_case = rows("case", cases(), ids=lambda case: case.id)
each_dtype = rows("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])


def build_model(case: Case, dtype: mx.Dtype) -> Any:
    model = build_untrained(case)
    flat: Any = tree_flatten(model.parameters())
    model.update(
        tree_unflatten([(name, a.astype(dtype)) for name, a in flat if not name.endswith(PRECISE)])
    )
    return model


@each_dtype
@each_case
def test_a_sequence_has_the_type_of_the_weights(case: Case, dtype: mx.Dtype) -> None:
    model = build_model(case, dtype)
    assert _evaluate_types(model, model.make_kv()) == {dtype}


@pytest.mark.parametrize("with_kernels", BOTH)
@each_dtype
@each_case
def test_a_cpu_computes_in_float32(case: Case, dtype: mx.Dtype, with_kernels: bool) -> None:
    model = build_model(case, dtype)
    with use_kernels(enabled=with_kernels):
        apply_cpu_layout(model)
        modules: Any = model.named_modules()
        # layers that the kernels support; other classes compute in float32
        kind = layers.KernelLinear if with_kernels else nn.Linear
        matrices = {layer.weight.dtype for _, layer in modules if isinstance(layer, kind)}
        assert matrices == {dtype if with_kernels else mx.float32}
        assert _evaluate_types(model, model.make_kv()) == {mx.float32}
    flat: Any = tree_flatten(model.parameters())
    assert {array.dtype for _, array in flat if array.ndim == 1} <= {mx.float32}


@each_dtype
@each_case
def test_rows_of_a_batch_have_the_type_of_the_weights(case: Case, dtype: mx.Dtype) -> None:
    model = build_model(case, dtype)
    sequences = [model.make_kv() for _ in range(3)]
    for length, kv in enumerate(sequences, start=1):
        model(mx.zeros((1, length), mx.int32), kv)
    together = [
        layers[0].make_batch(layers, mx.array([layer.offset for layer in layers]))
        for layers in zip(*sequences, strict=True)
    ]
    assert model(mx.zeros((3, 1), mx.int32), together).dtype == dtype
    assert {found for kv in sequences for found in _cache_types(kv)} <= {dtype}


def _evaluate_types(model: Any, kv: list[LayerCache]) -> set[mx.Dtype]:
    """Types of activations and caches, for chunks of all lengths in PIECES."""
    found: set[mx.Dtype] = set()
    for length in PIECES:
        hidden = model(mx.zeros((1, length), mx.int32), kv)
        found |= {hidden.dtype, model.logits(hidden).dtype}
    return found | _cache_types(kv)


def _cache_types(kv: list[LayerCache]) -> set[mx.Dtype]:
    """Types of KV buffers and of convolution tails. The state of the delta rule, the second of two
    slots, is always float32."""
    found: set[mx.Dtype] = set()
    for layer in kv:
        arrays = layer.state() if isinstance(layer, KVBuffers) else []
        if isinstance(layer, RecurrentCache):
            tail, *states = layer.state()
            assert all(state.dtype == mx.float32 for state in states)
            arrays = [tail]
        found |= {array.dtype for array in arrays}
    return found
