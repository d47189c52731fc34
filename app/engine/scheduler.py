"""The scheduler: waiting and running sequences, starting and preempting them.

Knows: sequences, the prefix cache that they lease from, the memory budget. Must not know: the
model, tokens, how results are reported. State changes only between two forward passes.
"""

import logging
from collections import deque
from collections.abc import Sequence as Ids

from app.core.jobs import Ledger
from app.core.ports import PrefixCache
from app.engine.memory_budget import MemoryBudget
from app.engine.policy import SchedulerLimits, count_admissible, fair_order, should_defer
from app.engine.sequence import Sequence
from models.kv import LayerCache

log = logging.getLogger(__name__)


class Scheduler:
    """prefix: owned by the scheduler."""

    def __init__(
        self, prefix: PrefixCache[LayerCache], budget: MemoryBudget, limits: SchedulerLimits
    ) -> None:
        self._prefix = prefix
        self._budget = budget
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._start_count = 0
        self._last_started: dict[str, int] = {}  # caller -> number of its last start

    @property
    def waiting(self) -> Ids[Sequence]:
        return self._waiting

    @property
    def running(self) -> Ids[Sequence]:
        return self._running

    @property
    def evictions(self) -> int:
        return self._prefix.evictions

    @property
    def borrowed_bytes(self) -> int:
        return self._budget.borrowed_bytes

    def borrow(self, num_bytes: int) -> bool:
        """Borrow bytes for something that is not a sequence, such as embedding inputs.
        `make_decode_room` may reclaim all borrowed bytes at once."""
        return self._budget.borrow(num_bytes, self._running)

    def return_borrowed(self, num_bytes: int) -> None:
        self._budget.return_borrowed(num_bytes)

    def ledger(self) -> Ledger:
        return self._budget.ledger(self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def find(self, job: str) -> Sequence | None:
        here = (*self._waiting, *self._running)
        return next((s for s in here if s.job.id == job), None)

    def has(self, sequence: Sequence) -> bool:
        return sequence.running or sequence in self._waiting

    def next_to_start(self) -> Sequence | None:
        """The sequence to start now: the first waiting one that should not be deferred. None if no
        place is free."""
        count = count_admissible(
            waiting=len(self._waiting), running=len(self._running), limits=self._limits
        )
        if not count:
            return None
        return next((s for s in self._waiting_in_order() if not self._should_defer(s)), None)

    def _waiting_in_order(self) -> Ids[Sequence]:
        """The waiting sequences in the order in which they start: preempted sequences first, then
        new ones, whose callers take turns."""
        begun = [s for s in self._waiting if s.has_run]
        fresh = [s for s in self._waiting if not s.has_run]
        here = [s.job.caller for s in (*self._running, *begun)]
        order = fair_order([s.job.caller for s in fresh], here, self._last_started)
        return (*begun, *(fresh[i] for i in order))

    def _should_defer(self, sequence: Sequence) -> bool:
        """Whether a running sequence is now evaluating the prefix of this one. That sequence always
        advances, so this one does not wait forever; and eight clients with one system prompt
        evaluate it once."""
        if not self._prefix.shares_live or not sequence.may_reuse_prefix:
            return False
        return any(
            should_defer(
                shared_prefix=sequence.shared_prefix_length(other),
                num_computed=other.num_computed_tokens,
                min_gain=self._limits.max_prefill_tokens,
                length=len(sequence.ids),
            )
            for other in self._running
            if other.num_uncomputed_tokens
        )

    def start(self, sequence: Sequence) -> bool:
        """Lease layer caches for a waiting sequence. Returns False if there is not enough
        memory."""
        if not self._budget.make_room_for(sequence, self._running):
            return False
        self._waiting.remove(sequence)
        job = sequence.job
        marks = [i for i, token in enumerate(sequence.ids, 1) if token in job.stop_token_ids]
        room = self._budget.initial_positions(sequence)
        sequence.start(
            self._prefix.begin(
                sequence.ids, turn_ends=marks, reuse=sequence.may_reuse_prefix, reserve_length=room
            )
        )
        self._running.append(sequence)
        self._start_count += 1
        self._last_started[job.caller] = self._start_count
        self._budget.reserve(sequence, self._running)
        return True

    def make_decode_room(self) -> int:
        """Make sure that every decoding sequence can have one more position; preempts the youngest
        if memory is short. Returns how many were preempted."""
        count = self._budget.reclaim_for_decode(self._running)
        for sequence in self._running[len(self._running) - count :][::-1]:
            log.info("preempting a sequence of %d tokens: out of KV memory", len(sequence.ids))
            sequence.commit(keep=len(sequence.ids))
            self.requeue(sequence)
        self._budget.grow_reservations(self._running)
        return count

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence without caches at the front of the queue. Its pending token may still be
        read."""
        assert not sequence.running
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def check(self) -> None:
        """Assert the invariants that hold between two steps."""
        self._prefix.check()
        assert all(s.running for s in self._running)
        assert not any(s.running for s in self._waiting)
        assert len(self._running) <= self._limits.max_running
        assert self.ledger().free >= 0 or len(self._running) <= 1
