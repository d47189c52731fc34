"""Gemma 2 against its formulas in float64, because mlx-lm's class has no windows."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 24,
    # low enough to affect scores and logits
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
    "hidden_activation": "gelu_pytorch_tanh",
    # longer than the prompts of the parity suite, because mlx-lm's class has no window
    "sliding_window": 64,
}
WINDOW = 6

CASES = [Case(name="plain", config=TINY, quantized=("affine-4", "affine-8", "mxfp4"))]

IDS = [5, 50, 17, 17, 99, 3, 80, 42, 7, 61, 2, 2, 30, 88, 11, 96]


def draw_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random tensors with the names and shapes of published checkpoints."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "pre_feedforward_layernorm": (hidden,),
                "post_feedforward_layernorm": (hidden,),
            }.items()
        }
    rng = np.random.default_rng(seed)
    return {
        f"model.{name}.weight": mx.array(
            (rng.standard_normal(shape) * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)).astype(
                np.float32
            )
        )
        for name, shape in shapes.items()
    }


def logits(config: dict[str, Any], weights: dict[str, mx.array], chunks: list[int]) -> np.ndarray:
    """Logits [L, V] of IDS, evaluated in chunks of the given lengths."""
    return parity.prefill(architectures.build(config, dict(weights)), IDS, chunks)


def formulas(config: dict[str, Any], weights: dict[str, mx.array]) -> np.ndarray:
    """Logits [L, V] of IDS in float64, as the paper and the published code define them."""
    w = {name: np.array(array).astype(np.float64) for name, array in weights.items()}
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], 32
    positions = np.arange(len(IDS))
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 + w[f"model.{name}.weight"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def rotate(x: np.ndarray) -> np.ndarray:
        left, right = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def cap_scores(x: np.ndarray, cap: float | None) -> np.ndarray:
        return cap * np.tanh(x / cap) if cap else x

    def attention(x: np.ndarray, layer: int) -> np.ndarray:
        def project(name: str) -> np.ndarray:
            matrix = w[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            return (x @ matrix.T).reshape(len(x), -1, size)

        q, k, v = rotate(project("q")), rotate(project("k")), project("v")
        k, v = (np.repeat(array, heads // kv_heads, axis=1) for array in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config["query_pre_attn_scalar"])
        scores = cap_scores(scores, config["attn_logit_softcapping"])
        behind = positions[:, None] - positions
        reach = config["sliding_window"] if layer % 2 == 0 else len(IDS)
        scores = np.where((behind >= 0) & (behind < reach), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1)
        return attended @ w[f"model.layers.{layer}.self_attn.o_proj.weight"].T

    def mlp(x: np.ndarray, layer: int) -> np.ndarray:
        gate, up, down = (
            w[f"model.layers.{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
        )
        inner = x @ gate
        bent = np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))
        return (0.5 * inner * (1 + bent) * (x @ up)) @ down

    x = w["model.embed_tokens.weight"][IDS] * np.sqrt(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        attended = attention(norm(x, f"{at}.input_layernorm"), layer)
        x = x + norm(attended, f"{at}.post_attention_layernorm")
        found = mlp(norm(x, f"{at}.pre_feedforward_layernorm"), layer)
        x = x + norm(found, f"{at}.post_feedforward_layernorm")
    scores = norm(x, "norm") @ w["model.embed_tokens.weight"].T
    return cap_scores(scores, config["final_logit_softcapping"])


@pytest.mark.parametrize("chunks", [[16], [5, 1, 10], [1] * 16])
@pytest.mark.parametrize("window", [WINDOW, 64])
def test_logits_agree_with_the_formulas(window: int, chunks: list[int]) -> None:
    config = {**TINY, "sliding_window": window}
    weights = draw_weights(config)
    np.testing.assert_allclose(
        logits(config, weights, chunks), formulas(config, weights), atol=1e-4
    )


def test_a_window_hides_earlier_positions() -> None:
    weights = draw_weights(TINY)
    narrow = logits({**TINY, "sliding_window": WINDOW}, weights, [16])
    wide = logits(TINY, weights, [16])
    np.testing.assert_allclose(narrow[:WINDOW], wide[:WINDOW], atol=1e-5)
    assert not np.allclose(narrow[WINDOW:], wide[WINDOW:], atol=1e-3)


def test_every_other_layer_has_a_window() -> None:
    kinds = [type(layer) for layer in architectures.build(TINY, draw_weights(TINY)).make_kv()]
    assert kinds == [RotatingKVCache, KVCache, RotatingKVCache]


def test_a_null_softcap_is_no_softcap() -> None:
    config = {**TINY, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    weights = draw_weights(config)
    found = logits(config, weights, [16])
    assert np.abs(found).max() > TINY["final_logit_softcapping"]
    np.testing.assert_allclose(found, formulas(config, weights), atol=1e-4)


def test_residuals_are_clipped_to_the_range_of_float16() -> None:
    weights = {name: array.astype(mx.float16) for name, array in draw_weights(TINY).items()}
    for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
        weights[f"model.layers.0.{name}.weight"] = mx.full((96,), 60000, mx.float16)
    assert np.isfinite(logits(TINY, weights, [16])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is not supported, because such a model cannot",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types must have one entry per layer"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, draw_weights(TINY))
