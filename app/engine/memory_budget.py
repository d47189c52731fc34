"""The memory ledger: bytes charged to each sequence, free bytes, and what is evicted when memory is
short.

Knows: bytes, sequences, the prefix cache as something that can shrink. Must not know: the model,
tokens. Bytes are charged before they are allocated, so the budget also holds during allocation.
"""

from collections.abc import Sequence as Ids

from app.core.jobs import Capacity, Ledger
from app.core.ports import PrefixCache
from app.engine.device import detect_backend
from app.engine.memory_profile import MemoryProfile, clear_allocator_cache
from app.engine.policy import choose_growing, count_preemptions
from app.engine.sequence import Sequence
from models.kv import STEP, LayerCache, round_up_to_step

# a sequence with this many free positions left may grow before it has to
GROW_AHEAD = 32


class MemoryBudget:
    """context: positions per sequence that the model and the configuration allow."""

    def __init__(
        self, memory: MemoryProfile, prefix: PrefixCache[LayerCache], *, context: int, parallel: int
    ) -> None:
        self._memory = memory
        self._prefix = prefix
        self.borrowed_bytes = 0  # bytes for layer caches that belong to no sequence
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
        """Evict cached prefixes until the sequence can start. Returns whether there is enough
        memory. A sequence may always start if it runs alone: requests that cannot fit were rejected
        before."""
        room = self._memory.kv_footprint(self.initial_positions(sequence))
        return self._evict_until_free(room, running) or not (running or self.borrowed_bytes)

    def borrow(self, num_bytes: int, running: Ids[Sequence]) -> bool:
        """Borrow memory for layer caches that belong to no sequence. Returns whether it is
        available."""
        lent = self._evict_until_free(num_bytes, running) or not (running or self.borrowed_bytes)
        self.borrowed_bytes += num_bytes if lent else 0
        return lent

    def return_borrowed(self, num_bytes: int) -> None:
        """Return borrowed bytes. Bytes that were reclaimed already are not counted again."""
        self.borrowed_bytes = max(0, self.borrowed_bytes - num_bytes)

    def initial_positions(self, sequence: Sequence) -> int:
        """Positions to start with: those of its ids, plus some for its output."""
        answer = min(sequence.job.max_tokens - sequence.num_output_tokens, STEP)
        wanted = min(len(sequence.ids) + answer, self.capacity.context_length)
        return round_up_to_step(max(wanted, len(sequence.ids) + 1))

    def reserve(self, sequence: Sequence, running: Ids[Sequence]) -> None:
        """Charge a sequence that has just leased its layer caches. running: includes it."""
        sequence.reserved_positions = self.initial_positions(sequence)
        # caches that it took over may have more capacity than requested
        held = sum(layer.nbytes for layer in sequence.kv)
        sequence.reserved_bytes = max(self._memory.kv_footprint(sequence.reserved_positions), held)
        self._evict_until_free(0, running)

    def reclaim_for_decode(self, running: Ids[Sequence]) -> int:
        """Make sure that every decoding sequence can have one more position. Evicts cached prefixes
        first, then reclaims all borrowed memory. Returns how many of the youngest sequences must be
        preempted as well. running: oldest first."""
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
        """Charge the growing sequences for more positions, and allocate them. A sequence that only
        needs them soon gets them if memory is free."""
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
        """The sequences that grow now and the additional bytes of each; usually empty."""
        # a prompt's positions are reserved until it is evaluated, and the final length is bounded
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
        """A quarter more, so that the caches of a long output are copied only a few times; never
        more than the sequence can need."""
        wanted = max(sequence.num_computed_tokens + STEP, sequence.num_computed_tokens * 5 // 4)
        left = sequence.job.max_tokens - sequence.num_output_tokens
        most = min(self.capacity.context_length, len(sequence.ids) + left)
        return round_up_to_step(max(min(wanted, most), sequence.num_computed_tokens + 1))
