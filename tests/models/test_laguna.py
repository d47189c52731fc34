"""Laguna: gated attention, numbers of heads and rope settings that differ between layers."""

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
from tests.models.test_qwen3_moe import IDS, fuse_experts, read_weights, split_experts

ROPES: dict[str, Any] = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIG: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "rope_theta"},
    "model_type": "laguna",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_attention_heads_per_layer": [4, 2, 6],
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "gating": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 2.0,
    "rope_parameters": ROPES,
}

CASES = [
    # mlx-lm quantizes the router to 8 bits
    Case(name="plain", config=CONFIG, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(
        name="tied",
        config={
            **CONFIG,
            "num_attention_heads_per_layer": None,
            "mlp_layer_types": None,
            "moe_router_logit_softcapping": 0.0,
            "tie_word_embeddings": True,
        },
        quantized=(),
    ),
]


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The released layout: single experts, a router without a module."""
    return {
        name.replace(".gate.proj.", ".gate.").replace(
            ".gate.e_score_correction_bias", ".experts.e_score_correction_bias"
        ): array
        for name, array in split_experts(weights).items()
    }


def to_transformers_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {
        name.replace(".gate.proj.", ".gate.").replace(".shared_expert.", ".shared_experts."): array
        for name, array in fuse_experts(weights).items()
    }


def to_layout_of_mlx_vlm(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Gate and up are fused."""
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if ".switch_mlp.gate_proj." in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = mx.concatenate([array, up], axis=1)
        elif ".switch_mlp.up_proj." not in name:
            found[name] = array
    return {f"language_model.{name}": array for name, array in found.items()}


@pytest.mark.parametrize("kind", [None, "affine-4"])
@pytest.mark.parametrize(
    "layout", [to_published_layout, to_transformers_layout, to_layout_of_mlx_vlm]
)
def test_other_layouts_give_the_same_model(layout: Any, kind: str | None, tmp_path: Path) -> None:
    if kind is not None and layout is to_transformers_layout:
        return  # transformers does not write MLX's packing
    parity.save_reference(CASES[0], tmp_path, kind=kind)
    theirs = architectures.build(CONFIG, layout(read_weights(tmp_path)))
    np.testing.assert_array_equal(
        parity.prefill(theirs, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


@pytest.mark.parametrize("key", ["num_attention_heads_per_layer", "mlp_layer_types"])
def test_a_list_of_another_length_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"{key} must have one entry per layer"):
        architectures.build({**CONFIG, key: CONFIG[key][:2]}, {})


@pytest.mark.parametrize("heads", [3, 0, -2, 1 << 40])
def test_numbers_of_heads_that_key_heads_do_not_divide_are_refused(heads: int) -> None:
    with pytest.raises(ModelError, match=f"num_attention_heads_per_layer has {heads} heads"):
        architectures.build({**CONFIG, "num_attention_heads_per_layer": [4, heads, 4]}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("gating", "other"),
        ("gating", False),
        ("moe_router_score_func", "sqrtsoftplus"),
        ("moe_apply_router_weight_on_input", True),
        ("qkv_bias", True),
    ],
)
def test_unsupported_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} {value!r} is not supported"):
        architectures.build({**CONFIG, key: value}, {})


def test_an_unknown_mlp_is_refused() -> None:
    with pytest.raises(ModelError, match="an MLP of type 'odd' is not supported"):
        architectures.build({**CONFIG, "mlp_layer_types": ["dense", "odd", "dense"]}, {})
