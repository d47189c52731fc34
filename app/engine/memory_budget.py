"""The memory ledger: what each sequence is charged, what is free, what gives way.

Knows: bytes, sequences, the prefix cache as something that can shrink. Must not know: the model,
tokens. Charges are made before memory is taken, so the budget holds while it is being taken.
"""

from collections.abc import Sequence as Ids

from app.core.jobs import Capacity, Ledger
from app.core.ports import PrefixCache
from app.engine.device import detect_backend
from app.engine.memory_profile import MemoryProfile, clear_allocator_cache
from app.engine.policy import choose_growing, count_preemptions
from app.engine.sequence import Sequence
from models.kv import STEP, LayerCache, round_up_to_step

# positions left at which a sequence may get more room before it must
GROW_AHEAD = 32


class MemoryBudget:
    """context: positions that the model, or whoever runs it, allows a sequence."""

    def __init__(
        self, memory: MemoryProfile, prefix: PrefixCache[LayerCache], *, context: int, parallel: int
    ) -> None:
        self._memory = memory
        self._prefix = prefix
        self.borrowed_bytes = 0  # bytes for layer caches of what is no sequence
        fits = memory.max_context(context)
        self.capacity = Capacity(
            parallel=parallel,
            context_length=fits,
            kv_budget=memory.kv_budget,
            kv_bytes_per_sequence=memory.kv_footprint(fits),
            limited_by_memory=fits < context,
            hidden_size=memory.hidden_size,
            backend=detect_backend(),
        )

    def ledger(self, running: Ids[Sequence]) -> Ledger:
        return Ledger(
            budget=self._memory.budget,
            weights=self._memory.weights,
            kv=sum(s.reserved_bytes for s in running) + self.borrowed_bytes,
            prefix=self._prefix.nbytes,
            working=self._memory.working,
        )

    def make_room_for(self, sequence: Sequence, running: Ids[Sequence]) -> bool:
        """Give cached prefixes up until there is room for the sequence to start; whether there is.
        Alone it always may: what cannot fit was refused at the edge."""
        room = self._memory.kv_footprint(self.initial_positions(sequence))
        return self._evict_until_free(room, running) or not (running or self.borrowed_bytes)

    def borrow(self, num_bytes: int, running: Ids[Sequence]) -> bool:
        """Memory for layer caches of what is no sequence; whether it is to be had."""
        lent = self._evict_until_free(num_bytes, running) or not (running or self.borrowed_bytes)
        self.borrowed_bytes += num_bytes if lent else 0
        return lent

    def return_borrowed(self, num_bytes: int) -> None:
        """What was called back is no longer here to be given."""
        self.borrowed_bytes = max(0, self.borrowed_bytes - num_bytes)

    def initial_positions(self, sequence: Sequence) -> int:
        """Positions to begin with: those of its ids, and for an answer of usual length."""
        answer = min(sequence.job.max_tokens - sequence.num_output_tokens, STEP)
        wanted = min(len(sequence.ids) + answer, self.capacity.context_length)
        return round_up_to_step(max(wanted, len(sequence.ids) + 1))

    def reserve(self, sequence: Sequence, running: Ids[Sequence]) -> None:
        """It has its layer caches now, one of the `running`."""
        sequence.reserved_positions = self.initial_positions(sequence)
        # caches that it took over may have more room than was asked for
        held = sum(layer.nbytes for layer in sequence.kv)
        sequence.reserved_bytes = max(self._memory.kv_footprint(sequence.reserved_positions), held)
        self._evict_until_free(0, running)

    def reclaim_for_decode(self, running: Ids[Sequence]) -> int:
        """See that every decoding sequence can have one more position. Cached prefixes give way
        first, then all that is lent; how many of the youngest sequences must, too. running: oldest
        first."""
        growth = self._plan_growth(running, ahead=0)
        if self._evict_until_free(sum(growth.values()), running):
            return 0
        if self.borrowed_bytes:
            self.borrowed_bytes = 0
            return self.reclaim_for_decode(running)
        return count_preemptions(
            reserved=[s.reserved_bytes for s in running],
            growth=[growth.get(s, 0) for s in running],
            free=self.ledger(running).free,
        )

    def grow_reservations(self, running: Ids[Sequence]) -> None:
        """Charge those that are to get more room for it, and make it. Who needs it only soon gets
        it if it is there."""
        for sequence, count in self._plan_growth(running, ahead=GROW_AHEAD).items():
            if (
                not self._evict_until_free(count, running)
                and sequence.num_computed_tokens < sequence.reserved_positions
            ):
                continue
            sequence.reserved_bytes += count
            sequence.reserved_positions = self._grown_positions(sequence)
            for layer in sequence.kv:
                layer.reserve(sequence.reserved_positions)

    def _plan_growth(self, running: Ids[Sequence], *, ahead: int) -> dict[Sequence, int]:
        """Who is to get more room now, and the bytes that it takes; mostly nobody."""
        # a prompt has room enough until it is evaluated, and everything has an end
        able = [
            s
            for s in running
            if not s.num_uncomputed_tokens and s.reserved_positions < self._grown_positions(s)
        ]
        chosen = choose_growing(
            [s.reserved_positions - s.num_computed_tokens for s in able], ahead=ahead
        )
        return {
            s: max(0, self._memory.kv_footprint(self._grown_positions(s)) - s.reserved_bytes)
            for i, s in enumerate(able)
            if i in chosen
        }

    def _evict_until_free(self, num_bytes: int, running: Ids[Sequence]) -> bool:
        short = num_bytes - self.ledger(running).free
        if short > 0:
            short -= self._prefix.evict(short)
            clear_allocator_cache()
        return short <= 0

    def _grown_positions(self, sequence: Sequence) -> int:
        """A quarter more, so that a long answer is copied a few times only; never more than it can
        come to need."""
        wanted = max(sequence.num_computed_tokens + STEP, sequence.num_computed_tokens * 5 // 4)
        left = sequence.job.max_tokens - sequence.num_output_tokens
        most = min(self.capacity.context_length, len(sequence.ids) + left)
        return round_up_to_step(max(min(wanted, most), sequence.num_computed_tokens + 1))
