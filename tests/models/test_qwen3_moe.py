"""The Qwen3 mixtures of experts, in all published layouts."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures, qwen3_moe
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY

EXPERTS = 8

CONFIG = {
    **TINY,
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "rope_theta": 1000000.0,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

CASES = [
    # 23 tokens have 69 rows, which are sorted; the chunks of the prompt have fewer
    Case(
        name="plain", config=CONFIG, quantized=("affine-4", "affine-8", "mxfp4", "mxfp8", "nvfp4")
    ),
    Case(
        name="some-dense",
        config={
            **CONFIG,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    Case(name="one-of-many", config={**CONFIG, "num_experts": 16, "num_experts_per_tok": 1}),
    Case(
        name="multimodal",
        config={
            "model_type": "qwen3_vl_moe",
            "text_config": {**CONFIG, "model_type": "qwen3_vl_moe_text"},
            "vision_config": {"hidden_size": 8},
            "tie_word_embeddings": False,
        },
    ),
]

IDS = [5, 50, 17, 17, 99, 3, 80, 42, 7]


def split_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The published layout."""
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if ".switch_mlp." not in name:
            found[name] = array
            continue
        before, after = name.split(".switch_mlp.")
        for number in range(array.shape[0]):
            found[f"{before}.experts.{number}.{after}"] = array[number]
    return found


def fuse_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The layout of newer versions of transformers."""
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if ".switch_mlp." not in name:
            found[name] = array
        elif "gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            path = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            found[path] = mx.concatenate([array, up], axis=1)
        elif "down_proj" in name:
            found[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = array
    return found


def transpose_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The released layout of Qwen3-VL-MoE."""
    return {
        name: array.swapaxes(1, 2) if ".experts." in name else array
        for name, array in fuse_experts(weights).items()
    }


def read_weights(folder: Path) -> dict[str, mx.array]:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    return weights


@pytest.mark.parametrize("layout", [split_experts, fuse_experts, transpose_experts])
def test_published_layouts_give_the_same_model(layout: Any, tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    ours = parity.load_model(tmp_path)
    theirs = architectures.build(CONFIG, layout(read_weights(tmp_path)))
    np.testing.assert_array_equal(parity.prefill(theirs, IDS, [9]), parity.prefill(ours, IDS, [9]))


def test_quantized_experts_are_stacked_with_their_scales(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path, kind="affine-4")
    ours = parity.load_model(tmp_path)
    config = {**CONFIG, "quantization": dict(parity.KINDS["affine-4"])}
    theirs = architectures.build(config, split_experts(read_weights(tmp_path)))
    np.testing.assert_array_equal(parity.prefill(theirs, IDS, [9]), parity.prefill(ours, IDS, [9]))


def test_the_key_of_transformers_5_for_the_number_of_experts_is_read() -> None:
    renamed = {key: value for key, value in CONFIG.items() if key != "num_experts"}
    config = qwen3_moe.Config.from_dict({**renamed, "num_local_experts": EXPERTS})
    assert config == qwen3_moe.Config.from_dict(CONFIG)


def test_too_few_experts_are_refused(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    weights = split_experts(read_weights(tmp_path))
    fewer = {name: array for name, array in weights.items() if ".experts.7." not in name}
    with pytest.raises(ModelError, match=r"has wrongly shaped tensors: .*switch_mlp"):
        architectures.build(CONFIG, fewer)


def test_another_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu' is not supported"):
        architectures.build({**CONFIG, "hidden_act": "gelu"}, {})
