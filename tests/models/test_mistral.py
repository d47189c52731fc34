"""The Mistral architecture: windows of layers, and the text part of Pixtral."""

from typing import Any

import numpy as np
import pytest

from models import architectures, mistral
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models import reference
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY, draw_weights, logits

MISTRAL = {**TINY, "model_type": "mistral", "head_dim": 32}
LAYERS = ["full_attention", "sliding_attention"]

CASES = [
    Case(name="plain", config={**MISTRAL, "sliding_window": None}),
    # mlx-lm has windows only if layer_types names them
    Case(
        name="windowed",
        config={**MISTRAL, "sliding_window": 5, "layer_types": LAYERS},
        quantized=(),
        transformers=False,
        why="Its Mistral has the window in all layers or in none.",
    ),
    Case(
        name="multimodal",
        config={
            "model_type": "pixtral",
            "text_config": {**TINY, "model_type": "mistral", "num_attention_heads": 4},
            "vision_config": {"model_type": "pixtral", "hidden_size": 8},
        },
        transformers=False,
        why="It calls the whole llava, and pixtral the part that sees.",
    ),
    Case(
        name="of-mistral",
        config={
            "model_type": "mistral3",
            "text_config": {**TINY, "model_type": "mistral", "head_dim": 32},
            "vision_config": {"model_type": "pixtral", "hidden_size": 8},
        },
    ),
]


def kinds(config: dict[str, Any]) -> list[type]:
    model = mistral.Model(mistral.Config.from_dict(config))
    return [type(layer) for layer in model.make_kv()]


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [2, 1, 6]])
def test_a_window_without_layer_types_applies_to_all_layers(chunks: list[int]) -> None:
    """As in Mistral 7B v0.1. mlx-lm's class has full attention for this config; the published code
    has the window."""
    config = {**MISTRAL, "head_dim": 16, "sliding_window": 4, "vocab_size": 256}
    weights = draw_weights(config)
    exact = {name: np.array(array).astype(np.float64) for name, array in weights.items()}
    expected = reference.llama(config, exact, IDS)
    np.testing.assert_allclose(
        logits(architectures.build(config, weights), IDS, chunks), expected, atol=1e-4
    )
    unbounded = reference.llama({**config, "sliding_window": None}, exact, IDS)
    assert not np.allclose(expected, unbounded, atol=1e-2)


def test_only_windowed_layers_have_rotating_caches() -> None:
    window = {"sliding_window": 4}
    assert kinds(MISTRAL) == [KVCache, KVCache]
    assert kinds({**MISTRAL, **window}) == [RotatingKVCache, RotatingKVCache]
    assert kinds({**MISTRAL, **window, "layer_types": LAYERS}) == [KVCache, RotatingKVCache]


def test_a_window_as_long_as_the_context_is_ignored() -> None:
    assert kinds({**MISTRAL, "sliding_window": 512}) == [KVCache, KVCache]
    assert kinds({**MISTRAL, "sliding_window": 511}) == [RotatingKVCache, RotatingKVCache]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": LAYERS}, "sliding_window is None"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"layer_types": ["full_attention"]}, "layer_types must have one entry per layer"),
        ({"layer_types": ["chunked_attention"] * 2}, "type 'chunked_attention' is not supported"),
    ],
)
def test_invalid_layer_types_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**MISTRAL, **keys}, {})


def test_ministral_is_mistral_with_explicit_layer_types() -> None:
    config = {**MISTRAL, "sliding_window": 4, "layer_types": LAYERS, "vocab_size": 256}
    weights = draw_weights(config)
    np.testing.assert_array_equal(
        logits(architectures.build({**config, "model_type": "ministral"}, weights), IDS),
        logits(architectures.build(config, weights), IDS),
    )


def test_pixtral_defaults_to_thirty_two_heads() -> None:
    config = {key: value for key, value in MISTRAL.items() if key != "num_attention_heads"}
    assert mistral.Config.from_dict(config).num_attention_heads == 32
