"""Who waits, who runs, who gives way.

Knows: sequences, the prefix cache that they lease from, the books. Must not know: the model,
tokens, what is reported to whom. Everything here changes between two forward passes.
"""

import logging
from collections import deque
from collections.abc import Sequence as Ids

from app.core.jobs import Ledger
from app.core.ports import PrefixCache
from app.engine.books import Books
from app.engine.scheduler import Limits, admissions, turns, worth_waiting
from app.engine.sequence import Sequence
from models.kv import LayerCache

log = logging.getLogger(__name__)


class Roster:
    """prefix: owned from now on."""

    def __init__(self, prefix: PrefixCache[LayerCache], books: Books, limits: Limits) -> None:
        self._prefix = prefix
        self._books = books
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._started = 0
        self._taken: dict[str, int] = {}  # caller -> how many had started with its last one

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
    def lent(self) -> int:
        return self._books.lent

    def lend(self, count: int) -> bool:
        """Bytes for what is no sequence, such as inputs that are embedded; it may be called back
        by `make_way`, all at once."""
        return self._books.lend(count, self._running)

    def take_back(self, count: int) -> None:
        self._books.take_back(count)

    def ledger(self) -> Ledger:
        return self._books.ledger(self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def find(self, job: str) -> Sequence | None:
        here = (*self._waiting, *self._running)
        return next((s for s in here if s.job.id == job), None)

    def has(self, sequence: Sequence) -> bool:
        return sequence.running or sequence in self._waiting

    def next(self) -> Sequence | None:
        """Who may start now, if there is a place: the first of those who would not do better to
        wait."""
        count = admissions(
            waiting=len(self._waiting), running=len(self._running), limits=self._limits
        )
        if not count:
            return None
        return next((s for s in self._in_turn() if not self._better_later(s)), None)

    def _in_turn(self) -> Ids[Sequence]:
        """Those who wait, in the order in which they are taken: callers take turns, but who had
        begun and had to make way goes on before anybody begins."""
        begun = [s for s in self._waiting if s.started]
        fresh = [s for s in self._waiting if not s.started]
        here = [s.job.caller for s in (*self._running, *begun)]
        order = turns([s.job.caller for s in fresh], here, self._taken)
        return (*begun, *(fresh[i] for i in order))

    def _better_later(self, sequence: Sequence) -> bool:
        """Whether a running sequence is evaluating now what this one begins with. It always gets
        on, so nobody waits for ever; and eight clients with one system prompt evaluate it once."""
        if not self._prefix.lends or not sequence.reuse:
            return False
        return any(
            worth_waiting(
                shared=sequence.shared_with(other),
                evaluated=other.evaluated,
                least=self._limits.prefill,
                length=len(sequence.ids),
            )
            for other in self._running
            if other.unread
        )

    def start(self, sequence: Sequence) -> bool:
        """Lease layer caches for one that waits; whether there was memory for it."""
        if not self._books.admits(sequence, self._running):
            return False
        self._waiting.remove(sequence)
        job = sequence.job
        marks = [i for i, token in enumerate(sequence.ids, 1) if token in job.stop_ids]
        room = self._books.first_room(sequence)
        sequence.start(
            self._prefix.begin(sequence.ids, marks=marks, reuse=sequence.reuse, room=room)
        )
        self._running.append(sequence)
        self._started += 1
        self._taken[job.caller] = self._started
        self._books.charge(sequence, self._running)
        return True

    def make_way(self) -> int:
        """See that every decoding sequence has room for one more position; when memory is short,
        the youngest wait. How many had to."""
        count = self._books.in_the_way(self._running)
        for sequence in self._running[len(self._running) - count :][::-1]:
            log.info("preempting a sequence of %d tokens: out of KV memory", len(sequence.ids))
            sequence.commit(keep=len(sequence.ids))
            self.park(sequence)
        self._books.grow(self._running)
        return count

    def park(self, sequence: Sequence) -> None:
        """Send one without caches back to waiting, first in the queue. Its pending token may still
        be read."""
        assert not sequence.running
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)

    def leave(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def check(self) -> None:
        """Assert what must hold between two steps."""
        self._prefix.check()
        assert all(s.running for s in self._running)
        assert not any(s.running for s in self._waiting)
        assert len(self._running) <= self._limits.running
        assert self.ledger().free >= 0 or len(self._running) <= 1
