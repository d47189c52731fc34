"""The scheduler: manages waiting and running sequences, starts and preempts them, and plans the
prompt chunks of a step.

Knows: sequences, the prefix cache that leases their layer caches, the memory budget, the clock.
Must not know: the model, tokens, job updates. The sequences change only between two forward passes.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Ids
from contextlib import contextmanager

from app.core.errors import AppError
from app.core.jobs import Ledger, PrefixSnapshot
from app.core.units import pluralize
from app.engine.memory_budget import MemoryBudget
from app.engine.policy import (
    MIN_RUNNING,
    PendingPrompt,
    SchedulerLimits,
    choose_aligned_round,
    count_admissible,
    count_prefill_rounds,
    fair_order,
    should_defer,
    split_prefill_budget,
    update_pace,
)
from app.engine.prefix.cache import PrefixCache
from app.engine.sequence import Sequence
from models.kv import LayerCache

log = logging.getLogger(__name__)


class Scheduler:
    """Schedules the sequences of one engine. The scheduler owns `prefix`, the prefix cache.

    exceptions: the number of failed operations on the prefix cache so far, which cost only cached
        prefixes.
    """

    def __init__(
        self, prefix: PrefixCache[LayerCache], budget: MemoryBudget, limits: SchedulerLimits
    ) -> None:
        self.exceptions = 0
        self._prefix = prefix
        self._budget = budget
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._start_count = 0
        self._last_started: dict[str, int] = {}  # caller -> start count at its last start

    @property
    def waiting(self) -> Ids[Sequence]:
        return self._waiting

    @property
    def running(self) -> Ids[Sequence]:
        return self._running

    @property
    def evictions(self) -> int:
        return self._prefix.evictions

    def prefix_snapshot(self, max_nodes: int) -> PrefixSnapshot:
        return self._prefix.snapshot(max_nodes)

    @property
    def borrowed_bytes(self) -> int:
        return self._budget.borrowed_bytes

    def borrow(self, num_bytes: int) -> bool:
        """Borrows memory that does not belong to a sequence, for example for embedding inputs.
        `make_decode_room` may reclaim all borrowed bytes at any time."""
        return self._budget.borrow(num_bytes, self._running)

    def return_borrowed(self, num_bytes: int) -> None:
        self._budget.return_borrowed(num_bytes)

    def reserve_slab(self, num_bytes: int, *, give_back: Callable[[], None]) -> bool:
        """Reserves memory for the slabs of decode steps. See `MemoryBudget.reserve_slab`."""
        return self._budget.reserve_slab(num_bytes, self._running, give_back)

    def ledger(self) -> Ledger:
        return self._budget.ledger(self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def find(self, job: str) -> Sequence | None:
        here = (*self._waiting, *self._running)
        return next((s for s in here if s.job.id == job), None)

    def has(self, sequence: Sequence) -> bool:
        return sequence.running or sequence in self._waiting

    def next_to_start(self, *, seconds_per_row: float | None = None) -> Sequence | None:
        """Returns the next sequence to start, which is the first waiting sequence that should not
        be deferred. Returns None if the maximum number of sequences is running, or if all waiting
        sequences are deferred. seconds_per_row: see `count_admissible`."""
        count = count_admissible(
            waiting=len(self._waiting),
            running=len(self._running),
            limits=self._limits,
            seconds_per_row=seconds_per_row,
        )
        if not count:
            return None
        return next((s for s in self._waiting_in_order() if not self._should_defer(s)), None)

    def _waiting_in_order(self) -> Ids[Sequence]:
        """Returns the waiting sequences in the order in which they start. Preempted sequences come
        first, followed by new sequences in fair order."""
        begun = [s for s in self._waiting if s.has_run]
        fresh = [s for s in self._waiting if not s.has_run]
        here = [s.job.caller for s in (*self._running, *begun)]
        order = fair_order([s.job.caller for s in fresh], here, self._last_started)
        return (*begun, *(fresh[i] for i in order))

    def _should_defer(self, sequence: Sequence) -> bool:
        """Returns whether a running sequence is currently prefilling a prefix that this sequence
        can reuse. The running sequence always advances, so the wait is finite. Eight clients with
        the same system prompt therefore prefill it only once."""
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
            if other.prefilling and other.cache_salt == sequence.cache_salt
        )

    def start(self, sequence: Sequence) -> bool:
        """Leases layer caches for a waiting sequence. Returns False if there is not enough
        memory."""
        if not self._budget.make_room_for(sequence, self._running):
            return False
        self._waiting.remove(sequence)
        job = sequence.job
        marks = job.message_ends
        if marks is None:
            marks = [i for i, token in enumerate(sequence.ids, 1) if token in job.stop_token_ids]
        room = self._budget.initial_positions(sequence)
        sequence.start(
            self._prefix.begin(
                sequence.to_cache_ids(sequence.ids),
                turn_ends=marks,
                reuse=sequence.may_reuse_prefix,
                reserve_length=room,
                atomic=sequence.atomic_ranges,
                stops=[stop for image in job.images for stop in (image.start, image.end)],
            )
        )
        self._running.append(sequence)
        self._start_count += 1
        self._last_started[job.caller] = self._start_count
        self._budget.reserve(sequence, self._running)
        return True

    def commit(self, sequence: Sequence, *, keep: int) -> None:
        """Ends the lease of a running sequence, and stores its caches (see `Sequence.commit`). If
        this fails, the caches are dropped."""
        with self._lose_prefixes_on_error("storing the caches of a sequence"):
            sequence.commit(keep=keep)

    def discard(self, sequence: Sequence) -> None:
        """Ends the lease of a running sequence, and drops its caches."""
        with self._lose_prefixes_on_error("dropping the caches of a sequence"):
            sequence.discard()

    def make_decode_room(self) -> int:
        """Makes room for one more position per decoding sequence. If memory is short, preempts the
        youngest sequences. Returns the number of preempted sequences."""
        growth = self._budget.plan_growth(self._running)
        count = self._budget.reclaim_for_decode(self._running, growth)
        for sequence in self._running[len(self._running) - count :][::-1]:
            self.preempt(sequence)
        if count:
            growth = self._budget.plan_growth(self._running)
        self._budget.grow_reservations(self._running, growth)
        return count

    def preempt(self, sequence: Sequence) -> None:
        """Returns a running sequence to the front of the queue."""
        log.info(
            "preempting a sequence of %s: out of KV cache memory",
            pluralize(len(sequence.ids), "token"),
        )
        self.commit(sequence, keep=len(sequence.ids))
        self.requeue(sequence)

    def enforce_memory_rules(self) -> None:
        """See `MemoryBudget.enforce_rules`."""
        with self._lose_prefixes_on_error("evicting cached prefixes"):
            self._budget.enforce_rules(self._running)

    def maintain_memory(self, idle_seconds: float) -> bool:
        """See `MemoryBudget.maintain`."""
        with self._lose_prefixes_on_error("memory maintenance"):
            return self._budget.maintain(self._running, idle_seconds)
        return True

    def set_spare_memory(self, num_bytes: int) -> int:
        """See `MemoryBudget.set_spare_memory`."""
        with self._lose_prefixes_on_error("evicting cached prefixes from spare memory"):
            return self._budget.set_spare_memory(num_bytes, self._running)
        return self._budget.spare_bytes

    def add_weights(self, num_bytes: int) -> None:
        """See `MemoryBudget.add_weights`."""
        with self._lose_prefixes_on_error("evicting cached prefixes for weights"):
            self._budget.add_weights(num_bytes, self._running)

    def requeue(self, sequence: Sequence) -> None:
        """Puts a sequence without caches at the front of the queue. Its in-flight token may still
        be read."""
        assert not sequence.running
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    @contextmanager
    def _lose_prefixes_on_error(self, doing: str) -> Generator[None]:
        """If an exception is raised in the context, only cached prefixes are lost: the prefix cache
        has dropped the caches that it could not store or shrink, and no request fails. Violated
        assertions are bugs, and are raised, as is AppError."""
        try:
            yield
        except (AssertionError, AppError):
            raise
        except Exception:
            log.exception("%s failed: cached prefixes are lost", doing)
            self.exceptions += 1

    def check(self) -> None:
        """Asserts the invariants that hold between two steps."""
        self._prefix.check()
        assert all(s.running for s in self._running)
        assert not any(s.running for s in self._waiting)
        assert len(self._running) <= self._limits.max_running
        assert self.ledger().free >= 0 or len(self._running) <= 1


class StepPacing:
    """Plans the rounds of prompt chunks of a step, and measures the pace of steps.

    A round is about one chunk's worth of prompt tokens. The clock decides how many rounds a step
    takes. It has no effect on the position at which a chunk begins. clock: returns the time in
    seconds.

    seconds_per_row: the duration of a decode step without other work, per sequence. None before it
        was measured.
    decode_seconds: the duration of a decode step without other work. None before it was measured.
    """

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self.seconds_per_row: float | None = None
        self.decode_seconds: float | None = None
        self._seconds_per_token: float | None = None
        self._turn = 0
        self._tokens = 0  # of this step
        self._began = 0.0

    def count_next(self) -> int:
        """Returns the number of rounds of the next step."""
        return count_prefill_rounds(self._seconds_per_token, self._limits)

    def plan(self, prompts: Ids[PendingPrompt], *, pack: bool) -> list[tuple[int, int]]:
        """Returns the chunks of the next round, as indices into `prompts` and numbers of tokens.
        pack: whether chunks of several prompts can share a forward pass."""
        if self._limits.align_chunks:
            chosen = choose_aligned_round(prompts, self._limits, turn=self._turn, pack=pack)
            self._turn += bool(chosen)
            return chosen
        shares = split_prefill_budget([prompt.remaining for prompt in prompts], self._limits)
        return [(i, share) for i, share in enumerate(shares) if share]

    def add_tokens(self, count: int) -> None:
        """Counts the tokens of a chunk that is part of this step."""
        self._tokens += count

    def start_step(self) -> None:
        self._began, self._tokens = self._clock(), 0

    def end_step(self, *, rows: int) -> None:
        """Measures the pace. The device has computed the chunks. rows: the number of sequences that
        were decoded; 0 if the step computed embeddings or a part of an image."""
        seconds = self._clock() - self._began
        self._seconds_per_token = update_pace(
            self._seconds_per_token, count=self._tokens, seconds=seconds
        )
        if self._tokens or not rows:
            return
        self.decode_seconds = update_pace(self.decode_seconds, count=1, seconds=seconds)
        # Fewer rows take almost as long, because each step reads all weights.
        if rows >= MIN_RUNNING:
            self.seconds_per_row = update_pace(self.seconds_per_row, count=rows, seconds=seconds)
