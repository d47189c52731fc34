"""Ministral 3 (Mistral AI 2025) is a Mistral whose queries are scaled by position.

Knows: the scale of a query at a position. Must not know: devices, kernels, types of caches.

With thousands of keys, the softmax becomes flat. Queries are therefore scaled up with their
position, by one step per original context length, as in Llama 4 (Meta 2025; Nakanishi 2025).
"""

from dataclasses import dataclass

import mlx.core as mx

from models import decoder, llama, mistral
from models.base import ModelError
from models.kv import AttentionCache
from models.layers import GatedMLP, merge_heads, split_heads
from models.prenorm import PreNormBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(mistral.Config):
    """The keys of config.json that this architecture reads."""

    rms_norm_eps: float = 1e-5
    head_dim: int | None = 128


class Attention(llama.Attention):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.beta, self.original_length = read_query_scaling(config)

    def __call__(self, x: mx.array, kv: AttentionCache) -> mx.array:
        queries = self.rope(split_heads(self.q_proj(x), self.heads), kv.positions)
        keys = self.rope(split_heads(self.k_proj(x), self.kv_heads), kv.positions)
        values = split_heads(self.v_proj(x), self.kv_heads)
        # this must happen before `attend`, which advances the offset
        scales = compute_query_scales(
            x.shape[1], kv.positions, beta=self.beta, original_length=self.original_length
        )
        queries = queries * scales.astype(queries.dtype)
        return self.o_proj(merge_heads(kv.attend(queries, keys, values, scale=self.scale)))


class Block(PreNormBlock):
    def __init__(self, config: Config, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation())
        super().__init__(config, Attention(config, layer), mlp, window=config.window(layer))


class Model(decoder.CausalLM):
    def __init__(self, config: Config) -> None:
        blocks = [Block(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, decoder.Backbone(config, blocks))


def read_query_scaling(config: decoder.Config) -> tuple[float, int]:
    """Returns (weight of a step, positions per step), read from `rope_parameters`."""
    _, parameters = config.rope_settings()
    given = parameters or {}
    try:
        beta, length = given["llama_4_scaling_beta"], given["original_max_position_embeddings"]
    except KeyError as missing:
        raise ModelError(f"config.json's rope_parameters lacks {missing}") from None
    if not isinstance(beta, int | float) or not isinstance(length, int) or length < 1:
        raise ModelError(
            f"llama_4_scaling_beta {beta!r} with original_max_position_embeddings {length!r} is "
            "invalid"
        )
    return beta, length


def compute_query_scales(
    count: int, offset: int | mx.array, *, beta: float, original_length: int
) -> mx.array:
    """Returns 1 + beta * log(1 + number of steps) at the positions from `offset` on, as [B or 1, 1,
    L, 1]."""
    positions = mx.array(offset).reshape(-1, 1) + mx.arange(count)
    return (1 + beta * mx.log1p(positions // original_length))[:, None, :, None]
