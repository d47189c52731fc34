"""The SmolLM3 architecture: layers with and without RoPE."""

from typing import Any

import pytest

from models import architectures, smollm3
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models.architectures import Case
from tests.models.test_llama import TINY

SMOLLM3 = {**TINY, "model_type": "smollm3", "num_hidden_layers": 3}

CASES = [
    Case(name="interval", config={**SMOLLM3, "no_rope_layer_interval": 2}),
    Case(
        name="listed",
        config={**SMOLLM3, "no_rope_layers": [0, 1, 0], "tie_word_embeddings": True},
    ),
    Case(
        name="windowed",
        config={
            **SMOLLM3,
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        quantized=(),
    ),
]


def config(**keys: Any) -> smollm3.Config:
    return smollm3.Config.from_dict({**SMOLLM3, **keys})


def test_every_fourth_layer_has_no_rope_by_default() -> None:
    parsed = config(num_hidden_layers=8)
    assert [parsed.uses_rope(layer) for layer in range(8)] == [True, True, True, False] * 2


def test_the_window_applies_to_layers_without_rope() -> None:
    model = smollm3.Model(
        config(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=5)
    )
    assert [type(layer) for layer in model.make_kv()] == [KVCache, RotatingKVCache, KVCache]
    unused = smollm3.Model(config(no_rope_layers=[1, 0, 1], sliding_window=5))
    assert {type(layer) for layer in unused.make_kv()} == {KVCache}


def test_a_list_without_an_entry_per_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="no_rope_layers must have one entry per layer"):
        architectures.build({**SMOLLM3, "no_rope_layers": [1, 0]}, {})
