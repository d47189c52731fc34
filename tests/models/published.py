"""Well-known checkpoints as they are published: what config.json says, which tensors there are.

The facts lie in published.json. They were written down by hand without a hub at hand: configs and
names of tensors as remembered or quoted elsewhere in public, numbers of parameters as quoted in
public but for those that say "remembered". That names, shapes and numbers agree to the last
parameter is what speaks for them. Of each checkpoint:

    source       where its number of parameters is known from, and what was subtracted from it
    config       config.json, less what says nothing of the architecture
    tensors      names and shapes; a name may stand for several:
                 `*` all layers · `f`, `s`, `r` the layers of that kind · `0-7` these numbers
    other_types  what names end with -> the type of such tensors, where it is not bfloat16
    parameters   of the text part, a tied head counted once, packed numbers one by one
    layers       of which kind each is: f sees everything, s through a window, n everything but
                 knows no positions, r is recurrent
    rope         for each kind: theta, rotated dimensions, by how much the fastest and the slowest
                 rotation are slowed down, and what is multiplied
    attention_width  scores are divided by the square root of it
    eps          of norms
    kv_bytes     of one more position of a text, in bfloat16
    state_bytes  of recurrent layers, however long the text
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One checkpoint; fields as the head of this file tells."""

    name: str
    source: str
    config: Mapping[str, Any]
    context: int
    vocab: int
    parameters: int
    kv_bytes: int
    state_bytes: int
    layers: str
    window: int | None
    rope: Mapping[str, Mapping[str, float]]
    attention_width: int
    eps: float
    tensors: Mapping[str, tuple[int, ...]]
    other_types: Mapping[str, str]

    def weights(self) -> dict[str, mx.array]:
        """All its tensors, which nobody must evaluate: they are up to 160 GB of zeros."""
        return {
            name: mx.zeros(shape, self._type(name))
            for pattern, shape in self.tensors.items()
            for name in self._names(pattern)
        }

    def _type(self, name: str) -> mx.Dtype:
        given = (kind for end, kind in self.other_types.items() if name.endswith(end))
        return getattr(mx, next(given, "bfloat16"))

    def _names(self, pattern: str) -> Iterator[str]:
        return map(".".join, product(*map(self._choices, pattern.split("."))))

    def _choices(self, part: str) -> list[str]:
        if part == "*":
            return [str(layer) for layer in range(len(self.layers))]
        if part in ("f", "s", "r"):
            return [str(layer) for layer, kind in enumerate(self.layers) if kind == part]
        if ends := re.fullmatch(r"(\d+)-(\d+)", part):
            return [str(number) for number in range(int(ends[1]), int(ends[2]) + 1)]
        return [part]


def published() -> list[Published]:
    file = Path(__file__).with_suffix(".json")
    return [Published(**found) for found in json.loads(file.read_text(encoding="utf-8"))]


def periods(rope: Mapping[str, float]) -> tuple[float, float]:
    """Positions per radian of the fastest and of the slowest rotation."""
    slowest = rope["theta"] ** (1 - 2 / rope["dims"])
    assert math.isfinite(slowest)
    return rope["fastest"], slowest * rope["slowest"]
