"""The group of ranks that run one model together in lockstep.

Knows: mlx.core.distributed. Must not know: the launcher, commands, requests. Implements
`models.sharding.TensorParallelGroup`.

Every value that affects the next computation must be equal on all ranks. Otherwise, the ranks
deadlock in a collective operation. An all-reduce gives equal sums on all ranks, because a ring adds
in a fixed order and distributes the result (MLX 0.32, measured with 2 and 3 ranks). Logits may
differ between machines, so all ranks use the tokens sampled by rank 0. Memory budgets may also
differ between machines, so all ranks use the smallest budget.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import mlx.core as mx

from app.core.settings import Settings
from app.engine.device import device_budget
from app.engine.memory_profile import MemoryProfile


class DistributedGroup:
    """A group of ranks. All ranks must call the same methods in the same order. Methods
    that return arrays are lazy."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def all_sum(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self._group)

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        """Broadcasts the tokens of rank 0 to all ranks."""
        return self.all_sum(tokens if self.rank == 0 else mx.zeros_like(tokens))

    def broadcast_bytes(self, data: bytes, length: int) -> bytes:
        """Broadcasts the data of rank 0 to all ranks. `length` is the maximum length of the data in
        bytes. The data must not contain zero bytes."""
        assert len(data) <= length
        local = data if self.rank == 0 else b""
        summed = self.all_sum(mx.array(list(local.ljust(length, b"\0")), dtype=mx.uint8))
        return bytes(cast(list[int], summed.tolist())).rstrip(b"\0")

    def reconcile_settings(
        self, settings: Settings, choose_chunk: Callable[[Settings], int]
    ) -> Settings:
        """Returns the settings with the smallest memory budget and the smallest prefill chunk of
        all ranks. Otherwise, each rank would choose both values for its own device. choose_chunk:
        returns the prefill chunk of this rank."""
        agreed = replace(settings, memory=self._all_min(settings.memory or device_budget()))
        return replace(agreed, prefill_chunk=self._all_min(choose_chunk(agreed)))

    def reconcile_memory(self, memory: MemoryProfile) -> MemoryProfile:
        """Returns the profile with the largest weights and the largest working memory of all
        ranks."""
        return replace(
            memory,
            weights=-self._all_min(-memory.weights),
            working=-self._all_min(-memory.working),
        )

    def _all_min(self, number: int) -> int:
        numbers = mx.array([number], dtype=mx.int64)
        return cast(int, mx.distributed.all_min(numbers, group=self._group).item())


def join_group() -> DistributedGroup:
    """Connects to the other ranks and waits for all of them.

    Holds the GIL while it waits: no other Python thread runs and no signal is handled until all
    ranks are connected. Call it before the server accepts requests. Raises RuntimeError if the
    other ranks cannot be reached.
    """
    return DistributedGroup(mx.distributed.init(strict=True))
