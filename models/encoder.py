"""Encoders: models whose tokens attend to each other in both directions. They compute hidden states
of whole inputs, for embeddings and for scores, and cannot generate text.

Knows: packed inputs, attention in both directions. Must not know: architectures, the pooling of
embeddings, engines.

A forward pass computes several inputs, which are packed: their tokens follow each other in one
row, without padding. Linear layers and norms process all tokens together. Attention processes each
input separately, so the hidden states of an input do not depend on the other inputs.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from models.base import ModelError, SelectPositions, select_all
from models.image_inputs import ImageInputs, ImageRules
from models.kv import LayerCache
from models.rope import Rope
from models.sdpa import scaled_dot_product_attention

# The number of queries of a layer with a window that are computed together. Their keys are those in
# the block and in a window on both sides.
_WINDOW_BLOCK = 128

# The parts of a checkpoint that are used only for training: the head of masked language modeling,
# and buffers with the numbers 0, 1, 2, …
_UNUSED_PREFIXES = ("cls.", "lm_head.", "decoder.", "head.decoder.")
_UNUSED_SUFFIXES = ("position_ids", "token_type_ids", "rotary_emb.inv_freq")


class Encoder(nn.Module):
    """The base class of encoders. It implements `models.base.Model`, which the engine uses to
    measure memory. It has no layer caches.

    num_scores: the number of scores that `score` returns; 0 if the checkpoint has no head for them.
    """

    batch_invariant: ClassVar[bool] = True
    selects_logits: ClassVar[bool] = False

    def __init__(self, num_scores: int = 0) -> None:
        super().__init__()
        self.kv_dtype: mx.Dtype | None = None
        self.image_rules: ImageRules | None = None
        self.num_scores = num_scores

    def encode(
        self, tokens: mx.array, lengths: Sequence[int], segments: mx.array | None = None
    ) -> mx.array:
        """Returns the hidden states [T, D] of packed inputs with tokens [T]. lengths: the number of
        tokens of each input. segments: [T], the segment of each token, 0 or 1; None if all are 0.
        """
        raise NotImplementedError

    def score(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        """Returns the scores [B, num_scores] of packed inputs, before any sigmoid or softmax.
        hidden: the result of `encode`. Requires `num_scores` > 0."""
        raise NotImplementedError

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[object],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        assert images is None
        batch, length = tokens.shape
        hidden = self.encode(tokens.reshape(-1), [length] * batch)
        return select(hidden.reshape(batch, length, -1))

    def logits(self, hidden: mx.array) -> mx.array:
        """Returns its argument, because an encoder has no output layer."""
        return hidden

    def make_kv(self) -> list[LayerCache]:
        return []

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        return False

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops tensors that are used only for training."""
        return {
            name: array
            for name, array in weights.items()
            if not name.startswith(_UNUSED_PREFIXES) and not name.endswith(_UNUSED_SUFFIXES)
        }


def first_positions(hidden: mx.array, lengths: Sequence[int]) -> mx.array:
    """Returns the hidden states [B, D] of the first token of each packed input, from [T, D]."""
    return hidden[mx.array(_starts(lengths))]


def mean_positions(hidden: mx.array, lengths: Sequence[int]) -> mx.array:
    """Returns the mean [B, D] of the hidden states of each packed input, from [T, D]."""
    return mx.stack([mx.mean(part, axis=0) for part in split_inputs(hidden, lengths)])


def position_ids(lengths: Sequence[int]) -> mx.array:
    """Returns the position [T] of each token in its input."""
    return mx.concatenate([mx.arange(length) for length in lengths])


def split_inputs(x: mx.array, lengths: Sequence[int], axis: int = 0) -> list[mx.array]:
    """Splits an axis with packed tokens into the inputs."""
    # MLX's stub has the wrong type
    parts: Any = mx.split(x, list(accumulate(lengths))[:-1], axis=axis)
    return cast(list[mx.array], parts)


def rotate_inputs(rope: Rope, x: mx.array, lengths: Sequence[int]) -> mx.array:
    """Rotates packed queries or keys [1, H, T, D]. Each input begins at position 0."""
    return mx.concatenate([rope(part, 0) for part in split_inputs(x, lengths, axis=2)], axis=2)


def attend_inputs(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Computes attention in both directions within each packed input. Returns [1, Hq, T, Dv].

    queries: [1, Hq, T, D]. keys: [1, Hkv, T, D]. values: [1, Hkv, T, Dv]. window: the maximum
    distance between a query and a key; None for no maximum.
    """
    parts = zip(*(split_inputs(x, lengths, axis=2) for x in (queries, keys, values)), strict=True)
    attend = partial(scaled_dot_product_attention, mask=None)
    if window is not None:
        attend = partial(_attend_windows, window=window)
    return mx.concatenate([attend(*part, scale=scale) for part in parts], axis=2)


def _attend_windows(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, window: int
) -> mx.array:
    length = queries.shape[2]
    if length <= window + 1:
        return scaled_dot_product_attention(queries, keys, values, scale=scale, mask=None)
    results: list[mx.array] = []
    for start in range(0, length, _WINDOW_BLOCK):
        end = min(start + _WINDOW_BLOCK, length)
        low, high = max(0, start - window), min(length, end + window)
        distance = mx.abs(mx.arange(start, end)[:, None] - mx.arange(low, high)[None])
        results.append(
            scaled_dot_product_attention(
                queries[:, :, start:end],
                keys[:, :, low:high],
                values[:, :, low:high],
                scale=scale,
                mask=distance <= window,
            )
        )
    return mx.concatenate(results, axis=2)


def count_scores(architectures: Sequence[str], labels: object) -> int:
    """Returns the number of scores of the checkpoint's head, or 0. architectures: the key of this
    name in config.json. labels: the number of labels, or a mapping of their names."""
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return 0
    count = len(labels) if isinstance(labels, dict) else labels
    if not isinstance(count, int) or not 1 <= count <= 1000:
        raise ModelError("config.json has no valid number of labels (num_labels or id2label)")
    return count


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]
