"""Gemma 3: its config keys, and the tensors of the text part."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import architectures, gemma3
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 24,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
WHOLE: dict[str, Any] = {
    "model_type": "gemma3",
    "vocab_size": 101,
    "text_config": {**TINY, "rope_scaling": LINEAR},
    "vision_config": {"hidden_size": 8, "model_type": "siglip_vision_model"},
}

CASES = [
    Case(name="plain", config=TINY, quantized=("affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")),
    Case(name="stretched", config={**TINY, "rope_scaling": LINEAR}),
    Case(
        name="scaled-by-a-bfloat16",
        config={**TINY, "hidden_size": 96},
        transformers=False,
        why="It scales embeddings by sqrt(96) in float32, mlx-lm by the nearest bfloat16.",
    ),
    Case(name="multimodal", config=WHOLE),
]

# the complete text_config of google/gemma-3-4b-it
PUBLISHED: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def draw_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random tensors with the names of the text part."""
    names = dict(config, tie_word_embeddings=True)
    flat: Any = tree_flatten(gemma3.Model(gemma3.Config.from_dict(names)).parameters())
    rng = np.random.default_rng(seed)
    return {
        name: mx.array((rng.standard_normal(array.shape) * array.shape[-1] ** -0.5).astype("f4"))
        for name, array in flat
    }


def logits(config: dict[str, Any], weights: dict[str, mx.array]) -> np.ndarray:
    prompt = np.random.default_rng(1).integers(0, 101, 23).tolist()
    return parity.prefill(architectures.build(config, dict(weights), vision=False), prompt, [23])


def test_defaults_complete_a_published_config() -> None:
    config = gemma3.Config.from_dict(PUBLISHED["text_config"])
    assert (config.num_attention_heads, config.kv_heads, config.head_size) == (8, 4, 256)
    assert (config.query_pre_attn_scalar, config.rms_norm_eps) == (256, 1e-6)
    assert (config.final_logit_softcapping, config.attn_logit_softcapping) == (None, None)
    assert architectures.read_info(PUBLISHED) == architectures.ModelInfo(
        context_length=131072, vocab_size=262208
    )
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    assert windows == [None if layer % 6 == 5 else 1024 for layer in range(34)]


def test_every_nth_layer_has_full_attention() -> None:
    kinds = [type(layer) for layer in architectures.build(TINY, draw_weights(TINY)).make_kv()]
    assert kinds == [RotatingKVCache, RotatingKVCache, KVCache, RotatingKVCache]


def test_layer_types_override_the_pattern() -> None:
    types = ["full_attention", *["sliding_attention"] * 3]
    kinds = [
        type(kv)
        for kv in architectures.build({**TINY, "layer_types": types}, draw_weights(TINY)).make_kv()
    ]
    assert kinds == [KVCache, *[RotatingKVCache] * 3]


@pytest.mark.parametrize("thetas", [{}, {"rope_theta": 5e5, "rope_local_base_freq": 5e3}])
def test_both_spellings_of_the_rope_settings_are_equal(thetas: dict[str, float]) -> None:
    older = {**TINY, **thetas, "rope_scaling": LINEAR}
    names = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    newer = {key: value for key, value in older.items() if key not in names}
    newer["rope_parameters"] = {
        "full_attention": {**LINEAR, "rope_theta": older["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": older["rope_local_base_freq"]},
    }
    weights = draw_weights(TINY)
    np.testing.assert_array_equal(logits(newer, weights), logits(older, weights))


def test_a_missing_rope_theta_has_the_default() -> None:
    newer = {key: value for key, value in TINY.items() if not key.startswith("rope_")}
    bare = {"rope_type": "default"}
    newer["rope_parameters"] = {"full_attention": bare, "sliding_attention": bare}
    weights = draw_weights(TINY)
    np.testing.assert_array_equal(logits(newer, weights), logits(TINY, weights))


def test_rope_scaling_applies_to_full_attention_layers_only() -> None:
    weights = draw_weights(TINY)
    local = {**TINY, "layer_types": ["sliding_attention"] * 4}
    stretched = {**local, "rope_scaling": LINEAR}
    np.testing.assert_array_equal(logits(stretched, weights), logits(local, weights))
    assert not np.allclose(logits({**TINY, "rope_scaling": LINEAR}, weights), logits(TINY, weights))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_found(prefix: str) -> None:
    """In the layout that Google published, and in that of newer versions of transformers."""
    weights = draw_weights(WHOLE["text_config"])
    checkpoint = {
        (prefix + name if prefix == "language_model." else name.replace("model.", prefix, 1)): array
        for name, array in weights.items()
    }
    for other in ("vision_tower.vision_model.x", "multi_modal_projector.mm_input_projection"):
        checkpoint[f"{other}.weight"] = mx.zeros((2, 2))
        checkpoint[f"model.{other}.bias"] = mx.zeros((2,))
    np.testing.assert_array_equal(
        logits(WHOLE, checkpoint), logits({**TINY, "rope_scaling": LINEAR}, weights)
    )


def test_a_model_without_a_head_uses_its_embeddings() -> None:
    weights = draw_weights(TINY)
    checkpoint = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    np.testing.assert_array_equal(logits(TINY, checkpoint), logits(TINY, weights))


def test_softcaps_of_the_config_are_used() -> None:
    weights = draw_weights(TINY)
    plain = logits(TINY, weights)
    capped = logits({**TINY, "final_logit_softcapping": 0.5}, weights)
    np.testing.assert_allclose(capped, 0.5 * np.tanh(plain / 0.5), atol=1e-5)
    assert not np.allclose(logits({**TINY, "attn_logit_softcapping": 0.1}, weights), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters lacks sliding_attention"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, {})
