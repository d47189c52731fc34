"""DeepSeek V2: a softmax selects experts, with and without groups."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures, deepseek_v2
from models.base import ModelError
from models.deepseek_v3 import CausalLM
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_deepseek_v3 import CONFIG as DEEPSEEK_V3
from tests.models.test_deepseek_v3 import IDS, YARN
from tests.models.test_qwen3_moe import read_weights

LITE = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("n_group", "topk_group")},
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "rope_scaling": {**YARN, "type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707},
}
GROUPED = {
    **LITE,
    "q_lora_rank": 64,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}

CASES = [
    # the reference quantizes the joined map from latents, which we split
    Case(name="lite", config=LITE, quantized=()),
    Case(name="groups", config=GROUPED, quantized=()),
]


def test_the_best_experts_of_the_best_groups_are_selected() -> None:
    """Compares with the formulas of the paper in float64, for scores in which groups matter."""
    config = deepseek_v2.Config.from_dict(GROUPED)
    experts: Any = config.make_experts()
    weight = np.random.default_rng(3).normal(size=(16, 64))
    experts.gate.weight = mx.array(weight.astype(np.float32))
    x = np.random.default_rng(4).normal(size=(500, 64)).astype(np.float32)
    chosen, shares = (np.array(part) for part in experts.route(mx.array(x)))
    logits = x.astype(np.float64) @ weight.astype(np.float32).astype(np.float64).T
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    num_limited = 0
    for row, own, weights in zip(scores, chosen, shares, strict=True):
        groups = np.argsort(row.reshape(4, 4).max(axis=1))[-2:]
        allowed = [index for index in range(16) if index // 4 in groups]
        expected = sorted(allowed, key=lambda index: row[index])[-3:]
        num_limited += set(expected) != {*np.argsort(row)[-3:]}
        assert {*own} == set(expected)
        np.testing.assert_allclose(weights, 16 * row[own], rtol=1e-4)
    assert num_limited > 50


def test_groups_have_no_effect_with_the_greedy_method(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    grouped = {**LITE, "n_group": 4, "topk_group": 1}
    np.testing.assert_array_equal(
        parity.prefill(architectures.build(grouped, read_weights(tmp_path)), IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_the_model_is_our_own_class(tmp_path: Path) -> None:
    parity.save_reference(CASES[1], tmp_path)
    assert isinstance(parity.load_model(tmp_path), CausalLM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**LITE, **change}, {})
