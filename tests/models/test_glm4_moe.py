"""GLM-4.5: grouped-query attention with DeepSeek-V3's mixture of experts."""

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

CONFIG = {
    **TINY,
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
}

CASES = [
    Case(
        name="plain", config=CONFIG, quantized=("affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")
    ),
    Case(
        name="norms-and-groups",
        config={
            **CONFIG,
            "use_qk_norm": True,
            "attention_bias": False,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
        },
    ),
]


@pytest.mark.parametrize("layout", [split_experts, fuse_experts])
def test_published_layouts_give_the_same_model(layout: Any, tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    weights = layout(read_weights(tmp_path))
    # the multi-token prediction layer, which only published checkpoints have
    weights["model.layers.3.eh_proj.weight"] = mx.zeros((64, 128))
    weights["model.layers.3.mlp.experts.0.up_proj.weight"] = mx.zeros((32, 64))
    np.testing.assert_array_equal(
        parity.prefill(architectures.build(CONFIG, weights), IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_half_of_a_head_is_rotated_by_default(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    config = {key: value for key, value in CONFIG.items() if key != "partial_rotary_factor"}
    np.testing.assert_array_equal(
        parity.prefill(architectures.build(config, read_weights(tmp_path)), IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("scoring_func", "softmax"), ("topk_method", "greedy")],
)
def test_unsupported_settings_are_refused(key: str, value: str) -> None:
    with pytest.raises(ModelError, match=f"{key} '{value}' is not supported"):
        architectures.build({**CONFIG, key: value}, {})
