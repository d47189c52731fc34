"""Activations and caches have the type of the weights; of a model that is suited to a CPU, float32.

One operation that makes a float32 of what passes through makes all that follows float32: caches
twice as large, and on a GPU every product of half the speed. One that makes less of what a CPU
computes in float32 loses what the kernels keep, and leaves their way. Types are known without
evaluating anything.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

import models
from models.cpu_layout import apply_cpu_layout
from models.kernels import layers
from models.kv import KVBuffers, LayerCache
from models.multimodal import get_text_config
from models.recurrent import RecurrentCache
from tests.models.architectures import Case, cases
from tests.models.switched import BOTH, computing

# checkpoints keep these in float32 while everything else is in less
PRECISE = ("A_log", "dt_bias", "linear_attn.norm.weight", "_correction_bias", "expert_bias")

# one position, more than are worked off one by one, enough to sort rows by experts
PIECES = (1, 40, 20, 1)


@pytest.fixture(scope="module", params=cases(), ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=[mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> mx.Dtype:
    return request.param


@pytest.fixture
def model(case: Case, dtype: mx.Dtype) -> Any:
    config = get_text_config(case.config)
    architecture = models._find_architecture(config)
    made = architecture.Model(architecture.Config.from_dict(config))
    flat: Any = tree_flatten(made.parameters())
    made.update(
        tree_unflatten([(name, a.astype(dtype)) for name, a in flat if not name.endswith(PRECISE)])
    )
    return made


def test_a_sequence_keeps_the_type_of_the_weights(model: Any, dtype: mx.Dtype) -> None:
    assert _met(model, model.make_kv()) == {dtype}


@pytest.mark.parametrize("by_kernels", BOTH)
def test_a_cpu_computes_in_float32(model: Any, dtype: mx.Dtype, by_kernels: bool) -> None:
    with computing(by_kernels=by_kernels):
        apply_cpu_layout(model)
        modules: Any = model.named_modules()
        # of those that the kernels know: a class of its own computes as it says, in float32
        kind = layers.KernelLinear if by_kernels else nn.Linear
        matrices = {layer.weight.dtype for _, layer in modules if isinstance(layer, kind)}
        assert matrices == {dtype if by_kernels else mx.float32}
        assert _met(model, model.make_kv()) == {mx.float32}
    flat: Any = tree_flatten(model.parameters())
    assert {array.dtype for _, array in flat if array.ndim == 1} <= {mx.float32}


def test_rows_of_a_batch_keep_the_type_of_the_weights(model: Any, dtype: mx.Dtype) -> None:
    rows = [model.make_kv() for _ in range(3)]
    for length, kv in enumerate(rows, start=1):
        model(mx.zeros((1, length), mx.int32), kv)
    together = [
        layers[0].make_batch(layers, mx.array([layer.offset for layer in layers]))
        for layers in zip(*rows, strict=True)
    ]
    assert model(mx.zeros((3, 1), mx.int32), together).dtype == dtype
    assert {found for kv in rows for found in _types(kv)} <= {dtype}


def _met(model: Any, kv: list[LayerCache]) -> set[mx.Dtype]:
    """What passes through and stays behind, in pieces of all kinds."""
    found: set[mx.Dtype] = set()
    for length in PIECES:
        hidden = model(mx.zeros((1, length), mx.int32), kv)
        found |= {hidden.dtype, model.logits(hidden).dtype}
    return found | _types(kv)


def _types(kv: list[LayerCache]) -> set[mx.Dtype]:
    """Of all that grows with a sequence, and of convolutions' tails. The state of the delta rule,
    the second slot of two, is in float32 always."""
    found: set[mx.Dtype] = set()
    for layer in kv:
        arrays = layer.state() if isinstance(layer, KVBuffers) else []
        if isinstance(layer, RecurrentCache):
            tail, *states = layer.state()
            assert all(state.dtype == mx.float32 for state in states)
            arrays = [tail]
        found |= {array.dtype for array in arrays}
    return found
