"""Mistral Small 4: a softmax selects experts, and queries are scaled by their position."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_deepseek_v3 import CONFIG as DEEPSEEK
from tests.models.test_deepseek_v3 import IDS, PLAIN, ROTARY, fuse_kv_b
from tests.models.test_qwen3_moe import fuse_experts, read_weights

ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
    "partial_rotary_factor": ROTARY / (PLAIN + ROTARY),
}
MISTRAL4 = {
    **{key: value for key, value in DEEPSEEK.items() if key != "rope_theta"},
    "model_type": "mistral4",
    "max_position_embeddings": 128,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "rope_parameters": ROPE,
}

CASES = [
    Case(name="plain", config=MISTRAL4, quantized=("affine-4", "affine-8")),
    Case(
        name="groups",
        config={
            **MISTRAL4,
            "q_lora_rank": None,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
        quantized=(),
    ),
    Case(
        name="of-mistral3",
        config={
            "model_type": "mistral3",
            "text_config": MISTRAL4,
            "vision_config": {"model_type": "pixtral", "hidden_size": 8},
            "tie_word_embeddings": False,
        },
    ),
]


def test_the_published_layout_gives_the_same_model(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    weights = fuse_kv_b(fuse_experts(read_weights(tmp_path)))
    theirs = architectures.build(MISTRAL4, weights)
    np.testing.assert_array_equal(
        parity.prefill(theirs, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_positions_can_be_removed_from_the_middle(tmp_path: Path) -> None:
    """The scale of a query is not cached. The model has one layer, so the cache of a position
    depends only on its id and position."""
    parity.save_reference(
        Case(name="shallow", config={**MISTRAL4, "num_hidden_layers": 1}), tmp_path
    )
    model = parity.load_model(tmp_path)
    kv, prompt = model.make_kv(), [*IDS, *IDS]
    mx.eval(model(mx.array([prompt]), kv))
    assert model.shift(kv, 2, 12)
    shifted = model.logits(model(mx.array([[1]]), kv))
    fresh = model.logits(model(mx.array([[*prompt[:2], *prompt[12:], 1]]), model.make_kv()))
    np.testing.assert_allclose(np.array(shifted[:, -1]), np.array(fresh[:, -1]), atol=1e-4)


@pytest.mark.parametrize("share", [1.0, "half", 0.1])
def test_a_share_of_rotary_dimensions_that_contradicts_their_number_is_refused(share: Any) -> None:
    rope = {**ROPE, "partial_rotary_factor": share}
    with pytest.raises(ModelError, match=r"partial_rotary_factor is .*, but 16 of 48 dimensions"):
        architectures.build({**MISTRAL4, "rope_parameters": rope}, {})


def test_the_share_of_rotary_dimensions_may_be_missing(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    rope = {key: value for key, value in ROPE.items() if key != "partial_rotary_factor"}
    other = architectures.build({**MISTRAL4, "rope_parameters": rope}, read_weights(tmp_path))
    np.testing.assert_array_equal(
        parity.prefill(other, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


@pytest.mark.parametrize("key", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_a_config_without_the_scaling_keys_is_refused(key: str) -> None:
    rope = {name: value for name, value in ROPE.items() if name != key}
    with pytest.raises(ModelError, match=f"lacks '{key}'"):
        architectures.build({**MISTRAL4, "rope_parameters": rope}, {})


def test_another_score_is_refused() -> None:
    with pytest.raises(ModelError, match="scoring_func 'sigmoid' is not supported"):
        architectures.build({**MISTRAL4, "scoring_func": "sigmoid"}, {})
