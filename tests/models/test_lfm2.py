"""LFM2: what config.json may say, how its makers lay the tensors out."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import models
from models import lfm2
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
    Case(name="plain", config=TINY, quantised=("affine-4", "affine-8", "mxfp4")),
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
    Case(name="experts", config=MOE, quantised=("affine-4", "affine-8")),
    Case(
        name="unbiased",
        config={
            **MOE,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
        quantised=(),
    ),
]


def by_makers(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """A converted checkpoint as it was before the conversion."""
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


def converted(case: Case, tmp_path: Any) -> dict[str, mx.array]:
    parity.saved(case, tmp_path)
    loaded = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def logits(config: Any, weights: dict[str, mx.array]) -> np.ndarray[Any, Any]:
    return parity.our_prefilled(models.build(config, weights), list(range(20)), [20])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_makers_checkpoints_say_what_converted_ones_say(case: Case, tmp_path: Any) -> None:
    weights = converted(case, tmp_path)
    theirs = by_makers(weights)
    assert any(array.ndim == 3 and array.shape[1] == 1 for array in theirs.values())
    np.testing.assert_array_equal(logits(case.config, theirs), logits(case.config, weights))


def test_layers_have_the_cache_of_their_kind() -> None:
    model = lfm2.Model(lfm2.Config.from_dict(TINY))
    kinds = [type(layer) for layer in model.make_kv()]
    assert kinds == [RecurrentCache, KVCache, RecurrentCache, KVCache]


def test_a_text_part_of_a_model_that_sees_is_built(tmp_path: Any) -> None:
    weights = converted(CASES[0], tmp_path)
    text = {key: value for key, value in TINY.items() if key != "model_type"}
    config = {"model_type": "lfm2_vl", "text_config": text, "vision_config": {}}
    named = {name.replace("model.", "model.language_model.", 1): a for name, a in weights.items()}
    named["model.vision_tower.embeddings.weight"] = mx.zeros((2, 2))
    np.testing.assert_array_equal(logits(config, named), logits(TINY, weights))


@pytest.mark.parametrize(
    ("said", "inner"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({}, 8192),
        ({"block_ffn_dim_multiplier": 1.3}, 10752),
        ({"block_ff_dim": 1000, "block_multiple_of": 7}, 672),
    ],
)
def test_the_inner_size_of_an_mlp_follows_the_rule(said: dict[str, Any], inner: int) -> None:
    base = {k: v for k, v in TINY.items() if not k.startswith("block_")}
    config = lfm2.Config.from_dict({**base, "intermediate_size": 12288, **said})
    assert config.inner_size == inner


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, "'mamba' is not supported"),
        ({"layer_types": ["conv"]}, "layer_types must have one entry per layer"),
        ({"block_ff_dim": None}, "lacks block_ff_dim or intermediate_size"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        models.build({**TINY, **change}, {})


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok 7 must be between 1 and 6"):
        models.build({**MOE, "num_experts_per_tok": 7}, {})
