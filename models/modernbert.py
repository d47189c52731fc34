"""ModernBERT (Warner et al. 2024), as an encoder for embeddings and scores.

Knows: the layers, the parameter names. Must not know: pooling, devices.

Norms precede the sublayers, except for the first attention, which follows the norm of the
embeddings. Every third layer attends to the whole input, the others to a window of
`local_attention` tokens, with a different rope. The MLP is gated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from models import base, decoder
from models.encoder import (
    Encoder,
    attend_inputs,
    count_scores,
    first_positions,
    mean_positions,
    rotate_inputs,
)
from models.layers import ACTIVATIONS, Activation, merge_heads, split_heads
from models.rope import Rope, make_rope

_PREFIX = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    ModernBertConfig."""

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    global_attn_every_n_layers: int = 3
    layer_types: Sequence[str] | None = None
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_parameters: Mapping[str, Any] | None = None
    architectures: Sequence[str] = ()
    num_labels: int = 2
    id2label: Mapping[str, Any] | None = None
    classifier_pooling: str = "cls"
    classifier_activation: str = "gelu"
    classifier_bias: bool = False

    def layer_type(self, layer: int) -> str:
        if self.layer_types is None:
            return decoder.SLIDING if layer % self.global_attn_every_n_layers else decoder.FULL
        if len(self.layer_types) != self.num_hidden_layers:
            raise base.ModelError("config.json's layer_types must have one entry per layer")
        if (kind := self.layer_types[layer]) not in (decoder.FULL, decoder.SLIDING):
            raise base.ModelError(f"a layer of type {kind!r} is not supported")
        return kind

    def rope(self, layer_type: str) -> Rope:
        theta = self.global_rope_theta
        if layer_type == decoder.SLIDING and self.local_rope_theta is not None:
            theta = self.local_rope_theta
        declared: Any = (self.rope_parameters or {}).get(layer_type)
        scaling = cast(Mapping[str, Any], declared) if isinstance(declared, Mapping) else None
        if scaling is not None:
            theta = scaling.get("rope_theta", theta)
        return make_rope(
            dims=self.hidden_size // self.num_attention_heads,
            theta=theta,
            max_positions=self.max_position_embeddings,
            scaling=scaling,
        )

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.hidden_size, self.norm_eps, bias=self.norm_bias)

    @property
    def num_scores(self) -> int:
        return count_scores(self.architectures, self.id2label or self.num_labels)


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise base.ModelError(f"the activation {name!r} is not supported")
    return ACTIVATIONS[name]


class Attention(nn.Module):
    """window: the maximum distance between a query and a key; None for no maximum."""

    def __init__(self, config: Config, rope: Rope, window: int | None) -> None:
        super().__init__()
        self._heads, self._rope, self._window = config.num_attention_heads, rope, window
        width = config.hidden_size
        self.Wqkv = nn.Linear(width, 3 * width, bias=config.attention_bias)
        self.Wo = nn.Linear(width, width, bias=config.attention_bias)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        queries, keys, values = (
            split_heads(part[None], self._heads) for part in mx.split(self.Wqkv(x), 3, axis=-1)
        )
        queries = rotate_inputs(self._rope, queries, lengths)
        keys = rotate_inputs(self._rope, keys, lengths)
        scale = queries.shape[-1] ** -0.5
        seen = attend_inputs(queries, keys, values, lengths, scale=scale, window=self._window)
        return self.Wo(merge_heads(seen)[0])


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._activation = _activation(config.hidden_activation)
        inner, bias = config.intermediate_size, config.mlp_bias
        self.Wi = nn.Linear(config.hidden_size, 2 * inner, bias=bias)
        self.Wo = nn.Linear(inner, config.hidden_size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        hidden, gate = mx.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self._activation(hidden) * gate)


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int, ropes: Mapping[str, Rope]) -> None:
        super().__init__()
        kind = config.layer_type(layer)
        window = config.local_attention // 2 if kind == decoder.SLIDING else None
        self.attn_norm = config.norm() if layer else None
        self.attn = Attention(config, ropes[kind], window)
        self.mlp_norm = config.norm()
        self.mlp = MLP(config)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        normed = x if self.attn_norm is None else self.attn_norm(x)
        x = x + self.attn(normed, lengths)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._activation = _activation(config.classifier_activation)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.norm = config.norm()

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(self._activation(self.dense(x)))


class Model(Encoder):
    def __init__(self, config: Config) -> None:
        super().__init__(config.num_scores)
        if config.classifier_pooling not in ("cls", "mean"):
            raise base.ModelError(
                f"classifier_pooling {config.classifier_pooling!r} is not supported"
            )
        self._pool = first_positions if config.classifier_pooling == "cls" else mean_positions
        ropes = {kind: config.rope(kind) for kind in (decoder.FULL, decoder.SLIDING)}
        self.embeddings = {
            "tok_embeddings": nn.Embedding(config.vocab_size, config.hidden_size),
            "norm": config.norm(),
        }
        self.layers = [Layer(config, layer, ropes) for layer in range(config.num_hidden_layers)]
        self.final_norm = config.norm()
        if self.num_scores:
            self.head = Head(config)
            self.classifier = nn.Linear(config.hidden_size, self.num_scores)

    def encode(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None = None
    ) -> mx.array:
        x = self.embeddings["norm"](self.embeddings["tok_embeddings"](tokens))
        for layer in self.layers:
            x = layer(x, lengths)
        return self.final_norm(x)

    def score(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        return self.classifier(self.head(self._pool(hidden, lengths)))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the head of a model for masked language modeling."""
        named = {name.removeprefix(_PREFIX): array for name, array in weights.items()}
        return {
            name: array
            for name, array in super().sanitize(named).items()
            if self.num_scores or not name.startswith("head.")
        }
