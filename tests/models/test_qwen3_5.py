"""Qwen3.5: dense and with experts, alone and as the text part of a vision model."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from tests.models import parity
from tests.models import test_qwen3_next as next_
from tests.models.architectures import Case

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_output_gate": True,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "mamba_ssm_dtype": "float32",
}

MOE: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

SEEING: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "vision_config": {"model_type": "qwen3_5", "hidden_size": 8},
    "image_token_id": 7,
    "tie_word_embeddings": False,
}

CASES = [
    Case(name="seeing", config=SEEING, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(
        name="tied",
        config={
            **TEXT,
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_num_value_heads": 6,
        },
        quantized=(),
    ),
    Case(
        name="experts",
        config={**SEEING, "model_type": "qwen3_5_moe", "text_config": MOE},
        quantized=("affine-4", "affine-8"),
    ),
]


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The published layout: names, norms, convolutions and experts, with vision tensors."""
    plain = {name.removeprefix("language_model."): a for name, a in weights.items()}
    theirs = next_.with_fused_experts(next_.to_published_layout(plain))
    return {
        "model.visual.patch_embed.proj.weight": mx.zeros((2, 2)),
        **{
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: array
            for name, array in theirs.items()
        },
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_published_and_converted_checkpoints_give_the_same_logits(
    case: Case, tmp_path: Path
) -> None:
    weights = parity.save_converted(case, tmp_path)
    got = next_.logits(case.config, to_published_layout(weights))
    np.testing.assert_allclose(got, next_.logits(case.config, weights), atol=1e-4)


@pytest.mark.parametrize(
    ("case", "kind"), [(CASES[0], "qwen3_5_text"), (CASES[2], "qwen3_5_moe_text")]
)
def test_the_text_part_alone_has_its_own_model_type(case: Case, kind: str, tmp_path: Path) -> None:
    weights = parity.save_converted(case, tmp_path)
    config = case.config["text_config"]
    assert config["model_type"] == kind
    alone = {name.removeprefix("language_model."): array for name, array in weights.items()}
    np.testing.assert_array_equal(next_.logits(config, alone), next_.logits(case.config, weights))


def test_minicpm_v_has_the_same_text_model(tmp_path: Path) -> None:
    """Its text part need not have a model type."""
    weights = parity.save_converted(CASES[0], tmp_path)
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    config = {**SEEING, "model_type": "minicpmv4_7", "text_config": text}
    np.testing.assert_array_equal(next_.logits(config, weights), next_.logits(SEEING, weights))


def test_states_are_float32_for_all_activation_types(tmp_path: Path) -> None:
    model = architectures.build(SEEING, parity.save_converted(CASES[0], tmp_path))
    next_.assert_states_are_float32(next_.in_bfloat16(model))


@pytest.mark.parametrize("change", [{"attn_output_gate": False}, {"output_gate_type": "sigmoid"}])
def test_other_gates_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="attn_output_gate true and output_gate_type 'swish'"):
        architectures.build({**TEXT, **change}, {})
