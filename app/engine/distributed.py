"""Those who run one model together, one rank each, and compute in step.

Knows: mlx.core.distributed. Must not know: how ranks are started, commands, requests. Implements
`models.sharding.TensorParallelGroup`.

Whatever decides what is computed next must be the same on all ranks, or they wait for each other
for ever. Sums are: a ring adds in one order and hands the result round (MLX 0.32, measured with 2
and 3 ranks). Logits need not be, where machines differ: so what rank 0 draws counts. Budgets differ
between machines: so the least counts.
"""

from dataclasses import replace
from typing import cast

import mlx.core as mx

from app.core.settings import Settings
from app.engine.device import device_budget
from app.engine.fit import choose_prefill_chunk
from app.engine.memory_profile import MemoryProfile


class DistributedGroup:
    """All methods are for all ranks at once, in the same order. Those that return arrays are
    lazy."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def all_sum(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self._group)

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        """Those of rank 0."""
        return self.all_sum(tokens if self.rank == 0 else mx.zeros_like(tokens))

    def broadcast_bytes(self, data: bytes, length: int) -> bytes:
        """The words of rank 0, up to `length` bytes of them and none of them zero."""
        assert len(data) <= length
        mine = data if self.rank == 0 else b""
        everybodys = self.all_sum(mx.array(list(mine.ljust(length, b"\0")), dtype=mx.uint8))
        return bytes(cast(list[int], everybodys.tolist())).rstrip(b"\0")

    def reconcile_settings(self, settings: Settings) -> Settings:
        """With what all ranks can do, in place of what each would make of its own device."""
        return replace(
            settings,
            memory=self._all_min(settings.memory or device_budget()),
            prefill_chunk=self._all_min(choose_prefill_chunk(settings)),
        )

    def reconcile_memory(self, memory: MemoryProfile) -> MemoryProfile:
        """With the room that a step needs on that rank where it needs most."""
        return replace(
            memory,
            weights=-self._all_min(-memory.weights),
            working=-self._all_min(-memory.working),
        )

    def _all_min(self, number: int) -> int:
        numbers = mx.array([number], dtype=mx.int64)
        return cast(int, mx.distributed.all_min(numbers, group=self._group).item())


def join_group() -> DistributedGroup:
    """Waits for the others, with the interpreter held: nothing else of this process goes on, and
    Python handles no signal, before all are here. To be called before anything is served.

    Raises RuntimeError where they cannot be reached."""
    return DistributedGroup(mx.distributed.init(strict=True))
