"""The memory budget: reserves bytes for each sequence, and evicts cached prefixes when memory is
short.

Knows: bytes, sequences, the size and eviction of the prefix cache, the memory rules. Must not
know: the model, tokens. Memory is reserved before it is allocated, so the engine never exceeds the
budget.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import replace

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, ComputeBackend, Ledger
from app.core.units import format_memory
from app.engine.image_cache import ImageFeatureCache
from app.engine.memory_policy import MemoryPressure, MemoryRules, adjust_prefix_limit
from app.engine.memory_profile import MemoryProfile
from app.engine.policy import choose_growing, count_preemptions
from app.engine.prefix.cache import PrefixCache
from app.engine.sequence import Sequence
from app.engine.wired_memory import MemoryDevice, MlxMemory, WiredMemory
from models.kv import STEP, LayerCache, round_up_to_step

# A sequence with fewer free positions may grow ahead of time.
GROW_AHEAD = 32

# The number of seconds without work after which the memory is unwired.
UNWIRE_AFTER = 300.0

# When cached prefixes have too many layer caches, they are evicted to this part of the maximum, so
# that the allocator's pool is not cleared after each request.
_LAYERS_KEPT_SHARE = 0.9


# The sequences that grow in a step, and the additional bytes of each.
Growth = Mapping[Sequence, int]


class MemoryBudget:
    """The memory budget of one engine. `context` is the maximum number of positions per sequence
    that the model and the configuration allow. min_kv_budget: the number of bytes that must remain
    for layer caches when the weights grow."""

    def __init__(
        self,
        memory: MemoryProfile,
        prefix: PrefixCache[LayerCache],
        *,
        context: int,
        parallel: int,
        backend: ComputeBackend,
        rules: MemoryRules | None = None,
        device: MemoryDevice | None = None,
        features: ImageFeatureCache | None = None,
        min_kv_budget: int = 0,
        vision: bool = False,
    ) -> None:
        self._memory = memory
        self._prefix = prefix
        self._features = features or ImageFeatureCache(0)
        self._rules = rules or MemoryRules()
        self._device = device or MlxMemory()
        self._wired = WiredMemory(self._device, self._rules.wirable)
        self._full_prefix_limit = (
            memory.kv_budget if self._rules.prefix_limit is None else self._rules.prefix_limit
        )
        self._prefix_limit = self._full_prefix_limit  # lower under memory pressure
        self._wired.cover(memory.weights + memory.working)
        self.borrowed_bytes = 0  # for layer caches outside of sequences
        self.slab_bytes = 0  # for the slabs of decode steps, in addition to the sequences
        self.spare_bytes = self._desired_spare_bytes = 0  # see `set_spare_memory`
        self._give_back_slab: Callable[[], None] = lambda: None  # sets slab_bytes to 0
        self._context = context
        self._min_kv_budget = min_kv_budget
        self.capacity = Capacity(
            parallel=parallel,
            context_length=0,  # set below
            kv_budget=0,
            kv_bytes_per_sequence=0,
            hidden_size=memory.hidden_size,
            needs_checkpoints=prefix.needs_checkpoints,
            backend=backend,
            kv_dtype=memory.kv_dtype,
            wirable=self._rules.wirable,
            vision=vision,
        )
        self._update_capacity()

    def _update_capacity(self) -> None:
        memory, context = self._memory, self._context
        fits = memory.max_context(context)
        self.capacity = replace(
            self.capacity,
            context_length=fits,
            kv_budget=memory.kv_budget,
            kv_bytes_per_sequence=memory.kv_footprint(fits),
            limited_by_memory=fits < context,
        )

    def ledger(self, running: Ids[Sequence]) -> Ledger:
        return Ledger(
            budget=self._memory.budget + self.spare_bytes,
            weights=self._memory.weights,
            kv=self._sequence_bytes(running),
            prefix=self._cached_bytes,
            working=self._memory.working,
            prefix_limit=self._prefix_limit,
            wired=self._wired.limit,
        )

    def make_room_for(self, sequence: Sequence, running: Ids[Sequence]) -> bool:
        """Evicts cached prefixes until the sequence can start. Returns whether there is enough
        memory. A sequence may always start if no other sequence is running, because requests that
        cannot fit have already been rejected.

        The next turn of a conversation needs no more room than it adds to the cached turn before,
        which is therefore not evicted for it."""
        room = self._memory.kv_footprint(self.initial_positions(sequence))
        if room <= self._free_bytes(running):
            return True
        ids, reuse = sequence.to_cache_ids(sequence.ids), sequence.may_reuse_prefix
        atomic = sequence.atomic_ranges
        continued, enough = -1, True
        while enough and continued != (
            now := self._prefix.continued_bytes(ids, reuse=reuse, atomic=atomic)
        ):
            # If there is nothing else to evict, this evicts the layers that would be continued.
            continued = now
            enough = self._evict_until_free(room, running, continued=continued)
        return enough or not (running or self.borrowed_bytes)

    def borrow(self, num_bytes: int, running: Ids[Sequence]) -> bool:
        """Borrows memory for layer caches that do not belong to a sequence. Returns whether the
        memory is available."""
        granted = self._evict_until_free(num_bytes, running) or not (running or self.borrowed_bytes)
        self.borrowed_bytes += num_bytes if granted else 0
        return granted

    def return_borrowed(self, num_bytes: int) -> None:
        """Returns borrowed bytes. Bytes that were already reclaimed are not counted again."""
        self.borrowed_bytes = max(0, self.borrowed_bytes - num_bytes)

    def reserve_slab(
        self, num_bytes: int, running: Ids[Sequence], give_back: Callable[[], None]
    ) -> bool:
        """Reserves memory for slabs, in place of the memory that is reserved for them now. They get
        at most half of the memory that the sequences leave, because they only save time. Returns
        whether the memory is available. give_back: called before a sequence would have to wait or
        would be preempted; reserves 0 bytes."""
        self._give_back_slab = give_back
        taken = self._sequence_bytes(running) - self.slab_bytes
        if num_bytes > max(0, (self._memory.kv_budget - taken) // 2):
            return False
        before, self.slab_bytes = self.slab_bytes, 0
        if not self._evict_until_free(num_bytes, running):
            self.slab_bytes = before
            return False
        self.slab_bytes = num_bytes
        return True

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
        self._cover_wired(running)

    def plan_growth(self, running: Ids[Sequence]) -> Growth:
        """Returns the sequences that grow in this step, and the additional bytes of each. The
        result is usually empty."""
        # No growth is needed during prefill, because the whole prompt is already reserved, or once
        # the maximum length of the sequence is reserved.
        able: list[Sequence] = []
        for sequence in running:
            unused = sequence.reserved_positions - sequence.num_computed_tokens
            if (
                unused < GROW_AHEAD
                and sequence.decoding
                and sequence.reserved_positions < self._grown_positions(sequence)
            ):
                able.append(sequence)
        if not able:
            return {}
        chosen = choose_growing(
            [s.reserved_positions - s.num_computed_tokens for s in able], ahead=GROW_AHEAD
        )
        return {
            s: max(0, self._memory.kv_footprint(self._grown_positions(s)) - s.reserved_bytes)
            for i, s in enumerate(able)
            if i in chosen
        }

    def reclaim_for_decode(self, running: Ids[Sequence], growth: Growth) -> int:
        """Makes room for one more position per decoding sequence. Evicts cached prefixes first,
        then reclaims all borrowed memory. Returns how many of the youngest sequences must also be
        preempted. `running` lists the oldest sequence first. growth: see `plan_growth`."""
        needed = {
            s: count for s, count in growth.items() if s.reserved_positions <= s.num_computed_tokens
        }
        if self._evict_until_free(sum(needed.values()), running):
            return 0
        if self.borrowed_bytes:
            self.borrowed_bytes = 0
            return self.reclaim_for_decode(running, growth)
        return count_preemptions(
            reserved=[s.reserved_bytes for s in running],
            growth=[needed.get(s, 0) for s in running],
            free=self._free_bytes(running),
        )

    def grow_reservations(self, running: Ids[Sequence], growth: Growth) -> None:
        """Reserves and allocates more positions for the growing sequences. Growth ahead of time
        uses only free memory. growth: see `plan_growth`."""
        for sequence, count in growth.items():
            if (
                not self._evict_until_free(count, running)
                and sequence.num_computed_tokens < sequence.reserved_positions
            ):
                continue
            sequence.reserved_bytes += count
            sequence.reserved_positions = self._grown_positions(sequence)
            for layer in sequence.kv:
                layer.reserve(sequence.reserved_positions)

    def enforce_rules(self, running: Ids[Sequence]) -> None:
        """Evicts cached prefixes beyond their limits, and wires the memory of running sequences.
        Called in each step."""
        if self.spare_bytes > self._desired_spare_bytes:
            self.set_spare_memory(self._desired_spare_bytes, running)
        self._evict_cached(self._cached_bytes - self._prefix_limit)
        most = self._rules.max_cached_layers
        if most is not None and self._prefix.num_layers > most:
            self._evict_layers(int(_LAYERS_KEPT_SHARE * most))
        self._cover_wired(running)

    def add_weights(self, num_bytes: int, running: Ids[Sequence]) -> None:
        """Adds the size of weights that are about to be loaded, or subtracts that of freed ones.
        Evicts cached prefixes for them. If that does not suffice, the next step preempts the
        youngest sequences. A sequence that has been submitted before may still have the length
        that was possible then, if necessary as the only one. Raises AppError(MODEL_FILES), and then
        changes nothing, if too little memory would remain."""
        memory = replace(self._memory, weights=self._memory.weights + num_bytes)
        if num_bytes > 0 and memory.kv_budget < self._min_kv_budget:
            most = max(0, self._memory.kv_budget - self._min_kv_budget)
            raise AppError(
                ErrorKind.MODEL_FILES,
                f"the adapter needs {format_memory(num_bytes)}, but the memory budget has "
                f"{format_memory(most)} for adapters: unload another one, or serve the model with "
                "a smaller --context or with more --memory",
            )
        change = memory.kv_budget - self._memory.kv_budget
        self._memory = memory
        self._update_capacity()
        if self._rules.prefix_limit is None:
            self._change_prefix_limit(change)
        self._evict_until_free(0, running)

    def _change_prefix_limit(self, change: int) -> None:
        self._full_prefix_limit += change
        # Memory pressure may have lowered the limit, which then rises by the change only.
        self._prefix_limit = min(self._full_prefix_limit, self._prefix_limit + max(0, change))

    def set_spare_memory(self, num_bytes: int, running: Ids[Sequence]) -> int:
        """Sets the memory that this engine may use in addition to its budget, until it is set to
        less. Only cached prefixes use it, so it can be taken back between two steps, and requests
        start, wait and are preempted as they are without it.

        A running sequence that continues a cached prefix takes over its layer caches, which may
        have more capacity than the sequence reserves. Memory that is therefore still in use stays
        counted until the sequence ends. Returns the bytes that the engine may use now, in addition
        to its budget."""
        in_use = self._sequence_bytes(running) - self._memory.kv_budget
        before, self._desired_spare_bytes = self.spare_bytes, num_bytes
        self.spare_bytes = max(num_bytes, min(before, in_use))
        if self._rules.prefix_limit is None:
            self._change_prefix_limit(self.spare_bytes - before)
        if self.spare_bytes < before:
            self._evict_until_free(0, running)
            self._device.trim()
        return self.spare_bytes

    def maintain(self, running: Ids[Sequence], idle_seconds: float) -> bool:
        """Adapts to the memory pressure of the system, and unwires the memory of an idle engine.
        Called every few seconds, between steps and while the engine is idle. Returns whether the
        ledger has changed.

        idle_seconds: the number of seconds without work.
        """
        before = self.ledger(running)
        if idle_seconds >= UNWIRE_AFTER and self._wired.release():
            self._device.clear_cache()
        if self._rules.shrinks_under_pressure:
            pressure = self._device.read_pressure()
            self._prefix_limit = adjust_prefix_limit(
                self._prefix_limit,
                used=self._cached_bytes,
                full=self._full_prefix_limit,
                pressure=pressure,
            )
            if pressure is not MemoryPressure.NORMAL:
                self._relieve(running)
        return self.ledger(running) != before

    def _evict_layers(self, most: int) -> None:
        """Evicts cached prefixes until they have at most `most` layer caches. Unused buffers count
        like used ones, so they are freed."""
        while self._prefix.num_layers > most and self._prefix.evict(1):
            pass
        self._device.clear_cache()

    def _relieve(self, running: Ids[Sequence]) -> None:
        """Returns memory that no running sequence needs to the system."""
        self._evict_cached(self._cached_bytes - self._prefix_limit)
        self._device.trim()
        self._wired.reduce(self.ledger(running).in_use)

    @property
    def _cached_bytes(self) -> int:
        """The bytes of cached prefixes and of the features of images that no sequence uses."""
        return self._prefix.nbytes + self._features.nbytes

    def _evict_cached(self, num_bytes: int) -> int:
        """Evicts cached prefixes, and then features, until `num_bytes` bytes are freed. Returns the
        number of freed bytes."""
        if num_bytes <= 0:
            return 0
        freed = self._prefix.evict(num_bytes)
        return freed + self._features.evict(num_bytes - freed)

    def _cover_wired(self, running: Ids[Sequence]) -> None:
        if self._rules.wirable:
            self._wired.cover(self.ledger(running).in_use)

    def _sequence_bytes(self, running: Ids[Sequence]) -> int:
        """Returns the reserved bytes of running sequences, and of the memory that grows with
        them."""
        total = self.borrowed_bytes + self.slab_bytes + self._features.used_bytes
        for sequence in running:
            total += sequence.reserved_bytes
        return total

    def _free_bytes(self, running: Ids[Sequence]) -> int:
        """Returns the free bytes that sequences may use."""
        return min(self.ledger(running).free, self._unreserved_bytes(running))

    def _unreserved_bytes(self, running: Ids[Sequence]) -> int:
        """Returns the bytes that are free if all cached prefixes are evicted, without spare
        memory."""
        kv_budget = self._memory.kv_budget
        if not self.spare_bytes:
            return kv_budget - self._sequence_bytes(running)
        # Capacity beyond the reservation can only come from a prefix in spare memory.
        footprints = sum(self._memory.kv_footprint(s.reserved_positions) for s in running)
        others = self.borrowed_bytes + self.slab_bytes + self._features.used_bytes
        return kv_budget - others - footprints

    def _evict_until_free(
        self, num_bytes: int, running: Ids[Sequence], *, continued: int = 0
    ) -> bool:
        """continued: how many of the bytes are taken over from a cached prefix."""
        short = num_bytes - continued - self.ledger(running).free
        if short > 0:
            # The freed buffers stay in the allocator's pool, up to its limit, for the next caches.
            short -= self._evict_cached(short)
        if num_bytes:
            short = max(short, num_bytes - self._unreserved_bytes(running))
        if 0 < short <= self.slab_bytes:
            short -= self.slab_bytes
            self._give_back_slab()
        return short <= 0

    def _grown_positions(self, sequence: Sequence) -> int:
        """Returns the number of positions after the next growth. The reservation grows by at least
        a quarter, so that the caches of a long output are copied only a few times, but never beyond
        the maximum length of the sequence."""
        desired = max(sequence.num_computed_tokens + STEP, sequence.num_computed_tokens * 5 // 4)
        left = sequence.job.max_tokens - sequence.num_output_tokens
        most = min(self.capacity.context_length, len(sequence.ids) + left)
        return round_up_to_step(max(min(desired, most), sequence.num_computed_tokens + 1))
