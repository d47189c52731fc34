"""GLM-4 MoE Lite: the differences from DeepSeek V3, whose tests compare both forms of attention."""

from pathlib import Path

import pytest

from models import deepseek_v3, glm4_moe_lite
from tests.models.architectures import Case
from tests.models.test_deepseek_v3 import CONFIG as DEEPSEEK
from tests.models.test_deepseek_v3 import check_early_conversion

CONFIG = {**DEEPSEEK, "model_type": "glm4_moe_lite", "routed_scaling_factor": 1.8}

CASES = [
    Case(
        name="plain", config=CONFIG, quantized=("affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")
    ),
    Case(
        name="groups",
        config={
            **CONFIG,
            "num_hidden_layers": 4,
            "q_lora_rank": None,
            "attention_bias": True,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
        },
    ),
    Case(
        name="long",
        config={
            **CONFIG,
            "n_shared_experts": None,
            "moe_layer_freq": 2,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
        quantized=("affine-6",),
        transformers=False,
        why="It takes no null for n_shared_experts, and does not read moe_layer_freq.",
    ),
]


def test_the_norms_of_the_latents_have_the_epsilon_of_the_other_norms() -> None:
    config = {**CONFIG, "rms_norm_eps": 1e-3}
    epsilons = [
        architecture.Config.from_dict(config).latent_norm_eps
        for architecture in (glm4_moe_lite, deepseek_v3)
    ]
    assert epsilons == [1e-3, 1e-6]


def test_keys_that_config_json_lacks_have_the_defaults_of_glm() -> None:
    keys = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "rope_theta")
    lacking = {key: value for key, value in CONFIG.items() if key not in keys}
    config = glm4_moe_lite.Config.from_dict(lacking)
    assert [getattr(config, key) for key in keys] == [1, 1, 1.8, 1, 1e6]


@pytest.mark.parametrize(("others", "bits"), [(4, 4), (4, 8)])
def test_an_early_conversion_is_read_like_in_the_reference(
    others: int, bits: int, tmp_path: Path
) -> None:
    check_early_conversion(CASES[0], others, bits, tmp_path)
