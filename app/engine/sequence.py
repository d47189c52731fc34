"""All that one request is while the engine works on it.

Knows: its job, its layer caches, the ids it has seen. Must not know: other sequences, the model.

    ids      [ prompt ......................... | sampled ........ ]   values known
    caches   [ evaluated, in order ............................ ]      offset = len(evaluated)
    pending                                                     [ t ]  sampled, value not yet read
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import mlx.core as mx

from app.core.jobs import Job
from app.core.ports import Lease
from app.engine.sampler import RowState
from models.kv import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A sampled token on its way from the device. token, logprob: one element; tops: [k]."""

    token: mx.array
    logprob: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        found = (self.token, self.logprob, self.top_ids, self.top_logprobs)
        return [array for array in found if array is not None]


class Sequence:
    """Begins with a lease on layer caches; ends by giving it back."""

    def __init__(self, job: Job, lease: Lease[LayerCache], row: RowState) -> None:
        self.job = job
        self.lease = lease
        self.row = row
        self.ids = list(job.ids)
        self.evaluated = lease.cached
        self.pending: Pending | None = None

    @property
    def kv(self) -> Ids[LayerCache]:
        return self.lease.kv

    @property
    def unread(self) -> int:
        """Prompt ids that still have to be evaluated."""
        return max(0, len(self.job.ids) - self.evaluated)

    @property
    def sampled(self) -> int:
        """Sampled ids whose value is known."""
        return len(self.ids) - len(self.job.ids)

    @property
    def wants_another(self) -> bool:
        """Whether a token behind the pending one could still be reported."""
        return self.sampled + 1 < self.job.max_tokens

    def state(self) -> list[mx.array]:
        """What must be evaluated for the caches to be real."""
        return [array for layer in self.kv for array in layer.state()]

    def commit(self, *, keep: int | None) -> None:
        """Give the caches back, remembering the first `keep` ids at most (None: all)."""
        known = len(self.ids)
        self.lease.commit(self.ids, keep=known if keep is None else keep)

    def discard(self) -> None:
        self.lease.discard()
