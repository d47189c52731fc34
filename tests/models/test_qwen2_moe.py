"""The Qwen2 mixtures of experts, which have a shared expert."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import architectures, qwen2_moe
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY
from tests.models.test_qwen3_moe import IDS, fuse_experts, read_weights, split_experts

CONFIG = {
    **TINY,
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
    "norm_topk_prob": False,
}

CASES = [
    Case(name="plain", config=CONFIG, quantized=("affine-4", "mxfp4")),
    Case(
        name="one-of-many",
        config={**CONFIG, "num_experts": 16, "num_experts_per_tok": 1},
        quantized=(),
    ),
]


@pytest.mark.parametrize("layout", [split_experts, fuse_experts])
def test_published_layouts_give_the_same_model(layout: Any, tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    theirs = architectures.build(CONFIG, layout(read_weights(tmp_path)))
    np.testing.assert_array_equal(
        parity.prefill(theirs, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_dense_layers_normalized_shares_and_a_tied_head_are_supported() -> None:
    """mlx-lm 0.32 does not read these keys."""
    config = {**CONFIG, "mlp_only_layers": [0], "norm_topk_prob": True, "tie_word_embeddings": True}
    model: Any = qwen2_moe.Model(qwen2_moe.Config.from_dict(config))
    dense, sparse = model.model.layers
    assert "switch_mlp" not in dense.mlp
    assert sparse.mlp.norm_topk_prob
    assert "lm_head" not in model


def test_another_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu' is not supported"):
        architectures.build({**CONFIG, "hidden_act": "gelu"}, {})
