"""LFM2: config keys, and the published layout of tensors."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures, lfm2
from models.base import ModelError
from models.kv import KVCache
from models.recurrent import RecurrentCache
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "model_type": "lfm2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
}

MOE: dict[str, Any] = {
    "model_type": "lfm2_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}

CASES = [
    Case(name="plain", config=TINY, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(
        name="adjusted",
        config={
            **{k: v for k, v in TINY.items() if k not in ("full_attn_idxs", "block_ff_dim")},
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "intermediate_size": 200,
            "block_ffn_dim_multiplier": 1.3,
            "block_auto_adjust_ff_dim": True,
            "conv_bias": True,
            "conv_L_cache": 4,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        },
    ),
    Case(name="experts", config=MOE, quantized=("affine-4", "affine-8")),
    Case(
        name="unbiased",
        config={
            **MOE,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
        quantized=(),
    ),
]


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Undo the conversion of a checkpoint."""
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if name.endswith("conv.conv.weight"):
            array = array.swapaxes(1, 2)
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs) if "feed_forward" in name else name
        if "switch_mlp" in name:
            for expert, one in enumerate(array):
                found[name.replace("switch_mlp", f"experts.{expert}")] = one
        else:
            found[name] = array
    return found


def logits(config: Any, weights: dict[str, mx.array]) -> np.ndarray[Any, Any]:
    return parity.prefill(architectures.build(config, weights, vision=False), list(range(20)), [20])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_published_and_converted_checkpoints_give_the_same_logits(
    case: Case, tmp_path: Any
) -> None:
    weights = parity.save_converted(case, tmp_path)
    theirs = to_published_layout(weights)
    assert any(array.ndim == 3 and array.shape[1] == 1 for array in theirs.values())
    np.testing.assert_array_equal(logits(case.config, theirs), logits(case.config, weights))


def test_each_layer_has_the_cache_for_its_type() -> None:
    model = lfm2.Model(lfm2.Config.from_dict(TINY))
    kinds = [type(layer) for layer in model.make_kv()]
    assert kinds == [RecurrentCache, KVCache, RecurrentCache, KVCache]


def test_the_text_part_of_a_vision_model_is_built(tmp_path: Any) -> None:
    weights = parity.save_converted(CASES[0], tmp_path)
    text = {key: value for key, value in TINY.items() if key != "model_type"}
    config = {"model_type": "lfm2_vl", "text_config": text, "vision_config": {}}
    named = {name.replace("model.", "model.language_model.", 1): a for name, a in weights.items()}
    named["model.vision_tower.embeddings.weight"] = mx.zeros((2, 2))
    np.testing.assert_array_equal(logits(config, named), logits(TINY, weights))


@pytest.mark.parametrize(
    ("keys", "inner"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({}, 8192),
        ({"block_ffn_dim_multiplier": 1.3}, 10752),
        ({"block_ff_dim": 1000, "block_multiple_of": 7}, 672),
    ],
)
def test_the_intermediate_size_is_adjusted_by_the_formula(keys: dict[str, Any], inner: int) -> None:
    base = {k: v for k, v in TINY.items() if not k.startswith("block_")}
    config = lfm2.Config.from_dict({**base, "intermediate_size": 12288, **keys})
    assert config.inner_size == inner


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, "'mamba' is not supported"),
        ({"layer_types": ["conv"]}, "layer_types must have one entry per layer"),
        ({"block_ff_dim": None}, "lacks block_ff_dim or intermediate_size"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, {})


def test_more_active_experts_than_experts_are_refused() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok is 7, but must be between 1 and 6"):
        architectures.build({**MOE, "num_experts_per_tok": 7}, {})
