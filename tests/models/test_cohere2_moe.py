"""Cohere 2 MoE, compared with its formulas in float64. mlx-lm has no class for it; `make parity`
compares with transformers."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import architectures, cohere2_moe
from models.base import ModelError
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY

CONFIG: dict[str, Any] = {
    **TINY,
    "model_type": "cohere2_moe",
    "num_hidden_layers": 5,
    "head_dim": 32,
    "rms_norm_eps": None,
    "sliding_window": 5,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 160,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
    "logit_scale": 0.25,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "expert_selection_fn": "sigmoid",
}

# compared by `make parity` only, because mlx-lm has no such architecture
TRANSFORMERS_CASES = [
    Case(name="plain", config=CONFIG),
    Case(
        name="softmax",
        config={
            **CONFIG,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "sum",
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
        },
    ),
    Case(
        name="no-shared-experts",
        config={
            **CONFIG,
            "num_shared_experts": 0,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
]

PROMPT = np.random.default_rng(1).integers(0, 101, 23).tolist()
CASES_BY_NAME = pytest.mark.parametrize("case", TRANSFORMERS_CASES, ids=lambda case: case.name)


def build(config: Mapping[str, Any]) -> Any:
    model = cohere2_moe.Model(cohere2_moe.Config.from_dict(config))
    parity.draw_weights(model, seed=0)
    return model


@CASES_BY_NAME
def test_one_position_follows_the_formulas(case: Case) -> None:
    """Attention to a single position returns its value, whatever the rotation."""
    model = build(case.config)
    config = cohere2_moe.Config.from_dict(case.config)

    def linear(layer: Any, x: np.ndarray) -> np.ndarray:
        y = np.array(layer.weight, np.float64) @ x
        return y + np.array(layer.bias, np.float64) if "bias" in layer else y

    def norm(layer: Any, x: np.ndarray) -> np.ndarray:
        centered = x if config.rms_norm_eps else x - x.mean()
        scaled = centered / np.sqrt((centered**2).mean() + layer.eps)
        return scaled * np.array(layer.weight, np.float64)

    def mlp(layer: Any, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        gate, up, down = (
            np.array(layer[name].weight, np.float64)[... if expert is None else expert]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        inner = gate @ x
        return down @ (inner / (1 + np.exp(-inner)) * (up @ x))

    def experts(layer: Any, x: np.ndarray) -> np.ndarray:
        logits = np.array(layer.gate.weight, np.float64) @ x
        chosen = np.argsort(logits)[-config.num_experts_per_tok :]
        if config.expert_selection_fn == "softmax":
            shares = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        else:
            shares = 1 / (1 + np.exp(-logits[chosen]))
            shares = shares / shares.sum() if config.norm_topk_prob else shares
        y = np.zeros_like(x)
        for share, expert in zip(shares, chosen, strict=True):
            y += share * mlp(layer.switch_mlp, x, expert)
        if not config.num_shared_experts:
            return y
        total = y + mlp(layer.shared_experts, x)
        return total / 2 if config.shared_expert_combination_strategy == "average" else total

    x = np.array(model.model.embed_tokens.weight, np.float64)[7]
    for number, layer in enumerate(model.model.layers):
        normed = norm(layer.input_layernorm, x)
        values = linear(layer.self_attn.v_proj, normed).reshape(2, 1, 32).repeat(2, 1).reshape(-1)
        is_dense = number < config.first_k_dense_replace
        second = mlp(layer.mlp, normed) if is_dense else experts(layer.mlp, normed)
        x = x + linear(layer.self_attn.o_proj, values) + second
    head = model.model.embed_tokens if config.tie_word_embeddings else model.lm_head
    expected = np.array(head.weight, np.float64) @ norm(model.model.norm, x) * config.logit_scale
    np.testing.assert_allclose(parity.prefill(model, [7], [1])[0], expected, atol=1e-5)


@CASES_BY_NAME
def test_chunks_and_batches_have_the_bits_of_a_whole_prompt(case: Case) -> None:
    model = build(case.config)
    apply_cpu_layout(model)
    whole = parity.prefill(model, PROMPT, [23])
    same = np.testing.assert_array_equal if is_batch_invariant(model) else _assert_close
    same(parity.prefill(model, PROMPT, [6, 1, 9, 7]), whole)
    prompts = [PROMPT[:3], PROMPT[:11], PROMPT[:18]]
    steps = [PROMPT[3:8], PROMPT[11:16], PROMPT[18:23]]
    expected = np.stack([whole[3:8], whole[11:16], whole[18:23]])
    same(parity.decode_batch(model, prompts, steps), expected)


def _assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_layers_with_a_window_and_dense_layers_rotate() -> None:
    kinds = [type(layer.self_attn.rope).__name__ for layer in build(CONFIG).model.layers]
    assert kinds == ["Rope", "Rope", "Rope", "Rope", "NoRope"]
    caches = [type(cache).__name__ for cache in build(CONFIG).make_kv()]
    assert caches == ["KVCache", *["RotatingKVCache"] * 3, "KVCache"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"layer_norm_bias": True}, "layer_norm_bias True is not supported"),
        ({"expert_selection_fn": "top"}, "expert_selection_fn 'top' is not supported"),
        ({"shared_expert_combination_strategy": "max"}, "strategy 'max' is not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but must be between 1 and 8"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must have one entry per layer"),
        ({"mlp_layer_types": ["odd"] * 5}, "an MLP of type 'odd' is not supported"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**CONFIG, **change}, {})


def test_single_experts_are_stacked() -> None:
    model = build(CONFIG)
    stored: dict[str, mx.array] = {}
    flat: Any = tree_flatten(model.parameters())
    for name, array in flat:
        before, _, after = name.partition(".switch_mlp.")
        if not after:
            stored[name] = array
            continue
        stored |= {f"{before}.experts.{number}.{after}": array[number] for number in range(8)}
    np.testing.assert_array_equal(
        parity.prefill(architectures.build(CONFIG, stored), PROMPT, [23]),
        parity.prefill(model, PROMPT, [23]),
    )
