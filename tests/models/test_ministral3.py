"""The Ministral 3 architecture: queries are scaled by their position."""

from typing import Any

import pytest

from models import architectures
from models.base import ModelError
from tests.models.architectures import Case
from tests.models.test_llama import TINY

ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
MINISTRAL3 = {
    **{key: value for key, value in TINY.items() if key != "rope_theta"},
    "model_type": "ministral3",
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_parameters": ROPE,
}

CASES = [
    Case(name="plain", config=MINISTRAL3),
    Case(
        name="windowed",
        config={
            **MINISTRAL3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        quantized=(),
        transformers=False,
        why="Its Ministral 3 has the window in all layers or in none.",
    ),
    Case(
        name="of-ministral3",
        config={
            "model_type": "mistral3",
            "text_config": {**MINISTRAL3, "tie_word_embeddings": True},
            "vision_config": {"model_type": "pixtral", "hidden_size": 8},
        },
    ),
]


@pytest.mark.parametrize("key", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_a_config_without_the_scaling_keys_is_refused(key: str) -> None:
    rope: dict[str, Any] = {name: value for name, value in ROPE.items() if name != key}
    with pytest.raises(ModelError, match=f"lacks '{key}'"):
        architectures.build({**MINISTRAL3, "rope_parameters": rope}, {})


@pytest.mark.parametrize(("beta", "length"), [("0.1", 8), (0.1, 0)])
def test_invalid_scaling_values_are_refused(beta: Any, length: int) -> None:
    rope = {**ROPE, "llama_4_scaling_beta": beta, "original_max_position_embeddings": length}
    message = (
        f"llama_4_scaling_beta {beta!r} with original_max_position_embeddings {length} is invalid"
    )
    with pytest.raises(ModelError, match=message):
        architectures.build({**MINISTRAL3, "rope_parameters": rope}, {})
