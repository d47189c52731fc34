"""The memory budget: reserves bytes for each sequence, and evicts cached prefixes when memory is
short.

Knows: bytes, sequences, the size and eviction of the prefix cache. Must not know: the model,
tokens. Memory is reserved before it is allocated, so the engine never exceeds the budget.
"""

from collections.abc import Sequence as Ids

from app.core.jobs import Capacity, Ledger
from app.core.ports import PrefixCache
from app.engine.device import detect_backend
from app.engine.memory_profile import MemoryProfile, clear_allocator_cache
from app.engine.policy import choose_growing, count_preemptions
from app.engine.sequence import Sequence
from models.kv import STEP, LayerCache, round_up_to_step

# A sequence with fewer free positions may grow ahead of time.
GROW_AHEAD = 32


class MemoryBudget:
    """The memory budget of one engine. `context` is the maximum number of positions per sequence
    that the model and the configuration allow."""

    def __init__(
        self, memory: MemoryProfile, prefix: PrefixCache[LayerCache], *, context: int, parallel: int
    ) -> None:
        self._memory = memory
        self._prefix = prefix
        self.borrowed_bytes = 0  # for layer caches outside of sequences
        fits = memory.max_context(context)
        self.capacity = Capacity(
            parallel=parallel,
            context_length=fits,
            kv_budget=memory.kv_budget,
            kv_bytes_per_sequence=memory.kv_footprint(fits),
            limited_by_memory=fits < context,
            hidden_size=memory.hidden_size,
            needs_checkpoints=prefix.needs_checkpoints,
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
        """Evicts cached prefixes until the sequence can start. Returns whether there is enough
        memory. A sequence may always start if no other sequence is running, because requests that
        cannot fit have already been rejected."""
        room = self._memory.kv_footprint(self.initial_positions(sequence))
        return self._evict_until_free(room, running) or not (running or self.borrowed_bytes)

    def borrow(self, num_bytes: int, running: Ids[Sequence]) -> bool:
        """Borrows memory for layer caches that do not belong to a sequence. Returns whether the
        memory is available."""
        granted = self._evict_until_free(num_bytes, running) or not (running or self.borrowed_bytes)
        self.borrowed_bytes += num_bytes if granted else 0
        return granted

    def return_borrowed(self, num_bytes: int) -> None:
        """Returns borrowed bytes. Bytes that were already reclaimed are not counted again."""
        self.borrowed_bytes = max(0, self.borrowed_bytes - num_bytes)

    def initial_positions(self, sequence: Sequence) -> int:
        """Returns the number of positions to reserve at the start. The positions include all tokens
        of the sequence and the first part of its output."""
        answer = min(sequence.job.max_tokens - sequence.num_output_tokens, STEP)
        desired = min(len(sequence.ids) + answer, self.capacity.context_length)
        return round_up_to_step(max(desired, len(sequence.ids) + 1))

    def reserve(self, sequence: Sequence, running: Ids[Sequence]) -> None:
        """Reserves the bytes of a sequence that has just leased its layer caches. `running`
        includes the sequence."""
        sequence.reserved_positions = self.initial_positions(sequence)
        # Reused caches may have more capacity than requested.
        allocated = sum(layer.nbytes for layer in sequence.kv)
        sequence.reserved_bytes = max(
            self._memory.kv_footprint(sequence.reserved_positions), allocated
        )
        self._evict_until_free(0, running)

    def reclaim_for_decode(self, running: Ids[Sequence]) -> int:
        """Makes room for one more position per decoding sequence. Evicts cached prefixes first,
        then reclaims all borrowed memory. Returns how many of the youngest sequences must also be
        preempted. `running` lists the oldest sequence first."""
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
        """Reserves and allocates more positions for the growing sequences. Growth ahead of time
        uses only free memory."""
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
        """Returns the sequences that grow now, and the additional bytes of each. The result is
        usually empty."""
        # No growth is needed during prefill, because the whole prompt is already reserved, or once
        # the maximum length of the sequence is reserved.
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
        """Returns the number of positions after the next growth. The reservation grows by at least
        a quarter, so that the caches of a long output are copied only a few times, but never beyond
        the maximum length of the sequence."""
        desired = max(sequence.num_computed_tokens + STEP, sequence.num_computed_tokens * 5 // 4)
        left = sequence.job.max_tokens - sequence.num_output_tokens
        most = min(self.capacity.context_length, len(sequence.ids) + left)
        return round_up_to_step(max(min(desired, most), sequence.num_computed_tokens + 1))
