"""Published models at full size, built from configs and tensor shapes without weights.

Tiny cases do not detect a misread key of a real config.json, or a wrong default. No array is
evaluated, so 80 billion parameters take no memory.
"""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from models import architectures
from models.kv import KVBuffers, LayerCache
from models.recurrent import RecurrentCache
from models.rope import NoRope
from models.rotating_kv import RotatingKVCache
from tests.models.published import Published, load_published, periods


@pytest.fixture(scope="module", params=load_published(), ids=lambda found: found.name)
def checkpoint(request: pytest.FixtureRequest) -> Published:
    return request.param


@pytest.fixture(scope="module")
def model(checkpoint: Published) -> Any:
    """The build fails unless the tensors of checkpoint and model have equal names and shapes. Those
    of vision towers are not recorded."""
    return architectures.build(checkpoint.config, checkpoint.weights(), vision=False)


def test_the_context_and_the_vocabulary_are_read(checkpoint: Published) -> None:
    facts = architectures.read_info(checkpoint.config)
    assert (facts.context_length, facts.vocab_size) == (checkpoint.context, checkpoint.vocab)


def test_the_model_has_the_published_number_of_parameters(
    checkpoint: Published, model: Any
) -> None:
    assert _parameters(model) == checkpoint.parameters


def test_each_layer_has_the_published_window(checkpoint: Published, model: Any) -> None:
    assert "".join(map(_kind, model.model.layers)) == checkpoint.layers
    windows = {kv.window for kv in model.make_kv() if isinstance(kv, RotatingKVCache)}
    assert windows == ({checkpoint.window} if "s" in checkpoint.layers else set())


def test_each_layer_rotates_as_published(checkpoint: Published, model: Any) -> None:
    ropes = [
        (checkpoint.rope[kind], layer.self_attn.rope)
        for kind, layer in zip(checkpoint.layers, model.model.layers, strict=True)
        if kind in checkpoint.rope
    ]
    assert ropes
    for expected, rope in ropes:
        assert rope.dims == expected["dims"]
        assert rope.magnitude == pytest.approx(expected["magnitude"], rel=1e-6)
        found = rope.periods.tolist()
        assert (found[0], found[-1]) == pytest.approx(periods(expected), rel=1e-5)


def test_attention_and_norms_are_scaled_as_published(checkpoint: Published, model: Any) -> None:
    attends = [layer.self_attn for layer in model.model.layers if _kind(layer) != "r"]
    assert {layer.scale for layer in attends} == {checkpoint.attention_width**-0.5}
    assert model.model.norm.eps == checkpoint.eps


def test_a_token_is_evaluated_in_the_type_of_the_weights(checkpoint: Published, model: Any) -> None:
    hidden = model(mx.array([[0]]), model.make_kv())
    logits = model.logits(hidden)
    # no array in the assertion: pytest would print it, and so evaluate the model
    types, shape = {hidden.dtype, logits.dtype}, logits.shape
    assert types == {mx.bfloat16}
    assert shape == (1, 1, checkpoint.vocab)


def test_caches_have_the_size_computed_by_hand(checkpoint: Published, model: Any) -> None:
    kv: list[LayerCache] = model.make_kv()
    model(mx.array([[0]]), kv)
    growing = sum(layer.position_bytes() for layer in kv if isinstance(layer, KVBuffers))
    fixed = sum(layer.nbytes for layer in kv if isinstance(layer, RecurrentCache))
    assert (growing, fixed) == (checkpoint.kv_bytes, checkpoint.state_bytes)


def _parameters(model: Any) -> int:
    """Number of parameters. Packed values count singly; scales and biases of packings do not."""
    flat: Any = tree_flatten(model.parameters())
    arrays: dict[str, mx.array] = dict(flat)
    count = 0
    for name, array in arrays.items():
        path, _, kind = name.rpartition(".")
        if kind != "scales":
            packed = kind == "weight" and f"{path}.scales" in arrays
            # four bits each, in 32-bit words
            count += array.size * (8 if packed else 1)
    return count


def _kind(layer: Any) -> str:
    kv = layer.make_kv()
    if isinstance(kv, RecurrentCache):
        return "r"
    if isinstance(layer.self_attn.rope, NoRope):
        return "n"
    return "s" if isinstance(kv, RotatingKVCache) else "f"
