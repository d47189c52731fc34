"""A toy architecture with one layer of each kind of cache, for tests of the engine's contract;
prepared for the device like every model that the engine loads.

Layer 0 attends to everything, layer 1 through a window, layer 2 keeps a decaying sum.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from models.base import SelectPositions, select_all
from models.cpu_layout import apply_cpu_layout
from models.image_inputs import ImageInputs, ImageRules
from models.kv import KVCache, LayerCache, set_kv_dtype
from models.recurrent import RecurrentCache
from models.rope import make_rope
from models.rotating_kv import RotatingKVCache
from tests import tiny

WIDTH, HEADS, WINDOW, DECAY = 16, 2, 6, 0.9


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self._rope = make_rope(dims=WIDTH // HEADS, theta=10000.0, max_positions=4096)

    def __call__(self, x: mx.array, kv: Any) -> mx.array:
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, HEADS, -1).transpose(0, 2, 1, 3)
            for part in mx.split(self.qkv(x), 3, axis=-1)
        )
        q, k = self._rope(q, kv.positions), self._rope(k, kv.positions)
        out = kv.attend(q, k, v, scale=(WIDTH // HEADS) ** -0.5)
        return out.transpose(0, 2, 1, 3).reshape(batch, length, -1)


class Recur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)

    def __call__(self, x: mx.array, kv: RecurrentCache) -> mx.array:
        state = kv[0]
        if state is None:
            state = mx.zeros((x.shape[0], WIDTH))
        drive, out = self.into(x), []
        for position in range(x.shape[1]):
            state = DECAY * state + drive[:, position]
            out.append(state)
        kv[0] = state
        kv.advance(x.shape[1])
        return mx.stack(out, axis=1)


class Model(nn.Module):
    batch_invariant: ClassVar[bool] = False
    selects_logits: ClassVar[bool] = False

    def __init__(self, seed: int = 0, kinds: str = "kwr") -> None:
        """kinds: k for full attention, w for windowed, r for recurrent; one letter a layer."""
        super().__init__()
        self.kinds = kinds
        self.kv_dtype: mx.Dtype | None = None
        self.image_rules: ImageRules | None = ImageRules()
        self.embed = nn.Embedding(tiny.VOCAB, WIDTH)
        self.layers = [Recur() if kind == "r" else Attend() for kind in kinds]
        self.head = nn.Linear(WIDTH, tiny.VOCAB, bias=False)
        mx.random.seed(seed)
        self.apply(lambda array: mx.random.normal(array.shape) / WIDTH**0.5 * 1.5)
        apply_cpu_layout(self)
        mx.eval(self.parameters())

    def __call__(
        self,
        tokens: mx.array,
        kv: Sequence[object],
        select: SelectPositions = select_all,
        images: ImageInputs | None = None,
    ) -> mx.array:
        x = self.embed(tokens)
        if images is not None:
            x = images.insert(x)
        for layer, layer_kv in zip(cast(list[Any], self.layers), kv, strict=True):
            x = x + layer(mx.fast.rms_norm(x, None, 1e-5), layer_kv)
        return mx.fast.rms_norm(select(x), None, 1e-5)

    def logits(self, hidden: mx.array) -> mx.array:
        return 3 * self.head(hidden)

    def make_kv(self) -> list[LayerCache]:
        types = {"k": KVCache, "w": lambda: RotatingKVCache(WINDOW), "r": lambda: RecurrentCache(1)}
        caches = [cast(LayerCache, types[kind]()) for kind in self.kinds]
        set_kv_dtype(caches, self.kv_dtype)
        return caches

    def shift(self, kv: Sequence[LayerCache], start: int, end: int) -> bool:
        return False

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return weights
