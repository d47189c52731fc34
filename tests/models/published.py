"""Configs and tensor names of well-known published checkpoints.

The data is in published.json. It was written by hand, without access to a model hub: configs and
tensor names from memory or from public quotations, numbers of parameters from public quotations
except for those marked "remembered". The evidence for them is that names, shapes and numbers agree
to the last parameter. Fields of each checkpoint:

    source       source of the number of parameters, and what was subtracted from it
    config       config.json, without the keys that do not affect the architecture
    tensors      names and shapes; a name can be a pattern for several tensors:
                 `*` all layers · `f`, `s`, `r` the layers of that kind · `0-7` these numbers
    other_types  suffix of names -> type of these tensors, if it is not bfloat16
    parameters   number in the text part; a tied head counts once, packed values count singly
    layers       kind of each layer: f full attention, s sliding window, n full attention without
                 positions, r recurrent
    rope         for each kind: theta, rotated dimensions, the factors by which the fastest and the
                 slowest rotation are slowed down, and the magnitude
    attention_width  scores are divided by its square root
    eps          of norms
    kv_bytes     bytes per position, in bfloat16
    state_bytes  bytes of recurrent layers, independent of the length
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
    """One checkpoint; the module docstring describes the fields."""

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
        """All tensors. Do not evaluate them: they are up to 160 GB of zeros."""
        return {
            name: mx.zeros(shape, self._type(name))
            for pattern, shape in self.tensors.items()
            for name in self._names(pattern)
        }

    def _type(self, name: str) -> mx.Dtype:
        matches = (kind for end, kind in self.other_types.items() if name.endswith(end))
        return getattr(mx, next(matches, "bfloat16"))

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


def load_published() -> list[Published]:
    file = Path(__file__).with_suffix(".json")
    return [Published(**found) for found in json.loads(file.read_text(encoding="utf-8"))]


def periods(rope: Mapping[str, float]) -> tuple[float, float]:
    """Positions per radian of the fastest and of the slowest rotation."""
    slowest = rope["theta"] ** (1 - 2 / rope["dims"])
    assert math.isfinite(slowest)
    return rope["fastest"], slowest * rope["slowest"]
