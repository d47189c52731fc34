"""Granite 4: kinds of layers, config keys, and the published layout of tensors."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures, granitemoehybrid
from models.base import ModelError
from models.kv import KVCache
from models.recurrent import RecurrentCache
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    # mlx-lm has other defaults
    "time_step_limit": [0.0, 1e30],
}

MOE: dict[str, Any] = {
    **TINY,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "tie_word_embeddings": False,
}

CASES = [
    Case(name="plain", config=TINY, quantized=("affine-4", "affine-8")),
    Case(name="experts", config=MOE, quantized=("affine-4", "affine-8")),
    Case(
        name="rotated",
        config={
            **TINY,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
        quantized=(),
    ),
]


def logits(config: Any, weights: dict[str, mx.array]) -> np.ndarray[Any, Any]:
    return parity.prefill(architectures.build(config, weights), list(range(20)), [20])


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Undo the conversion of a checkpoint: fuse gate and up projections."""
    found = dict[str, mx.array]()
    for name, array in weights.items():
        is_expert = "switch_mlp" in name
        path = name.replace(".block_sparse_moe.switch_mlp.", ".block_sparse_moe.")
        path = path.replace(".mlp.", ".shared_mlp.")
        if name.endswith("conv1d.weight"):
            found[name] = array.swapaxes(1, 2)
        elif "gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            fused = mx.concatenate([array, up], axis=1 if is_expert else 0)
            found[path.replace("gate_proj", "input_linear")] = fused
        elif "up_proj" not in name:
            found[path.replace("down_proj", "output_linear")] = array
    return found


def to_transformers_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The names of the modules in transformers."""
    names = {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "router.layer.": "router.",
    }
    found = dict[str, mx.array]()
    for name, array in to_published_layout(weights).items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = array
    return found


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.id)
@pytest.mark.parametrize("layout", [to_published_layout, to_transformers_layout])
def test_all_layouts_of_a_checkpoint_give_the_same_logits(
    case: Case, layout: Any, tmp_path: Any
) -> None:
    weights = parity.save_converted(case, tmp_path)
    assert layout(weights).keys() != weights.keys()
    np.testing.assert_array_equal(
        logits(case.config, layout(weights)), logits(case.config, weights)
    )


def test_both_spellings_of_the_layers_are_equal(tmp_path: Any) -> None:
    weights = parity.save_converted(CASES[0], tmp_path)
    newer = {
        **TINY,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_d_head": "auto",
    }
    np.testing.assert_array_equal(logits(newer, weights), logits(TINY, weights))


def test_each_layer_has_the_cache_for_its_type() -> None:
    model = granitemoehybrid.Model(granitemoehybrid.Config.from_dict(TINY))
    kinds = [type(layer) for layer in model.make_kv()]
    assert kinds == [RecurrentCache, KVCache, RecurrentCache]


def test_without_a_position_embedding_type_nothing_is_rotated(tmp_path: Any) -> None:
    weights = parity.save_converted(CASES[0], tmp_path)
    absent = {key: value for key, value in TINY.items() if key != "position_embedding_type"}
    np.testing.assert_array_equal(logits(absent, weights), logits(TINY, weights))
    rotated = {**TINY, "position_embedding_type": "rope"}
    assert np.abs(logits(rotated, weights) - logits(TINY, weights)).max() > 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["mamba", "conv", "mamba"]}, "'conv' is not supported"),
        ({"layer_types": ["mamba"]}, "layer_types must have one entry per layer"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ({"mamba_d_head": "wide"}, "mamba_d_head is 'wide'"),
        ({"mamba_n_heads": 0}, "the number of heads of a Mamba-2 layer is 0"),
        ({"residual_multiplier": 0.0}, "residual_multiplier is 0.0"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, {})
