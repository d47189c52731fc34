"""The generation loop: admit, prefill, decode, sample, report.

Knows: the model as a function, sequences, the clock. Must not know: threads, text, HTTP. Runs on
one thread, which its owner provides; nothing here is shared.

One step:

    collect   wait for the prompt chunks that the last step dispatched
    admit     take waiting sequences, lease caches for them
    decode    dispatch token n+1 of every decoding sequence, though n has not been read yet
    prefill   dispatch the next chunk of prompts; the last chunk samples the first token
              (or, taking turns with it, the next piece of the inputs that are embedded)
    read      take the values of tokens n, which the device finished meanwhile
    sample    where a grammar must know token n: draw n+1 now, from the logits dispatched above

So the device always has work while Python reads, reports and builds. The price is one evaluated
token too many behind an end-of-sequence id; it is recorded as evaluated, which keeps caches true.

A step that fails ends only the sequences it belongs to. Where that is not known, because several
decoded together, all of them begin again, each on its own until it has passed a step.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ids

import mlx.core as mx

from app.core.embeddings import EmbedJob
from app.core.jobs import Capacity, EngineStats, Job, Step
from app.core.ports import PrefixCache
from app.engine.batch import Batch, Pending, Scored, pending_tokens
from app.engine.books import Books
from app.engine.embedder import Embedder
from app.engine.grammar import Matcher
from app.engine.memory import Memory
from app.engine.reports import Reports
from app.engine.roster import Roster
from app.engine.sampler import own
from app.engine.scheduler import Limits, prefill_shares
from app.engine.sequence import Sequence, Shift
from app.engine.tally import Tally
from models.base import Model
from models.kv import LayerCache

log = logging.getLogger(__name__)


class Loop:
    """model, prefix: owned from now on. vocab: ids that may be sampled or biased, 0 to vocab-1.
    context: positions that a sequence may have. exact: cache only what was prefilled, never what
    was decoded (other kernels, other bits). shift: what makes layers forget positions (see
    `Model.shift`), for sequences that may outgrow their context; needs leases that can `shift`.
    agreed: see `app.engine.sampler.Rows`.

    on_stage: told in words what begins now; for whoever watches that the engine turns.
    """

    def __init__(
        self,
        model: Model,
        prefix: PrefixCache[LayerCache],
        *,
        vocab: int,
        limits: Limits,
        memory: Memory,
        context: int,
        exact: bool = False,
        shift: Shift | None = None,
        agreed: Callable[[mx.array], mx.array] = own,
    ) -> None:
        books = Books(memory, prefix, context=context, parallel=limits.running)
        self.capacity: Capacity = books.capacity
        self.on_stage: Callable[[str], None] = lambda _: None
        self._batch = Batch(model, vocab=vocab, agreed=agreed)
        self._roster = Roster(prefix, books, limits)
        self._vocab = vocab
        self._limits = limits
        self._context = context
        self._shift = shift
        self._in_flight: list[Sequence] = []  # prompt chunks that the device works on
        self._scored: list[Scored] = []  # to be sampled in this step
        self._pending: list[Pending] = []
        self._tally = Tally()
        self._reports = Reports(self._roster, self._tally, exact=exact)
        self._embedder = Embedder(model, memory, self._roster, chunk=limits.prefill)
        self._embedded_last = False

    @property
    def faults(self) -> int:
        """Times that something of a step raised. Alone one goes on; of several who compute the
        same, nobody knows where the others are."""
        return self._tally.faults + self._embedder.faults

    @property
    def idle(self) -> bool:
        busy = self._roster.waiting or self._roster.running or self._reports.waiting
        return not busy and self._embedder.idle

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        """matcher: the job's grammar, compiled; owned from now on."""
        self._roster.add(Sequence(job, vocab=self._vocab, matcher=matcher))

    def embed(self, job: EmbedJob) -> None:
        assert self.capacity.width is not None, "a model that gives no hidden states"
        self._embedder.submit(job)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        """End a job now; unknown ones have ended already. keep: cache only this many of its
        sampled tokens."""
        self._embedder.cancel(job)
        sequence = self._roster.find(job)
        if sequence is not None:
            self._reports.end(sequence, "cancelled", keep=keep)

    def step(self) -> Step:
        """One turn. Returns what happened; never raises for what a job can bring about."""
        try:
            self._collect_chunks()
            self._admit()
            reading, self._pending = self._pending, []
            self._dispatch_decodes(reading)
            self._dispatch_prompts()
            self._read(reading)
            self._sample_scored()
        except Exception:
            log.exception("engine step failed: all running sequences are aborted")
            self._tally.faults += 1
            self._scored = []
            for sequence in list(self._roster.running):
                self._reports.fail(sequence)
        self._tally.steps += 1
        embedded = self._embedder.told()
        return Step(updates=self._reports.told(), stats=self.stats(), embedded=embedded)

    def stats(self) -> EngineStats:
        return self._tally.stats(
            memory=mx.get_active_memory() + mx.get_cache_memory(),
            running=len(self._roster.running),
            waiting=len(self._roster.waiting),
            embedding=self._embedder.jobs,
            embedded=self._embedder.tokens,
            evictions=self._roster.evictions,
            ledger=self._roster.ledger(),
        )

    def check(self) -> None:
        """Assert what must hold between two steps."""
        self._roster.check()

    def _admit(self) -> None:
        while not self._embedder.starving and (sequence := self._roster.next()) is not None:
            self.on_stage("prefix cache lookup")
            first, started = not sequence.started, True
            with self._reports.at_the_cost_of(sequence, "failed to start a job"):
                started = self._roster.start(sequence)
            if not started:
                return
            if first and sequence.running:
                self._reports.start(sequence)

    # prompts

    def _collect_chunks(self) -> None:
        self._embedder.collect()
        chunks, self._in_flight = self._in_flight, []
        for sequence in chunks:
            if not sequence.running:
                continue
            self.on_stage("waiting for a prefill chunk")
            with self._reports.at_the_cost_of(sequence, "prefill failed"):
                if sequence.unread:
                    mx.eval(sequence.state())
                sequence.lease.reached(sequence.ids[: sequence.evaluated])
                if sequence.unread and not sequence.sampled:
                    self._reports.advance(sequence)

    def _dispatch_prompts(self) -> None:
        """Prompts and inputs that are embedded take turns: a step has no more of both together than
        of one, and so nobody's next token comes later."""
        prefilling = [s for s in self._roster.running if s.unread and not s.pending]
        if self._embedder.jobs and not (prefilling and self._embedded_last):
            self.on_stage("embedding")
            self._embedded_last = self._embedder.dispatch()
            if self._embedded_last:
                return
        self._embedded_last = False
        self._dispatch_prefills(prefilling)

    def _dispatch_prefills(self, prefilling: Ids[Sequence]) -> None:
        shares = prefill_shares([s.unread for s in prefilling], self._limits)
        for sequence, share in zip(prefilling, shares, strict=True):
            if share:
                with self._reports.at_the_cost_of(sequence, "prefill failed"):
                    self._prefill(sequence, min(share, sequence.next_pause - sequence.evaluated))

    def _prefill(self, sequence: Sequence, count: int) -> None:
        self.on_stage(f"prefill of {count} tokens at position {sequence.evaluated}")
        scored = self._batch.prefill(sequence, count)
        self._tally.prefilled += count
        self._in_flight.append(sequence)
        if sequence.unread:
            mx.async_eval(sequence.state())
        else:
            self._pending.append(self._batch.sample(scored))

    # answers

    def _dispatch_decodes(self, reading: Ids[Pending]) -> None:
        """Dispatch the successor of every pending token."""
        self._tally.preemptions += self._roster.make_way()
        self._embedder.make_way()
        self._shift_contexts()
        # who was shifted and has to evaluate all of it again is no decoding one any more
        growing = [
            s
            for group in reading
            for s in group.sequences
            if s.running and s.wants_another and not s.unread
        ]
        together = [s for s in growing if not s.suspect]
        for batch in (together, *([s] for s in growing if s.suspect)):
            if batch:
                self._decode(batch, reading)

    def _shift_contexts(self) -> None:
        """Sequences that fill their context go on with less of it, where that is wanted. The ids of
        those whose layers cannot shift become a prompt again."""
        if self._shift is None:
            return
        for sequence in self._roster.running:
            if sequence.evaluated >= self._context and not sequence.unread:
                sequence.shift(self._shift)

    def _decode(self, batch: Ids[Sequence], reading: Ids[Pending]) -> None:
        self.on_stage(f"decode of {len(batch)} sequences")
        try:
            scored = self._batch.decode(batch, pending_tokens(reading, batch))
            if scored.constrained:
                mx.async_eval(scored.logits)
                self._scored.append(scored)
            else:
                self._pending.append(self._batch.sample(scored))
        except Exception:
            log.exception("decode step of %d sequences failed", len(batch))
            self._blame(batch)
            return
        if len(batch) == 1:
            batch[0].suspect = False

    def _blame(self, batch: Ids[Sequence]) -> None:
        """One of them failed, and took the caches of all with it. A lone one is the culprit;
        several begin again, each for itself."""
        self._tally.faults += 1
        if len(batch) == 1:
            self._reports.fail(batch[0])
            return
        for sequence in reversed(batch):
            self._batch.forget(sequence)
            sequence.discard()
            sequence.suspect = True
            self._roster.park(sequence)

    def _read(self, groups: Ids[Pending]) -> None:
        self.on_stage("waiting for tokens")
        for group in groups:
            try:
                values = group.read()
            except Exception:
                log.exception(
                    "reading the sampled tokens of %d sequences failed", len(group.sequences)
                )
                self._blame([s for s in group.sequences if s.running])
                continue
            for sequence, drawn in zip(group.sequences, values, strict=True):
                if self._roster.has(sequence):
                    self._reports.take(sequence, drawn)

    def _sample_scored(self) -> None:
        """Nobody is here who has ended, or begun again, since the logits were dispatched."""
        groups, self._scored = self._scored, []
        for scored in (group.running() for group in groups):
            try:
                if scored.sequences:
                    self._pending.append(self._batch.sample(scored))
            except Exception:
                log.exception("sampling %d sequences failed", len(scored.sequences))
                self._blame(scored.sequences)
