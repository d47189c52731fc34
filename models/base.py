"""The interface of an architecture.

Knows: what a model is (ids and layer caches in, hidden states out, logits on demand). Must not
know: which architectures there are, where weights come from, who calls.

An architecture is one file, named after the `model_type` in config.json, that exports `Config` and
`Model`. It reads top-down: Attention, MLP, Block, Model. Parameter names are those of the
checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol, Self, get_type_hints

import mlx.core as mx

from models.config_check import find_inconsistency, find_invalid_value
from models.kv import LayerCache


class ModelError(ValueError):
    """A checkpoint that cannot be loaded as a model; the message says why."""


class Config:
    """Base class of the frozen dataclass that lists the config keys of an architecture."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read the keys that the architecture uses; null counts as missing. Raises ModelError,
        naming the key, for a missing key without a default and for a value of the wrong type or out
        of range."""
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
    """What `models.build` returns. Implementations are mlx.nn.Module.

    batch_invariant: whether a position's logits are bitwise equal alone and in a batch, and however
    the prompt is split, provided that each operation is (`models.cpu_layout`). False if the model
    chooses between two equivalent computations by the number of positions.
    """

    batch_invariant: ClassVar[bool]

    def __call__(self, tokens: mx.array, kv: Sequence[object]) -> mx.array:
        """[B, L] ids, appended to `kv` -> hidden states [B, L, D], after the final norm.

        kv: for one sequence, what `make_kv` returned; for one new token of each of B sequences,
        what `LayerCache.make_batch` made of their caches. Layers use both in the same way.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] hidden states -> [..., V] logits. Separate from __call__, so that prefill does
        not compute logits that are not used."""
        ...

    def make_kv(self) -> list[LayerCache]:
        """Empty caches, one per layer, each of the kind that the layer needs."""
        ...

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Checkpoint names -> our names; drops tensors that are known to be redundant."""
        ...

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        """Remove positions [start, end) of one sequence; the later ones move up, with their keys
        rotated accordingly. Returns False, with nothing changed, if a layer does not support it."""
        ...
