"""The Llama architecture in JAX, as far as needed to train the built-in model on a CPU.

Knows: tensors, under the names and in the layout of a Hugging Face Llama checkpoint. Must not know:
the optimizer, the corpus, the tokenizer, files. Needs the packages of requirements.txt; the server
does not import this module.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """The fields of config.json that determine shapes and numerics, under the same names."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        return asdict(self)


def initial_weights(shape: NetworkShape, key: jax.Array) -> Weights:
    """Initializes the weights: normal with standard deviation 0.02 for embeddings and in**-0.5 for
    matrices, with the two projections that write to the residual stream scaled down by the depth
    (GPT-2), and ones for norms. Matrices have shape (outputs, inputs)."""
    wide, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (queries, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (wide, queries),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }
    keychain = iter(jax.random.split(key, 1 + len(sizes) * shape.num_hidden_layers))

    def normal(size: tuple[int, int], deviation: float) -> jax.Array:
        return deviation * jax.random.normal(next(keychain), size, jnp.float32)

    weights = {"model.embed_tokens.weight": normal((shape.vocab_size, wide), 0.02)}
    shrink = (2 * shape.num_hidden_layers) ** -0.5
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name, size in sizes.items():
            writes = name.endswith(("o_proj", "down_proj"))
            deviation = size[1] ** -0.5 * (shrink if writes else 1.0)
            weights[f"{at}{name}.weight"] = normal(size, deviation)
        weights[f"{at}input_layernorm.weight"] = jnp.ones(wide)
        weights[f"{at}post_attention_layernorm.weight"] = jnp.ones(wide)
    weights["model.norm.weight"] = jnp.ones(wide)
    return weights


def logits(shape: NetworkShape, weights: Weights, ids: jax.Array, segments: jax.Array) -> jax.Array:
    """Maps token IDs (rows, length) to logits (rows, length, vocabulary).

    segments: the conversation of its row that each position belongs to. Attention never crosses
    from one to another, and rotary positions only enter as differences, so a conversation that is
    packed after others is computed exactly as if it were alone at position 0.
    """
    length = ids.shape[1]
    together = segments[:, :, None] == segments[:, None, :]
    mask = (together & jnp.tri(length, dtype=bool))[:, None, None]
    rotation = _rotation(shape, length)
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}."
        normed = _norm(shape, hidden, weights[f"{at}input_layernorm.weight"])
        hidden = hidden + _attention(shape, weights, f"{at}self_attn.", normed, mask, rotation)
        normed = _norm(shape, hidden, weights[f"{at}post_attention_layernorm.weight"])
        gate = jax.nn.silu(normed @ weights[f"{at}mlp.gate_proj.weight"].T)
        inner = gate * (normed @ weights[f"{at}mlp.up_proj.weight"].T)
        hidden = hidden + inner @ weights[f"{at}mlp.down_proj.weight"].T
    hidden = _norm(shape, hidden, weights["model.norm.weight"])
    return hidden @ weights["model.embed_tokens.weight"].T


def loss(
    shape: NetworkShape,
    weights: Weights,
    ids: jax.Array,
    segments: jax.Array,
    loss_weights: jax.Array,
) -> jax.Array:
    """The mean next-token cross entropy in nats, with each position weighted by `loss_weights`
    (rows, length), which are 0 outside the answers."""
    predicted = jax.nn.log_softmax(logits(shape, weights, ids[:, :-1], segments[:, :-1]))
    right = jnp.take_along_axis(predicted, ids[:, 1:, None], axis=-1)[..., 0]
    wanted = loss_weights[:, 1:]
    return -(right * wanted).sum() / jnp.maximum(wanted.sum(), 1)


def _norm(shape: NetworkShape, hidden: jax.Array, gain: jax.Array) -> jax.Array:
    mean_square = jnp.mean(hidden * hidden, axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(mean_square + shape.rms_norm_eps) * gain


def _rotation(shape: NetworkShape, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines, each (length, head_dim / 2)."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(length)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(heads: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies rope (Su et al., 2021) to (rows, heads..., length, head_dim): dimension i is paired
    with dimension i + head_dim / 2, as in Hugging Face checkpoints."""
    cosine, sine = rotation
    low, high = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def _attention(
    shape: NetworkShape,
    weights: Weights,
    at: str,
    hidden: jax.Array,
    mask: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Grouped-query attention: `group` query heads share each key and value head."""
    rows, length, _ = hidden.shape
    shared, dim = shape.num_key_value_heads, shape.head_dim
    group = shape.num_attention_heads // shared
    query = (hidden @ weights[f"{at}q_proj.weight"].T).reshape(rows, length, shared, group, dim)
    key = (hidden @ weights[f"{at}k_proj.weight"].T).reshape(rows, length, shared, dim)
    value = (hidden @ weights[f"{at}v_proj.weight"].T).reshape(rows, length, shared, dim)
    query = _rotate(query.transpose(0, 2, 3, 1, 4), rotation)
    key = _rotate(key.transpose(0, 2, 1, 3), rotation)
    scores = jnp.einsum("rsgqd,rskd->rsgqk", query, key) * dim**-0.5
    scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.einsum("rsgqk,rksd->rqsgd", scores, value)
    return mixed.reshape(rows, length, -1) @ weights[f"{at}o_proj.weight"].T
