"""BERT (Devlin et al. 2018), as an encoder for embeddings and scores.

Knows: the layers, the parameter names. Must not know: pooling, devices.

Learned positions and segments are added to the embeddings. Each sublayer is followed by the sum
with its input and a norm. The activation is GELU. A checkpoint with a classification head
(`BertForSequenceClassification`) computes its scores from the first token, through the pooler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models import base
from models.encoder import Encoder, attend_inputs, count_scores, first_positions, position_ids
from models.layers import ACTIVATIONS, Activation, merge_heads, split_heads

# models of this library save tensors of the encoder with this prefix if they have a head
_PREFIX = "bert."


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(base.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    BertConfig."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    architectures: Sequence[str] = ()
    num_labels: int = 2
    id2label: Mapping[str, Any] | None = None

    def activation(self) -> Activation:
        if self.hidden_act not in ACTIVATIONS:
            raise base.ModelError(f"hidden_act {self.hidden_act!r} is not supported")
        return ACTIVATIONS[self.hidden_act]

    def check_supported(self) -> None:
        """Raises ModelError for variants of the architecture that are not implemented."""
        if self.position_embedding_type != "absolute":
            raise base.ModelError(
                f"position_embedding_type {self.position_embedding_type!r} is not supported"
            )
        if self.is_decoder:
            raise base.ModelError("a BERT with is_decoder is not supported")

    @property
    def num_scores(self) -> int:
        return count_scores(self.architectures, self.id2label or self.num_labels)


class Embeddings(nn.Module):
    """offset: the index of the first position in the table of positions."""

    def __init__(self, config: Config, offset: int = 0) -> None:
        super().__init__()
        width = config.hidden_size
        self._offset = offset
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings + offset, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)

    def __call__(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None
    ) -> mx.array:
        if segments is None:
            segments = mx.zeros_like(tokens)
        x = self.word_embeddings(tokens) + self.token_type_embeddings(segments)
        return self.LayerNorm(x + self.position_embeddings(position_ids(lengths) + self._offset))


class SelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        width = config.hidden_size
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        queries, keys, values = (
            split_heads(project(x)[None], self._heads)
            for project in (self.query, self.key, self.value)
        )
        scale = queries.shape[-1] ** -0.5
        return merge_heads(attend_inputs(queries, keys, values, lengths, scale=scale))[0]


class Residual(nn.Module):
    """A linear layer, the sum with the residual, and a norm."""

    def __init__(self, config: Config, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Residual(config, config.hidden_size)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        return self.output(self.self(x, lengths), x)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self._activation = config.activation()
        self.attention = Attention(config)
        self.intermediate = {"dense": nn.Linear(config.hidden_size, config.intermediate_size)}
        self.output = Residual(config, config.intermediate_size)

    def __call__(self, x: mx.array, lengths: Sequence[int]) -> mx.array:
        x = self.attention(x, lengths)
        return self.output(self._activation(self.intermediate["dense"](x)), x)


class Bert(Encoder):
    """The encoder of BERT and RoBERTa, without a head. offset: see `Embeddings`."""

    def __init__(self, config: Config, offset: int = 0) -> None:
        config.check_supported()
        super().__init__(config.num_scores)
        self.embeddings = Embeddings(config, offset)
        self.encoder = {"layer": [Layer(config) for _ in range(config.num_hidden_layers)]}

    def encode(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None = None
    ) -> mx.array:
        x = self.embeddings(tokens, lengths, segments)
        for layer in self.encoder["layer"]:
            x = layer(x, lengths)
        return x


class Model(Bert):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.num_scores:
            self.pooler = {"dense": nn.Linear(config.hidden_size, config.hidden_size)}
            self.classifier = nn.Linear(config.hidden_size, self.num_scores)

    def score(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        pooled = mx.tanh(self.pooler["dense"](first_positions(hidden, lengths)))
        return self.classifier(pooled)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the pooler of a model without a head, and renames old norms."""
        return {
            _rename(name): array
            for name, array in super().sanitize(weights).items()
            if self.num_scores or not name.removeprefix(_PREFIX).startswith("pooler.")
        }


def _rename(name: str) -> str:
    name = name.removeprefix(_PREFIX)
    # the names of TensorFlow's checkpoints
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
