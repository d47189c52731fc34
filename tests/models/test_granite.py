"""Granite: the four factors."""

from typing import Any

import pytest

from models import architectures
from models.base import ModelError
from tests.models.architectures import Case
from tests.models.test_llama import TINY as LLAMA

TINY: dict[str, Any] = {
    **LLAMA,
    "model_type": "granite",
    # mlx-lm quantizes some matrices in groups of 64
    "intermediate_size": 128,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}

CASES = [
    Case(name="plain", config=TINY, quantized=("affine-4", "affine-8")),
    Case(
        name="biased",
        config={
            **TINY,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "residual_multiplier": 2.0,
        },
        quantized=(),
    ),
]


@pytest.mark.parametrize(
    "key",
    ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"],
)
@pytest.mark.parametrize("value", [0, -0.5])
def test_factors_must_be_positive(key: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"{key} is {value}, but must be above 0"):
        architectures.build({**TINY, key: value}, {})
