"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2019), as encoders for embeddings and
scores.

Knows: the differences from BERT. Must not know: pooling, devices.

The table of positions begins with unused rows: the first token has the position after that of the
padding token. There is one segment. The classification head has its own dense layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from models import base, bert
from models.encoder import first_positions

_PREFIX = "roberta."


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(bert.Config):
    """The keys of config.json that this architecture reads, with the defaults of Hugging Face's
    XLMRobertaConfig. max_position_embeddings: the number of positions that an input can have, less
    than in config.json by the unused rows."""

    type_vocab_size: int = 1
    pad_token_id: int = 1

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        padding, rows = config.get("pad_token_id", 1), config.get("max_position_embeddings", 512)
        if isinstance(padding, int) and isinstance(rows, int):
            if not 0 <= padding < rows - 1:
                raise base.ModelError(
                    f"config.json: pad_token_id is {padding}, but must be less than "
                    f"max_position_embeddings - 1 ({rows - 1})"
                )
            config = {**config, "max_position_embeddings": rows - padding - 1}
        # `super()` without arguments fails here, because `slots=True` creates a new class
        return super(Config, cls).from_dict(config)


class ClassificationHead(nn.Module):
    def __init__(self, width: int, num_scores: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, num_scores)

    def __call__(self, x: mx.array) -> mx.array:
        return self.out_proj(mx.tanh(self.dense(x)))


class Model(bert.Bert):
    def __init__(self, config: Config) -> None:
        super().__init__(config, offset=config.pad_token_id + 1)
        if self.num_scores:
            self.classifier = ClassificationHead(config.hidden_size, self.num_scores)

    def encode(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None = None
    ) -> mx.array:
        return super().encode(tokens, lengths)

    def score(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        return self.classifier(first_positions(hidden, lengths))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops the pooler, which the head does not use."""
        named = {name.removeprefix(_PREFIX): array for name, array in weights.items()}
        return {
            name: array
            for name, array in super().sanitize(named).items()
            if not name.startswith("pooler.")
        }
