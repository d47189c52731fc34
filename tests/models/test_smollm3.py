"""The SmolLM3 architecture: layers that rotate and layers that do not."""

from typing import Any

import pytest

import models
from models import smollm3
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
        quantised=(),
    ),
]


def config(**keys: Any) -> smollm3.Config:
    return smollm3.Config.from_dict({**SMOLLM3, **keys})


def test_every_fourth_layer_does_not_rotate_unless_the_config_says_otherwise() -> None:
    made = config(num_hidden_layers=8)
    assert [made.uses_rope(layer) for layer in range(8)] == [True, True, True, False] * 2


def test_a_window_is_that_of_the_layers_that_do_not_rotate() -> None:
    made = smollm3.Model(
        config(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=5)
    )
    assert [type(layer) for layer in made.make_kv()] == [KVCache, RotatingKVCache, KVCache]
    unused = smollm3.Model(config(no_rope_layers=[1, 0, 1], sliding_window=5))
    assert {type(layer) for layer in unused.make_kv()} == {KVCache}


def test_a_list_that_leaves_out_a_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="no_rope_layers must have one entry per layer"):
        models.build({**SMOLLM3, "no_rope_layers": [1, 0]}, {})
