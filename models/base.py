"""The contract between an architecture and everybody else.

Knows: what a model is (ids and layer caches in, hidden states out, logits on demand). Must not
know: which architectures there are, where weights come from, who calls.

An architecture is one file, named as `model_type` in config.json, that exports `Config` and
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
    """A checkpoint that cannot become a model; the message names what is wrong with it."""


class Config:
    """Base of the frozen dataclass in which an architecture lists the keys that it reads."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Take the keys that the architecture knows; null is like not there. Raises ModelError,
        naming the key, for a missing one without default and for a value of the wrong type or
        beyond all reason."""
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

    batch_invariant: whether a position's logits are the same to the bit in a batch and alone, in
    one piece with others and after them, where that holds of each operation (`models.cpu_layout`).
    False where two ways lead to the same numbers, and how many positions there are decides.
    """

    batch_invariant: ClassVar[bool]

    def __call__(self, tokens: mx.array, kv: Sequence[object]) -> mx.array:
        """[B, L] ids, appended to `kv` -> hidden states [B, L, D], final norm applied.

        kv: what `make_kv` made, for one sequence; or, for one new token of each of B sequences,
        what `LayerCache.make_batch` made of theirs. The layers cannot tell the difference.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] hidden states -> [..., V] logits. Apart from __call__, so that a prefill never
        pays for logits that nobody reads."""
        ...

    def make_kv(self) -> list[LayerCache]:
        """Empty caches, one a layer, each of the kind that the layer needs."""
        ...

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Checkpoint names -> our names; drops tensors that are known to be redundant."""
        ...

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        """Forget positions [start, end) of one sequence; those behind move up, keys re-rotated.
        False, and nothing has changed, where a layer cannot."""
        ...
