"""Cutting a sequence's layer caches back, all or none of them.

Knows: layer caches as `LayerKV`. Must not know: ids, policies.
"""

from collections.abc import Sequence

from app.core.ports import Layer


def can_trim_to(kv: Sequence[Layer], length: int) -> bool:
    return all(layer.can_trim(layer.offset - length) for layer in kv)


def trim_to(kv: Sequence[Layer], length: int) -> None:
    for layer in kv:
        layer.trim(layer.offset - length)
