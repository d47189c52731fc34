"""The engine loop: admits, prefills, decodes and samples sequences, and reports their output.

Knows: the model as a function, sequences, the clock. Must not know: threads, text, HTTP. The loop
is not thread-safe and must be used on a single thread.

One step:

    collect   wait for the prompt chunks that the last step dispatched
    admit     start waiting sequences and lease caches for them
    decode    dispatch token n+1 of every decoding sequence before reading token n
    prefill   dispatch the next prompt chunks; the last chunk of a prompt samples the first token
              (in alternate steps, dispatch the next batch of embedding inputs instead)
    read      read the values of tokens n, which the device has computed by now
    sample    for sequences whose grammar needs token n: sample token n+1 from the logits
              dispatched above

The device therefore always has work while Python reads tokens, reports them and builds graphs. The
cost is one extra forward pass after an end-of-sequence token. That token counts as computed, so the
layer caches stay consistent.

A failed step ends only the sequences that caused the failure. If several sequences were decoded
together, the cause is unknown. In this case, all of them restart, and each one is decoded unbatched
until it completes a step.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ids

import mlx.core as mx

from app.core.embeddings import EmbedJob
from app.core.jobs import Capacity, EngineStats, Job, StepOutput
from app.core.ports import PrefixCache
from app.core.prefix_snapshot import PrefixSnapshot
from app.core.units import pluralize
from app.engine.embedder import Embedder
from app.engine.memory_budget import MemoryBudget
from app.engine.memory_profile import MemoryProfile
from app.engine.model_runner import BatchLogits, InFlight, ModelRunner, gather_in_flight
from app.engine.outputs import EngineCounters, OutputProcessor
from app.engine.policy import SchedulerLimits, split_prefill_budget
from app.engine.sampling.sampler import local_tokens
from app.engine.scheduler import Scheduler
from app.engine.sequence import Sequence, ShiftLayers
from app.grammar.compiler import Matcher
from models.base import Model
from models.cpu_layout import is_batch_invariant
from models.kv import LayerCache

log = logging.getLogger(__name__)


class Loop:
    """The engine loop of one model.

    model, prefix: the model and its prefix cache, owned by the loop.
    vocab: the vocabulary size. Token IDs from 0 to vocab - 1 may be sampled or biased.
    context: the maximum number of positions in a sequence.
    exact: whether to cache only prefilled positions, because decode kernels round differently.
    shift: removes positions from the layer caches (see `Model.shift`) when the context of a
        sequence is full. Requires leases with a `shift` method. None disables context shift.
    broadcast_tokens: see `app.engine.sampling.sampler.SamplerBatch`.

    The loop calls `on_stage` with the name of each stage when the stage starts. The watchdog
    reports these names.
    """

    def __init__(
        self,
        model: Model,
        prefix: PrefixCache[LayerCache],
        *,
        vocab: int,
        limits: SchedulerLimits,
        memory: MemoryProfile,
        context: int,
        exact: bool = False,
        shift: ShiftLayers | None = None,
        broadcast_tokens: Callable[[mx.array], mx.array] = local_tokens,
    ) -> None:
        books = MemoryBudget(memory, prefix, context=context, parallel=limits.max_running)
        self.capacity: Capacity = books.capacity
        self.on_stage: Callable[[str], None] = lambda _: None
        self._model_runner = ModelRunner(model, vocab=vocab, broadcast_tokens=broadcast_tokens)
        self._scheduler = Scheduler(prefix, books, limits)
        self._vocab = vocab
        self._limits = limits
        self._context = context
        self._shift = shift
        self._model = model
        self._dispatched_prefills: list[Sequence] = []  # sequences with a prefill chunk in flight
        self._unsampled: list[BatchLogits] = []  # to be sampled in this step
        self._in_flight: list[InFlight] = []
        self._counters = EngineCounters()
        self._outputs = OutputProcessor(self._scheduler, self._counters, exact=exact)
        self._embedder = Embedder(model, memory, self._scheduler, chunk=limits.max_prefill_tokens)
        self._embedded_last = False

    @property
    def exceptions(self) -> int:
        """The number of exceptions in steps so far. A single process continues after an exception.
        A rank cannot continue, because the state of the other ranks is unknown."""
        return self._counters.exceptions + self._embedder.exceptions

    @property
    def batch_invariant(self) -> bool:
        """See `models.cpu_layout.is_batch_invariant`."""
        return is_batch_invariant(self._model)

    @property
    def idle(self) -> bool:
        busy = self._scheduler.waiting or self._scheduler.running or self._outputs.has_updates
        return not busy and self._embedder.idle

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        """Adds a job to the queue. The loop owns `matcher`, the compiled grammar of the job."""
        self._scheduler.add(Sequence(job, vocab=self._vocab, matcher=matcher))

    def embed(self, job: EmbedJob) -> None:
        assert self.capacity.hidden_size is not None, "the model returns no hidden states"
        self._embedder.submit(job)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        """Cancels a job immediately. Does nothing if the job has already ended. `keep` limits the
        number of sampled tokens that are cached."""
        self._embedder.cancel(job)
        sequence = self._scheduler.find(job)
        if sequence is not None:
            self._outputs.finish(sequence, "cancelled", keep=keep)

    def step(self) -> StepOutput:
        """Runs one step and returns its output. Errors caused by a job end the job and are never
        raised."""
        try:
            self._await_prefills()
            self._admit()
            reading, self._in_flight = self._in_flight, []
            self._dispatch_decodes(reading)
            self._dispatch_prompts()
            self._read_tokens(reading)
            self._sample_logits()
        except Exception:
            log.exception("engine step failed: all running sequences are aborted")
            self._counters.exceptions += 1
            self._unsampled = []
            for sequence in list(self._scheduler.running):
                self._outputs.fail(sequence)
        self._counters.steps += 1
        embedded = self._embedder.drain()
        return StepOutput(updates=self._outputs.drain(), stats=self.stats(), embed_results=embedded)

    def stats(self) -> EngineStats:
        return self._counters.stats(
            memory=mx.get_active_memory() + mx.get_cache_memory(),
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            embedding=self._embedder.num_jobs,
            embedded=self._embedder.embedded_tokens,
            evictions=self._scheduler.evictions,
            ledger=self._scheduler.ledger(),
        )

    def prefix_snapshot(self, max_nodes: int) -> PrefixSnapshot:
        return self._scheduler.prefix_snapshot(max_nodes)

    def check(self) -> None:
        """Asserts the invariants that hold between two steps."""
        self._scheduler.check()

    def _admit(self) -> None:
        while (
            not self._embedder.waiting_for_memory
            and (sequence := self._scheduler.next_to_start()) is not None
        ):
            self.on_stage("prefix cache lookup")
            first, started = not sequence.has_run, True
            with self._outputs.fail_on_error(sequence, "failed to start a job"):
                started = self._scheduler.start(sequence)
            if not started:
                return
            if first and sequence.running:
                self._outputs.report_start(sequence)

    # prompts

    def _await_prefills(self) -> None:
        self._embedder.collect()
        chunks, self._dispatched_prefills = self._dispatched_prefills, []
        for sequence in chunks:
            if not sequence.running:
                continue
            self.on_stage("waiting for a prefill chunk")
            with self._outputs.fail_on_error(sequence, "prefill failed"):
                if sequence.num_uncomputed_tokens:
                    mx.eval(sequence.kv_arrays())
                sequence.lease.publish(sequence.ids[: sequence.num_computed_tokens])
                if sequence.num_uncomputed_tokens and not sequence.num_output_tokens:
                    self._outputs.report_prefill(sequence)

    def _dispatch_prompts(self) -> None:
        """Dispatches prompt chunks and embedding inputs in alternating steps. A step never contains
        both, to bound the inter-token latency of running sequences."""
        prefilling = [
            s for s in self._scheduler.running if s.num_uncomputed_tokens and not s.num_in_flight
        ]
        if self._embedder.num_jobs and not (prefilling and self._embedded_last):
            self.on_stage("embedding")
            self._embedded_last = self._embedder.dispatch()
            if self._embedded_last:
                return
        self._embedded_last = False
        self._dispatch_prefills(prefilling)

    def _dispatch_prefills(self, prefilling: Ids[Sequence]) -> None:
        shares = split_prefill_budget([s.num_uncomputed_tokens for s in prefilling], self._limits)
        for sequence, share in zip(prefilling, shares, strict=True):
            if share:
                with self._outputs.fail_on_error(sequence, "prefill failed"):
                    self._prefill(
                        sequence,
                        min(share, sequence.next_prefill_stop - sequence.num_computed_tokens),
                    )

    def _prefill(self, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed_tokens
        self.on_stage(f"prefill of positions {start} to {start + count - 1}")
        scored = self._model_runner.prefill(sequence, count)
        self._counters.prefilled_tokens += count
        self._dispatched_prefills.append(sequence)
        if sequence.num_uncomputed_tokens:
            mx.async_eval(sequence.kv_arrays())
        else:
            self._in_flight.append(self._model_runner.sample(scored))

    # decoding

    def _dispatch_decodes(self, in_flight: Ids[InFlight]) -> None:
        """Dispatches the computation of the token that follows each in-flight token."""
        self._counters.preemptions += self._scheduler.make_decode_room()
        self._embedder.restart_if_reclaimed()
        self._shift_contexts()
        # A sequence that must be recomputed after a shift is in the prefill phase, not decoding.
        growing = [
            s
            for group in in_flight
            for s in group.sequences
            if s.running and s.needs_another_token and not s.num_uncomputed_tokens
        ]
        together = [s for s in growing if not s.isolated]
        for batch in (together, *([s] for s in growing if s.isolated)):
            if batch:
                self._decode(batch, in_flight)

    def _shift_contexts(self) -> None:
        """If context shift is enabled, shifts the sequences whose context is full. If the layers
        cannot shift, the remaining tokens are prefilled again."""
        if self._shift is None:
            return
        for sequence in self._scheduler.running:
            if sequence.num_computed_tokens >= self._context and not sequence.num_uncomputed_tokens:
                sequence.shift(self._shift)

    def _decode(self, batch: Ids[Sequence], in_flight: Ids[InFlight]) -> None:
        self.on_stage(f"decode, batch size {len(batch)}")
        try:
            scored = self._model_runner.decode(batch, gather_in_flight(in_flight, batch))
            if scored.has_grammar:
                mx.async_eval(scored.logits)
                self._unsampled.append(scored)
            else:
                self._in_flight.append(self._model_runner.sample(scored))
        except Exception:
            log.exception("decode step of %s failed", pluralize(len(batch), "sequence"))
            self._handle_batch_failure(batch)
            return
        if len(batch) == 1:
            batch[0].isolated = False

    def _handle_batch_failure(self, batch: Ids[Sequence]) -> None:
        """Handles a failed batch, which invalidates the caches of all its sequences. A single
        sequence ends with an error. Several sequences restart, and each one is decoded
        unbatched."""
        self._counters.exceptions += 1
        if len(batch) == 1:
            self._outputs.fail(batch[0])
            return
        for sequence in reversed(batch):
            self._model_runner.reset_sampler(sequence)
            sequence.discard()
            sequence.isolated = True
            self._scheduler.requeue(sequence)

    def _read_tokens(self, groups: Ids[InFlight]) -> None:
        self.on_stage("waiting for tokens")
        for group in groups:
            try:
                values = group.read()
            except Exception:
                log.exception(
                    "reading the sampled tokens of %s failed",
                    pluralize(len(group.sequences), "sequence"),
                )
                self._handle_batch_failure([s for s in group.sequences if s.running])
                continue
            for sequence, drawn in zip(group.sequences, values, strict=True):
                if self._scheduler.has(sequence):
                    self._outputs.process_token(sequence, drawn)

    def _sample_logits(self) -> None:
        """Samples the next tokens of sequences with a grammar. Skips sequences that ended or
        restarted after their logits were dispatched."""
        groups, self._unsampled = self._unsampled, []
        for scored in (group.without_ended() for group in groups):
            try:
                if scored.sequences:
                    self._in_flight.append(self._model_runner.sample(scored))
            except Exception:
                log.exception("sampling %s failed", pluralize(len(scored.sequences), "sequence"))
                self._handle_batch_failure(scored.sequences)
