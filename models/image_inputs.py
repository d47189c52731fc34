"""The image rows among the inputs of a model.

Knows: tensors, positions. Must not know: images, vision towers, layers, caches.

An image row is a position of a prompt whose input is a row of a vision tower's output instead of a
token's embedding. In a prompt, such a position has a negative ID, which identifies the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How a text model computes image rows.

    positions: "ordinary" if an image row has the position of its index, like text. "mrope" if it
    has three positions (models/mrope.py): then `ImageInputs.positions` is required, and the delta
    of a sequence must be set with `models.kv.set_position_delta` before each pass.
    atomic: whether all rows of an image must be computed in one chunk, because they attend to each
    other in both directions. Then `ImageInputs.groups` is required.
    """

    positions: Literal["ordinary", "mrope"] = "ordinary"
    atomic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInputs:
    """The image rows of a chunk [start, start + L) of the prompt of one sequence.

    rows: [N] int32, the indexes of the image rows in the chunk, increasing.
    features: [N, D], their inputs.
    deepstack: for each of the first layers, [N, D] that is added to its output at these rows.
    positions: [3, L] int32, of all tokens of the chunk (`models.mrope.make_positions`). None for
    ordinary positions.
    groups: ranges [start, end) of indexes in the prompt. The tokens of a range attend to each other
    in both directions, in the layers where the model does this.
    """

    rows: mx.array
    features: mx.array
    deepstack: Sequence[mx.array] = ()
    positions: mx.array | None = None
    groups: Sequence[tuple[int, int]] = ()

    def insert(self, x: mx.array) -> mx.array:
        """Returns embeddings [1, L, D] with the features at the image rows."""
        x = mx.array(x)  # assignments replace the content of the object
        x[:, self.rows] = self.features.astype(x.dtype)
        return x

    def add_deepstack(self, x: mx.array, layer: int) -> mx.array:
        """Returns the output [1, L, D] of a layer with the features of this layer added."""
        if layer >= len(self.deepstack):
            return x
        return x.at[:, self.rows].add(self.deepstack[layer].astype(x.dtype))


def to_model_ids(ids: Sequence[int]) -> list[int]:
    """Returns token IDs of a prompt as the model reads them. Image rows become 0: MLX does not
    check the bounds of an index, and the embedding of an image row is replaced anyway."""
    return [max(token, 0) for token in ids]
