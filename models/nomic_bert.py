"""Nomic BERT (Nussbaum et al. 2024), the encoder of nomic-embed-text.

Knows: the differences from BERT, the parameter names of the original checkpoints and of
transformers. Must not know: pooling, devices.

Rope replaces the learned positions, the MLP is gated (SwiGLU), and only norms have biases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.encoder import Encoder, attend_inputs, rotate_inputs
from models.layers import GatedMLP, merge_heads, split_heads
from models.rope import Rope

# the keys of the original checkpoints -> those of transformers
_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}

# The values of the original keys that select the implemented variant. A missing key selects it.
_VARIANT: Mapping[str, Any] = {
    "activation_function": "swiglu",
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "parallel_block": False,
    "num_experts": None,
}

# part of an original name -> part of the name in transformers
_NAMES = (
    ("encoder.layers.", "layers."),
    ("emb_ln.", "embeddings.LayerNorm."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".mlp.fc11.", ".mlp.up_proj."),
    (".mlp.fc12.", ".mlp.gate_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
    (".norm1.", ".post_attention_layernorm."),
    (".norm2.", ".post_mlp_layernorm."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(decoder.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    NomicBertConfig."""

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 2048
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    rope_theta: float = 1000.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of transformers, or of the original checkpoints. The latter declare a
        context of 8,192 positions, which needs a scaling of rope that they do not declare; the
        model was trained with `max_trained_positions`."""
        named = {_KEYS.get(key, key): value for key, value in config.items()}
        for key, wanted in _VARIANT.items():
            if (value := named.get(key, wanted)) != wanted and value is not None:
                raise base.ModelError(f"config.json: {key} is {value!r}, which is not supported")
        positions = named.get("max_trained_positions") or named.get("n_positions")
        if named.get("max_position_embeddings") is None and positions is not None:
            named["max_position_embeddings"] = positions
        named = {key: value for key, value in named.items() if key not in _VARIANT}
        # `super()` without arguments fails here, because `slots=True` creates a new class
        return super(Config, cls).from_dict(named)


class Embeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, tokens: mx.array, segments: mx.array | None) -> mx.array:
        if segments is None:
            segments = mx.zeros_like(tokens)
        return self.LayerNorm(self.word_embeddings(tokens) + self.token_type_embeddings(segments))


class Attention(nn.Module):
    def __init__(self, config: Config, rope: Rope) -> None:
        super().__init__()
        self._heads, self._rope = config.num_attention_heads, rope
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        queries, keys, values = (
            split_heads(project(x)[None], self._heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = rotate_inputs(self._rope, queries, lengths)
        keys = rotate_inputs(self._rope, keys, lengths)
        scale = queries.shape[-1] ** -0.5
        seen = attend_inputs(queries, keys, values, lengths, scale=scale)
        return self.o_proj(merge_heads(seen)[0])


class Layer(nn.Module):
    def __init__(self, config: Config, rope: Rope) -> None:
        super().__init__()
        self.self_attn = Attention(config, rope)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_mlp_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        x = self.post_attention_layernorm(x + self.self_attn(x, lengths))
        return self.post_mlp_layernorm(x + self.mlp(x))


class Model(Encoder):
    def __init__(self, config: Config) -> None:
        super().__init__()
        rope = config.rope()
        self.embeddings = Embeddings(config)
        self.layers = [Layer(config, rope) for _ in range(config.num_hidden_layers)]

    def encode(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None = None
    ) -> mx.array:
        x = self.embeddings(tokens, segments)
        for layer in self.layers:
            x = layer(x, lengths)
        return x

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Renames the tensors of the original checkpoints, and splits their fused projections."""
        named: dict[str, mx.array] = {}
        for name, array in super().sanitize(weights).items():
            name = name.removeprefix("nomic_bert.")
            for old, new in _NAMES:
                name = name.replace(old, new)
            stem, fused, suffix = name.partition(".attn.Wqkv.")
            if fused:
                for part, rows in zip("qkv", mx.split(array, 3), strict=True):
                    named[f"{stem}.self_attn.{part}_proj.{suffix}"] = rows
            elif not name.startswith("pooler."):
                named[name] = array
        return named
