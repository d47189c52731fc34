"""The memory ledger: what each sequence is charged, what is free, what gives way.

Knows: bytes, sequences, the prefix cache as something that can shrink. Must not know: the model,
tokens. Charges are made before memory is taken, so the budget holds while it is being taken.
"""

from collections.abc import Sequence as Ids

from app.core.jobs import Capacity, Ledger
from app.core.ports import PrefixCache
from app.engine.computing import in_use
from app.engine.memory import Memory, clear_cache
from app.engine.scheduler import growers, preemptions
from app.engine.sequence import Sequence
from models.kv import STEP, LayerCache, rounded

# positions left at which a sequence may get more room before it must
GROW_AHEAD = 32


class Books:
    """context: positions that the model, or whoever runs it, allows a sequence."""

    def __init__(
        self, memory: Memory, prefix: PrefixCache[LayerCache], *, context: int, parallel: int
    ) -> None:
        self._memory = memory
        self._prefix = prefix
        self.lent = 0  # bytes for layer caches of what is no sequence
        fits = memory.positions(context)
        self.capacity = Capacity(
            parallel=parallel,
            context=fits,
            kv_budget=memory.kv_budget,
            kv_bytes=memory.footprint(fits),
            limited_by_memory=fits < context,
            width=memory.width,
            backend=in_use(),
        )

    def ledger(self, running: Ids[Sequence]) -> Ledger:
        return Ledger(
            budget=self._memory.budget,
            weights=self._memory.weights,
            kv=sum(s.charged for s in running) + self.lent,
            prefix=self._prefix.nbytes,
            working=self._memory.working,
        )

    def admits(self, sequence: Sequence, running: Ids[Sequence]) -> bool:
        """Give cached prefixes up until there is room for the sequence to start; whether there is.
        Alone it always may: what cannot fit was refused at the edge."""
        room = self._memory.footprint(self.first_room(sequence))
        return self._make_room(room, running) or not (running or self.lent)

    def lend(self, count: int, running: Ids[Sequence]) -> bool:
        """Memory for layer caches of what is no sequence; whether it is to be had."""
        lent = self._make_room(count, running) or not (running or self.lent)
        self.lent += count if lent else 0
        return lent

    def take_back(self, count: int) -> None:
        """What was called back is no longer here to be given."""
        self.lent = max(0, self.lent - count)

    def first_room(self, sequence: Sequence) -> int:
        """Positions to begin with: those of its ids, and for an answer of usual length."""
        answer = min(sequence.job.max_tokens - sequence.sampled, STEP)
        wanted = min(len(sequence.ids) + answer, self.capacity.context)
        return rounded(max(wanted, len(sequence.ids) + 1))

    def charge(self, sequence: Sequence, running: Ids[Sequence]) -> None:
        """It has its layer caches now, one of the `running`."""
        sequence.room = self.first_room(sequence)
        # caches that it took over may have more room than was asked for
        held = sum(layer.nbytes for layer in sequence.kv)
        sequence.charged = max(self._memory.footprint(sequence.room), held)
        self._make_room(0, running)

    def in_the_way(self, running: Ids[Sequence]) -> int:
        """See that every decoding sequence can have one more position. Cached prefixes give way
        first, then all that is lent; how many of the youngest sequences must, too. running: oldest
        first."""
        growth = self._growth(running, ahead=0)
        if self._make_room(sum(growth.values()), running):
            return 0
        if self.lent:
            self.lent = 0
            return self.in_the_way(running)
        return preemptions(
            held=[s.charged for s in running],
            growth=[growth.get(s, 0) for s in running],
            free=self.ledger(running).free,
        )

    def grow(self, running: Ids[Sequence]) -> None:
        """Charge those that are to get more room for it, and make it. Who needs it only soon gets
        it if it is there."""
        for sequence, count in self._growth(running, ahead=GROW_AHEAD).items():
            if not self._make_room(count, running) and sequence.evaluated < sequence.room:
                continue
            sequence.charged += count
            sequence.room = self._grown(sequence)
            for layer in sequence.kv:
                layer.reserve(sequence.room)

    def _growth(self, running: Ids[Sequence], *, ahead: int) -> dict[Sequence, int]:
        """Who is to get more room now, and the bytes that it takes; mostly nobody."""
        # a prompt has room enough until it is evaluated, and everything has an end
        able = [s for s in running if not s.unread and s.room < self._grown(s)]
        chosen = growers([s.room - s.evaluated for s in able], ahead=ahead)
        return {
            s: max(0, self._memory.footprint(self._grown(s)) - s.charged)
            for i, s in enumerate(able)
            if i in chosen
        }

    def _make_room(self, wanted: int, running: Ids[Sequence]) -> bool:
        short = wanted - self.ledger(running).free
        if short > 0:
            short -= self._prefix.shrink(short)
            clear_cache()
        return short <= 0

    def _grown(self, sequence: Sequence) -> int:
        """A quarter more, so that a long answer is copied a few times only; never more than it can
        come to need."""
        wanted = max(sequence.evaluated + STEP, sequence.evaluated * 5 // 4)
        left = sequence.job.max_tokens - sequence.sampled
        most = min(self.capacity.context, len(sequence.ids) + left)
        return rounded(max(min(wanted, most), sequence.evaluated + 1))
