"""Inputs that are embedded, on their way, and who lends the memory for it.

Knows: jobs, layer caches. Must not know: the model, who takes turns with whom.
"""

from collections import deque
from typing import Protocol

import mlx.core as mx

from app.core.embeddings import EmbedJob
from models.kv import LayerCache


class Lender(Protocol):
    """Who has the memory."""

    @property
    def lent(self) -> int:
        """Bytes; 0 after they were called back."""
        ...

    def lend(self, count: int) -> bool:
        """So many bytes more; False where they are not to be had now."""
        ...

    def take_back(self, count: int) -> None: ...


class Work:
    """A job on its way. waiting: numbers of its inputs, shortest first. alone: whether it shares no
    forward pass, because one failed that it was in."""

    def __init__(self, job: EmbedJob) -> None:
        self.job = job
        self.waiting = deque(sorted(range(len(job.inputs)), key=lambda i: len(job.inputs[i])))
        self.vectors: dict[int, bytes] = {}
        self.alone = False

    @property
    def next_length(self) -> int:
        return len(self.job.inputs[self.waiting[0]])


class Long:
    """An input that takes several pieces. lent: bytes that it holds until its end. total: what is
    pooled of it so far, [1, D] float32."""

    def __init__(self, work: Work, number: int, kv: list[LayerCache], lent: int) -> None:
        self.work, self.number, self.kv, self.lent = work, number, kv, lent
        self.ids = work.job.inputs[number]
        self.done = 0
        self.total: mx.array | None = None
