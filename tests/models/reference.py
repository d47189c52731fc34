"""The formulas of the papers in float64 numpy, independent of the code under test."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _tanh_gelu(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": lambda x: np.maximum(x, 0),
}


def attention(queries: Array, keys: Array, values: Array, visible: Array) -> Array:
    """queries [Hq, L, D], keys, values [Hkv, S, D], visible [L, S] bool -> [Hq, L, D]."""
    group = queries.shape[0] // keys.shape[0]
    keys, values = np.repeat(keys, group, 0), np.repeat(values, group, 0)
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True) @ values


def rotate(x: Array, angles: Array) -> Array:
    """Rotate x [H, L, D] by angles [L, D/2], first half against second half."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def llama(
    config: dict[str, Any],
    weights: dict[str, Array],
    ids: list[int],
    rounded: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Logits [L, V] of a Llama with plain RoPE. Biases are used if `weights` has them.
    `sliding_window` applies to the layers that `layer_types` names, or by default to all.
    rounded: applied to the result of each operation, such as a product or a norm."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    inverse = config.get("rope_theta", 10000.0) ** (-np.arange(0, size, 2) / size)
    angles = np.arange(len(ids))[:, None] * inverse
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    window = config.get("sliding_window") or len(ids)
    near = causal & np.triu(np.ones((len(ids), len(ids)), bool), 1 - window)
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    x = rounded(weights["model.embed_tokens.weight"][ids])

    def norm(x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return rounded(x / scale * weights[f"{name}.weight"])

    def heads_of(x: Array, name: str, count: int) -> Array:
        out = rounded(x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0))
        return out.reshape(len(ids), count, size).transpose(1, 0, 2)

    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"
        h = norm(x, f"{block}.input_layernorm")
        q = rounded(rotate(heads_of(h, f"{block}.self_attn.q_proj", heads), angles))
        k = rounded(rotate(heads_of(h, f"{block}.self_attn.k_proj", kv_heads), angles))
        v = heads_of(h, f"{block}.self_attn.v_proj", kv_heads)
        visible = near if kinds[i] == "sliding_attention" else causal
        mixed = rounded(attention(q, k, v, visible)).transpose(1, 0, 2).reshape(len(ids), -1)
        x = rounded(x + rounded(mixed @ weights[f"{block}.self_attn.o_proj.weight"].T))
        h = norm(x, f"{block}.post_attention_layernorm")
        gate, up = (rounded(h @ weights[f"{block}.mlp.{n}_proj.weight"].T) for n in ("gate", "up"))
        inner = rounded(rounded(gate / (1 + np.exp(-gate))) * up)
        x = rounded(x + rounded(inner @ weights[f"{block}.mlp.down_proj.weight"].T))
    return rounded(norm(x, "model.norm") @ weights["lm_head.weight"].T)
