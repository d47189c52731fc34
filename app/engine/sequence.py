"""All that one request is while the engine works on it.

Knows: its job, its layer caches, the ids it has seen. Must not know: other sequences, the model.

    ids      [ prompt ......................... | sampled ........ ]   values known
    caches   [ evaluated, in order ............................ ]      offset = len(evaluated)
    pending                                                     [ t ]  sampled, value not yet read

It waits without caches, and may be sent back to waiting: then all its ids, the sampled ones too,
are a prompt to evaluate again, and it goes on as if nothing had happened.
"""

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import cast

import mlx.core as mx

from app.core.jobs import Job
from app.core.ports import Lease, ShiftingLease
from app.engine.grammar import Matcher
from app.engine.prefix.matching import common_prefix
from app.engine.row import RowState
from app.engine.scores import Score
from models.kv import LayerCache

# layer caches, start, end -> whether these positions have been forgotten
Shift = Callable[[Ids[LayerCache], int, int], bool]


class Sequence:
    """Begins waiting; `start` and `park` take it in and out of memory. Ends by giving the lease
    back."""

    def __init__(self, job: Job, *, vocab: int, matcher: Matcher | None = None) -> None:
        """matcher: of the job's grammar, at its beginning; this one's own."""
        assert (matcher is None) == (job.grammar is None), "a grammar that nobody compiled"
        self.job = job
        self.matcher = matcher  # stands behind the last id whose value is known
        self.ids = list(job.ids)
        self.evaluated = 0
        self.sampled = 0  # sampled ids whose value is known
        self.started = False  # whether it ever ran
        self.pending = 0  # sampled ids whose value is not known yet
        self.scores: list[Score] = []  # of the prompt's ids, all but the first, if the job asks
        self.suspect = False  # whether it was in a step that failed
        self.charged = 0  # bytes that the books hold against it
        self.room = 0  # positions that these bytes are good for
        self._shared: dict[str, int] = {}
        self._vocab = vocab
        self._seed = secrets.randbits(63) if job.sampling.seed is None else job.sampling.seed
        self._lease: Lease[LayerCache] | None = None
        self._row: RowState | None = None

    @property
    def running(self) -> bool:
        return self._lease is not None

    @property
    def lease(self) -> Lease[LayerCache]:
        assert self._lease is not None, "the sequence does not run"
        return self._lease

    @property
    def row(self) -> RowState:
        assert self._row is not None, "the sequence does not run"
        return self._row

    @property
    def kv(self) -> Ids[LayerCache]:
        return self.lease.kv

    @property
    def unread(self) -> int:
        """Known ids that still have to be evaluated before the next one can be sampled. (While it
        decodes, one more is evaluated than is known.)"""
        return max(0, len(self.ids) - self.evaluated)

    @property
    def unscored(self) -> int:
        """Prompt ids of which the job wants to know the log-probability and nobody does yet."""
        if self.job.prompt_logprobs is None:
            return 0
        return len(self.job.ids) - 1 - len(self.scores)

    @property
    def reuse(self) -> bool:
        """Whether the prefix cache may serve it. What a parked sequence left is its own, whatever
        it thinks of the cache; but hidden states, which scores are made of, are never cached."""
        return (self.job.reuse or self.started) and not self.unscored

    @property
    def next_pause(self) -> int:
        """Where prefill stops next: at the end of the ids, or where the prefix cache wants to
        look."""
        return next((p for p in self.lease.pauses if p > self.evaluated), len(self.ids))

    @property
    def wants_another(self) -> bool:
        """Whether a token behind the pending one could still be reported."""
        return self.sampled + 1 < self.job.max_tokens

    @property
    def complete(self) -> bool:
        """Whether a grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.done

    def shared_with(self, other: "Sequence") -> int:
        """How many ids the prompts of both begin with. Asked again at each step while this one
        waits, so it is remembered."""
        known = self._shared.get(other.job.id)
        if known is None:
            known = self._shared[other.job.id] = common_prefix(self.job.ids, other.job.ids)
        return known

    def start(self, lease: Lease[LayerCache]) -> None:
        self._lease = lease
        self._shared.clear()
        self.evaluated = lease.cached
        self.pending = 0
        # what sampling remembers follows from the ids, so it is made anew each time
        self._row = RowState(
            self.job.sampling,
            seed=self._seed,
            prompt=self.ids,
            vocab=self._vocab,
            stop_ids=self.job.stop_ids,
            min_tokens=self.job.min_tokens,
        )
        self._row.drawn = self.sampled
        self.started = True

    def add(self, token: int) -> None:
        """A sampled id whose value is known now. Raises GrammarError where it cannot follow."""
        self.ids.append(token)
        self.sampled += 1
        self.pending -= 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def shift(self, remove: Shift) -> None:
        """Its context is full: go on with less of it. Where layers cannot shift, what is left is a
        prompt again."""
        lease = cast(ShiftingLease[LayerCache], self.lease)
        left = lease.shift(self.ids, keep=self.job.keep, remove=remove)
        self.ids, self.evaluated = list(left.ids), left.evaluated

    def state(self) -> list[mx.array]:
        """What must be evaluated for the caches to be real."""
        return [array for layer in self.kv for array in layer.state()]

    def commit(self, *, keep: int) -> None:
        """Give the caches back, remembering the first `keep` ids at most."""
        self.lease.commit(self.ids[: self.evaluated], keep=keep)
        self._rest()

    def discard(self) -> None:
        """Give the caches back as doubtful."""
        self.lease.discard()
        self._rest()

    def _rest(self) -> None:
        self._lease = self._row = None
        self.evaluated = self.charged = self.room = 0
