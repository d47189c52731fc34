"""Models that people have: built from what is published of them, at full size, without a weight.

Tiny cases cannot tell that a key of a real config.json is misread, or a default assumed wrongly.
Nothing here is evaluated, so that 80 billion parameters take no memory.
"""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import models
from models.kv import KVBuffers, LayerCache
from models.recurrent import RecurrentCache
from models.rope import NoRope
from models.rotating_kv import RotatingKVCache
from tests.models.published import Published, periods, published


@pytest.fixture(scope="module", params=published(), ids=lambda found: found.name)
def known(request: pytest.FixtureRequest) -> Published:
    return request.param


@pytest.fixture(scope="module")
def model(known: Published) -> Any:
    """Building fails unless the checkpoint's tensors are the model's, by name and by shape."""
    return models.build(known.config, known.weights())


def test_the_context_and_the_vocabulary_are_read(known: Published) -> None:
    facts = models.read_info(known.config)
    assert (facts.context_length, facts.vocab_size) == (known.context, known.vocab)


def test_the_model_has_the_published_number_of_parameters(known: Published, model: Any) -> None:
    assert _parameters(model) == known.parameters


def test_each_layer_sees_as_far_as_published(known: Published, model: Any) -> None:
    assert "".join(map(_kind, model.model.layers)) == known.layers
    windows = {kv.window for kv in model.make_kv() if isinstance(kv, RotatingKVCache)}
    assert windows == ({known.window} if "s" in known.layers else set())


def test_each_layer_rotates_as_published(known: Published, model: Any) -> None:
    ropes = [
        (known.rope[kind], layer.self_attn.rope)
        for kind, layer in zip(known.layers, model.model.layers, strict=True)
        if kind in known.rope
    ]
    assert ropes
    for wanted, rope in ropes:
        assert rope.dims == wanted["dims"]
        assert rope.magnitude == pytest.approx(wanted["magnitude"], rel=1e-6)
        found = rope.periods.tolist()
        assert (found[0], found[-1]) == pytest.approx(periods(wanted), rel=1e-5)


def test_attention_and_norms_are_scaled_as_published(known: Published, model: Any) -> None:
    attends = [layer.self_attn for layer in model.model.layers if _kind(layer) != "r"]
    assert {layer.scale for layer in attends} == {known.attention_width**-0.5}
    assert model.model.norm.eps == known.eps


def test_a_token_is_evaluated_in_the_type_of_the_weights(known: Published, model: Any) -> None:
    hidden = model(mx.array([[0]]), model.make_kv())
    logits = model.logits(hidden)
    # no array in what is asserted: pytest would print it, and so evaluate the model
    types, shape = {hidden.dtype, logits.dtype}, logits.shape
    assert types == {mx.bfloat16}
    assert shape == (1, 1, known.vocab)


def test_caches_take_as_much_as_is_computed_by_hand(known: Published, model: Any) -> None:
    kv: list[LayerCache] = model.make_kv()
    model(mx.array([[0]]), kv)
    growing = sum(layer.position_bytes() for layer in kv if isinstance(layer, KVBuffers))
    fixed = sum(layer.nbytes for layer in kv if isinstance(layer, RecurrentCache))
    assert (growing, fixed) == (known.kv_bytes, known.state_bytes)


def _parameters(model: Any) -> int:
    """Packed ones one by one, what belongs to their packing not at all."""
    flat: Any = tree_flatten(model.parameters())
    arrays: dict[str, mx.array] = dict(flat)
    count = 0
    for name, array in arrays.items():
        path, _, kind = name.rpartition(".")
        if kind != "scales":
            packed = kind == "weight" and f"{path}.scales" in arrays
            # four bits each, in words of 32
            count += array.size * (8 if packed else 1)
    return count


def _kind(layer: Any) -> str:
    kv = layer.make_kv()
    if isinstance(kv, RecurrentCache):
        return "r"
    if isinstance(layer.self_attn.rope, NoRope):
        return "n"
    return "s" if isinstance(kv, RotatingKVCache) else "f"
