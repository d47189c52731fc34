"""The interface of an architecture.

Knows: the definition of a model (it takes tokens and layer caches, returns hidden states, and
computes logits on demand). Must not know: individual architectures, where weights come from,
callers.

An architecture is one file that exports `Config` and `Model`. The file is named after the
`model_type` in config.json. It defines Attention, MLP, Block and Model in this order. Parameters
have the same names as in the checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol, Self, get_type_hints

import mlx.core as mx

from models.config_check import find_inconsistency, find_invalid_value
from models.image_inputs import ImageInputs, ImageRules
from models.kv import LayerCache

# A function that returns some of the positions of hidden states: [B, L, D] -> [B', L', D].
SelectPositions = Callable[[mx.array], mx.array]


def select_all(hidden: mx.array) -> mx.array:
    """Returns its argument."""
    return hidden


def select_last(hidden: mx.array) -> mx.array:
    """Returns the last position of each sequence: [B, L, D] -> [B, 1, D]."""
    return hidden[:, -1:]


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns the name without MLX's prefix, such as `bfloat16`."""
    return str(dtype).removeprefix("mlx.core.")


class ModelError(ValueError):
    """The checkpoint cannot be loaded as a model. The message gives the reason."""


class Config:
    """The base class of a frozen dataclass that lists the config keys of an architecture."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys that the architecture uses. A null value counts as missing. Raises
        ModelError for a missing key without a default, and for a value of the wrong type or out of
        range. The message names the key."""
        known = fields(cls)
        given = {f.name: config[f.name] for f in known if config.get(f.name) is not None}
        missing = [
            f.name
            for f in known
            if f.default is MISSING and f.default_factory is MISSING and f.name not in given
        ]
        if missing:
            raise ModelError(f"config.json lacks {', '.join(missing)}")
        if wrong := find_invalid_value(given, get_type_hints(cls)):
            raise ModelError(f"config.json: {wrong}")
        made = cls(**given)
        if wrong := find_inconsistency({f.name: getattr(made, f.name) for f in known}):
            raise ModelError(f"config.json: {wrong}")
        return made


class Model(Protocol):
    """The model that `build` returns. Implementations are subclasses of mlx.nn.Module.

    batch_invariant: whether the logits of a position are bit-identical for an unbatched sequence
    and in a batch, and for every split of the prompt into chunks, provided that each operation is
    batch-invariant (`models.cpu_layout`). It is False if the model chooses between two equivalent
    computations based on the number of positions.
    selects_logits: whether `__call__` returns logits, and only those of the selected positions, so
    that a selection saves work on every device.
    kv_dtype: the type of the caches that `make_kv` returns, see `models.kv.set_kv_dtype`.
    image_rules: how image rows are computed; None if the implementation does not support them.
    """

    batch_invariant: ClassVar[bool]
    selects_logits: ClassVar[bool]
    kv_dtype: mx.Dtype | None
    image_rules: ImageRules | None

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[object],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        """Appends tokens [B, L] to `kv` and returns select(hidden), where `hidden` are their hidden
        states [B, L, D] after the final norm.

        kv: for one sequence, the caches returned by `make_kv`. For one new token in each of B
        sequences, the batches built from their caches by `LayerCache.make_batch`. Layers use both
        in the same way.
        select: the positions that the caller needs. The last layer computes its MLP only for them.
        If each operation is batch-invariant, this does not change the bits of the result.
        images: the image rows among the tokens, for a chunk of one sequence, if the model has
        `image_rules`. The tokens of these rows are 0 (`models.image_inputs.to_model_ids`).
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Returns the logits [..., V] of hidden states [..., D]. This is a separate method, so that
        prefill does not compute unused logits."""
        ...

    def make_kv(self) -> list[LayerCache]:
        """Returns empty caches, one per layer that needs a cache, of the type that it needs."""
        ...

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts checkpoint names to our names, and drops tensors that are known to be
        redundant."""
        ...

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        """Removes positions [start, end) of one sequence. The following positions move up, and
        their keys are rotated accordingly. If a layer does not support this, returns False and
        changes nothing."""
        ...
