"""Inputs that are embedded, on their way, and who lends the memory for it.

Knows: jobs, layer caches. Must not know: the model, who takes turns with whom.
"""

from collections import deque
from typing import Protocol

import mlx.core as mx

from app.core.embeddings import EmbedJob
from models.kv import LayerCache


class MemoryLender(Protocol):
    """Who has the memory."""

    @property
    def borrowed_bytes(self) -> int:
        """Bytes; 0 after they were called back."""
        ...

    def borrow(self, num_bytes: int) -> bool:
        """So many bytes more; False where they are not to be had now."""
        ...

    def return_borrowed(self, num_bytes: int) -> None: ...


class EmbedTask:
    """A job on its way. pending_inputs: numbers of its inputs, shortest first. isolated: whether it
    shares no forward pass, because one failed that it was in."""

    def __init__(self, job: EmbedJob) -> None:
        self.job = job
        self.pending_inputs = deque(
            sorted(range(len(job.inputs)), key=lambda i: len(job.inputs[i]))
        )
        self.vectors: dict[int, bytes] = {}
        self.isolated = False

    @property
    def next_length(self) -> int:
        return len(self.job.inputs[self.pending_inputs[0]])


class LongInput:
    """An input that takes several pieces. borrowed_bytes: bytes that it holds until its end.
    pooled_sum: what is pooled of it so far, [1, D] float32."""

    def __init__(
        self, task: EmbedTask, index: int, kv: list[LayerCache], borrowed_bytes: int
    ) -> None:
        self.task, self.index, self.kv, self.borrowed_bytes = task, index, kv, borrowed_bytes
        self.ids = task.job.inputs[index]
        self.num_computed = 0
        self.pooled_sum: mx.array | None = None
