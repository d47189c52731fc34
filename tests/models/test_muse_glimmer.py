"""Muse Glimmer: gated attention, norms without weights, and layers without rotary positions."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY
from tests.models.test_qwen3_moe import IDS, read_weights

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
TEXT: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "rope_theta"},
    "model_type": "muse_glimmer_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 5,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "layer_rope_theta": [500000.0] * 3 + [0],
    "rope_parameters": ROPE,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 2.0,
    "post_norm_eps": 1e-8,
}
CONFIG: dict[str, Any] = {
    "model_type": "muse_glimmer",
    "text_config": TEXT,
    "vision_config": {"model_type": "muse_glimmer_vision", "hidden_size": 8},
    "out_hidden_size": 32,
    "projector_hidden_size": 16,
    "tie_word_embeddings": False,
}

CASES = [
    Case(
        name="plain",
        config={**TEXT, "model_type": "muse_glimmer"},
        quantized=("affine-4", "affine-8"),
        transformers=False,
        why="It has no class of the text model alone.",
    ),
    Case(name="multimodal", config=CONFIG, quantized=()),
]


def test_the_kinds_of_layers_are_counted_from_the_last_one(tmp_path: Path) -> None:
    """As in transformers. The reference counts from the first one, so there are four."""
    parity.save_reference(CASES[0], tmp_path)
    lacking = {
        key: value for key, value in TEXT.items() if key not in ("layer_types", "layer_rope_theta")
    }
    np.testing.assert_array_equal(
        parity.prefill(architectures.build(lacking, read_weights(tmp_path)), IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )
    shorter = architectures.build(
        {**lacking, "num_hidden_layers": 3},
        {
            name.replace("layers.3.", "layers.2."): array
            for name, array in read_weights(tmp_path).items()
            if ".layers.2." not in name
        },
    )
    kinds = [type(layer).__name__ for layer in shorter.make_kv()]
    assert kinds == ["RotatingKVCache", "RotatingKVCache", "KVCache"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_rope_theta": [0, 0]}, "layer_rope_theta must have one entry per layer"),
        ({"layer_rope_theta": [500000.0, 7.0, 0, 0]}, "layer_rope_theta has 7.0, but only 0"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TEXT, **change}, {})


def test_the_offset_of_norms_is_added_once(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    model: Any = parity.load_model(tmp_path)
    stored = read_weights(tmp_path)
    own = model.model.layers[0]
    assert mx.array_equal(
        own.input_layernorm.weight, stored["model.layers.0.input_layernorm.weight"] + 1
    ).item()
    assert mx.array_equal(model.model.norm.weight, stored["model.norm.weight"]).item()
