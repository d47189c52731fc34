"""The engine loop: admits, prefills, decodes and samples sequences, and reports their output.

Knows: the model as a function, sequences, the clock. Must not know: threads, text, HTTP. The loop
is not thread-safe and must be used on a single thread.

One step:

    prefill   dispatch the rest of the prompt chunks that the last step began
    admit     start waiting sequences and lease caches for them
    decode    dispatch token n+1 of every decoding sequence before reading token n
    read      read the values of tokens n, which the device has computed by now
    sample    for sequences whose grammar needs token n: sample token n+1 from the logits
              dispatched above
    begin     build the next prompt chunk and dispatch its first layers; the last chunk of a prompt
              samples the first token (in turn with prompts, the next batch of embedding inputs or a
              part of the vision tower follows instead)
    read      if a chunk follows, read the values of tokens n+1

The output of a step is posted when it returns. MLX blocks in `async_eval` for most of a prompt
chunk, so a chunk is dispatched only after every token that precedes it was posted. Meanwhile, the
device computes the first layers of the chunk. The device therefore always has work while Python
reads tokens, reports them and builds graphs. Without prompts, the cost is one extra forward pass
after an end-of-sequence token. That token counts as computed, so the layer caches stay consistent.

A failed step ends only the sequences that caused the failure. If several sequences were decoded
together, the cause is unknown. In this case, all of them restart, and each one is decoded unbatched
until it completes a step.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    MAX_SNAPSHOT_NODES,
    Capacity,
    EngineCall,
    EngineStats,
    GetPrefixSnapshot,
    Job,
    LoadAdapter,
    SetSpareMemory,
    StepOutput,
    UnloadAdapter,
)
from app.core.requests import EmbedJob
from app.core.units import pluralize
from app.engine.adapters import Adapters
from app.engine.decode_slab import DEFAULT_SLAB_POLICY, SlabPolicy, create_decode_slab
from app.engine.device import detect_backend
from app.engine.embedder import Embedder
from app.engine.image_cache import ImageFeatureCache
from app.engine.image_encoder import ImageEncoder
from app.engine.memory_budget import MemoryBudget
from app.engine.memory_policy import MemoryRules
from app.engine.memory_profile import MemoryProfile
from app.engine.model_runner import (
    BatchLogits,
    InFlight,
    ModelRunner,
    PrefillChunk,
    gather_in_flight,
)
from app.engine.outputs import EngineCounters, OutputProcessor
from app.engine.policy import PendingPrompt, SchedulerLimits
from app.engine.prefix.cache import PrefixCache
from app.engine.sampling.sampler import local_tokens
from app.engine.scheduler import Scheduler, StepPacing
from app.engine.sequence import Sequence, ShiftLayers
from app.engine.wired_memory import MemoryDevice
from app.grammar.compiler import Matcher
from models import architectures
from models.base import Model
from models.cpu_layout import get_activation_bits, is_batch_invariant
from models.kv import LayerCache

log = logging.getLogger(__name__)

# The part of the memory budget that the features of images may use while no sequence needs them.
_IMAGE_CACHE_SHARE = 0.05

_ADAPTER_LOST = (
    "the adapter could not be read when the model was loaded again (see the log): unload it, and "
    "load it again"
)

# The work that a step does besides decoding.
_Work = Literal["embeddings", "image", "prompts"]

# The sequences of one forward pass, and the numbers of their tokens.
PassPlan = Ids[tuple[Sequence, int]]


class Loop:
    """The engine loop of one model.

    model, prefix: the model and its prefix cache, owned by the loop.
    vocab: the vocabulary size. Token IDs from 0 to vocab - 1 may be sampled or biased.
    context: the maximum number of positions in a sequence.
    exact: whether to cache only prefilled positions, because decode kernels round differently.
    shift: removes positions from the layer caches (see `Model.shift`) when the context of a
        sequence is full. Requires leases with a `shift` method. None disables context shift.
    clock: returns the time in seconds.
    broadcast_tokens: see `app.engine.sampling.sampler.SamplerBatch`.
    rules, device: see `MemoryBudget`. By default, cached prefixes may use all free memory of MLX's
        device, and nothing is wired.
    slab_policy: when sequences share a slab in decode steps.
    adapters: those of the model; None if it cannot have any.
    min_kv_budget: see `MemoryBudget`.
    image_cache_bytes: the maximum size of the features of images that no sequence needs. None for
        a twentieth of the memory budget.

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
        clock: Callable[[], float] = time.monotonic,
        broadcast_tokens: Callable[[mx.array], mx.array] = local_tokens,
        rules: MemoryRules | None = None,
        device: MemoryDevice | None = None,
        slab_policy: SlabPolicy = DEFAULT_SLAB_POLICY,
        adapters: Adapters | None = None,
        min_kv_budget: int = 0,
        image_cache_bytes: int | None = None,
    ) -> None:
        if not is_batch_invariant(model):
            limits = replace(limits, align_chunks=True)
        if image_cache_bytes is None:
            image_cache_bytes = int(_IMAGE_CACHE_SHARE * memory.budget)
        features = ImageFeatureCache(image_cache_bytes)
        # None if the model cannot compute image rows
        tower = None if model.image_rules is None else architectures.get_tower(model)
        self._budget = MemoryBudget(
            memory,
            prefix,
            context=context,
            parallel=limits.max_running,
            backend=detect_backend(get_activation_bits(model)),
            rules=rules,
            device=device,
            features=features,
            min_kv_budget=min_kv_budget,
            vision=tower is not None,
        )
        self.on_stage: Callable[[str], None] = lambda _: None
        self._scheduler = Scheduler(prefix, self._budget, limits)
        self.slab = create_decode_slab(slab_policy, self._scheduler, max_rows=limits.max_running)
        self._model_runner = ModelRunner(
            model,
            vocab=vocab,
            broadcast_tokens=broadcast_tokens,
            slab=self.slab,
            adapters=adapters,
        )
        self._adapters = adapters
        if adapters is not None:
            adapters.reserve = self._scheduler.add_weights
        self._packs_prompts = self._model_runner.packs_prompts and not exact
        self._vocab = vocab
        self._context = context
        self._shift = shift
        self._model = model
        self._pacing = StepPacing(limits, clock)
        self._rounds_left = 0  # of the next step
        self._planned: list[PassPlan] = []  # passes of its first round, not built yet
        self._begun: PrefillChunk | None = None  # the first chunk of the next step
        self._dispatched: list[PrefillChunk] = []  # chunks of this step
        self._unsampled: list[BatchLogits] = []  # to be sampled in this step
        self._sampled: list[InFlight] = []  # the inputs of the next decode step
        self._unread: list[InFlight] = []
        self._next_work: _Work = "prompts"  # of the next step
        self._last_work: _Work = "prompts"
        self._only_pixels_missing = False
        self._counters = EngineCounters()
        self._outputs = OutputProcessor(self._scheduler, self._counters, exact=exact)
        self._embedder = Embedder(model, memory, self._scheduler, chunk=limits.max_prefill_tokens)
        self._atomic_images = model.image_rules is not None and model.image_rules.atomic
        self._images: ImageEncoder | None = None
        if tower is not None:
            self._images = ImageEncoder(
                tower,
                features,
                self._scheduler,
                self._outputs,
                self._counters,
                step_seconds=limits.step_seconds,
                clock=clock,
            )

    @property
    def exceptions(self) -> int:
        """The number of exceptions so far. A single process continues after an exception.
        A rank cannot continue, because the state of the other ranks is unknown."""
        return self._counters.exceptions + self._scheduler.exceptions + self._embedder.exceptions

    @property
    def batch_invariant(self) -> bool:
        """See `models.cpu_layout.is_batch_invariant`. A slab rounds differently."""
        return self.slab is None and is_batch_invariant(self._model)

    @property
    def capacity(self) -> Capacity:
        """Changes with the size of the adapters."""
        return self._budget.capacity

    @property
    def idle(self) -> bool:
        """Whether nothing happens before the next command."""
        if self._only_pixels_missing:
            return True
        busy = self._scheduler.waiting or self._scheduler.running or self._outputs.has_updates
        return not busy and self._begun is None and self._embedder.idle

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        """Adds a job to the queue. The loop owns `matcher`, the compiled grammar of the job."""
        salt: int | None = 0
        if job.adapter:
            assert self._adapters is not None, "the model has no adapters"
            salt = self._adapters.find_salt(job.adapter)
        self._only_pixels_missing = False
        if job.images:
            job = self._check_images(job)
        sequence = Sequence(
            job,
            vocab=self._vocab,
            matcher=matcher,
            cache_salt=salt or 0,
            atomic_images=self._atomic_images,
        )
        self._scheduler.add(sequence)
        if salt is None:
            self._outputs.fail(sequence, _ADAPTER_LOST)

    def _check_images(self, job: Job) -> Job:
        """Returns the job with a length that needs no context shift, which would move or cut
        images."""
        assert self.capacity.vision, "the model does not process images"
        assert job.prompt_logprobs is None, "image rows have no log probabilities"
        room = min(self._context, self.capacity.context_length) - len(job.prompt_token_ids)
        return replace(job, max_tokens=max(1, min(job.max_tokens, room)))

    def embed(self, job: EmbedJob) -> None:
        assert self.capacity.hidden_size is not None, "the model returns no hidden states"
        self._only_pixels_missing = False
        self._embedder.submit(job)

    def provide_images(self, job: str, images: Ids[ImagePixels]) -> None:
        """Provides pixels that a job has requested. Does nothing if the job has already ended."""
        self._only_pixels_missing = False
        sequence = self._scheduler.find(job)
        if sequence is not None:
            sequence.provide_images(images)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        """Cancels a job immediately. Does nothing if the job has already ended. `keep` limits the
        number of sampled tokens that are cached."""
        self._only_pixels_missing = False
        self._embedder.cancel(job)
        sequence = self._scheduler.find(job)
        if sequence is not None:
            self._outputs.finish(sequence, "cancelled", keep=keep)

    def step(self) -> StepOutput:
        """Runs one step and returns its output. Errors caused by a job end the job and are never
        raised."""
        try:
            self._pacing.start_step()
            self._continue_prompts()
            self._admit()
            reading, self._unread = self._unread, []
            self._dispatch_decodes()
            self._read_tokens(reading)
            self._sample_logits()
            self._begin_prompts()
            self._await_prefills()
            rows = sum(len(group.sequences) for group in reading)
            self._pacing.end_step(rows=rows if self._last_work == "prompts" else 0)
            self._only_pixels_missing = self._waits_for_pixels()
        except Exception:
            log.exception("engine step failed: all running sequences are aborted")
            self._counters.exceptions += 1
            self._only_pixels_missing = False
            self._unsampled, self._planned, self._begun = [], [], None
            self._dispatched = []
            for sequence in list(self._scheduler.running):
                self._outputs.fail(sequence)
        self._scheduler.enforce_memory_rules()
        self._counters.steps += 1
        embedded = self._embedder.drain()
        return StepOutput(updates=self._outputs.drain(), stats=self.stats(), embed_results=embedded)

    def stats(self) -> EngineStats:
        counters = self._counters
        return EngineStats(
            allocated_bytes=mx.get_active_memory() + mx.get_cache_memory(),
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            cached_tokens=counters.cached_tokens,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefilled_tokens=counters.prefilled_tokens,
            generated_tokens=counters.generated_tokens,
            embedding_jobs=self._embedder.num_jobs,
            embedded_tokens=self._embedder.embedded_tokens,
            ledger=self._scheduler.ledger(),
            prefix_hit_counts=tuple(counters.prefix_hits),
            prefix_miss_counts=tuple(sorted(counters.prefix_misses.items())),
            prefix_evictions=self._scheduler.evictions,
            preemptions=counters.preemptions,
            failures=counters.failures,
            steps=counters.steps,
            images_encoded=counters.images_encoded,
            image_cache_hits=counters.image_cache_hits,
        )

    def maintain_memory(self, idle_seconds: float) -> bool:
        """Adapts to the system's memory pressure, between two steps. Returns whether `stats` has
        changed. idle_seconds: the number of seconds without work."""
        return self._scheduler.maintain_memory(idle_seconds)

    def call(self, call: EngineCall[Any]) -> Any:
        """Handles a call between two steps. Raises AppError."""
        match call:
            case GetPrefixSnapshot():
                return self._scheduler.prefix_snapshot(MAX_SNAPSHOT_NODES)
            case SetSpareMemory():
                return self._scheduler.set_spare_memory(call.num_bytes)
            case LoadAdapter():
                if self._adapters is None:
                    raise AppError(ErrorKind.MODEL_FILES, "the model supports no adapters")
                return self._adapters.load(call.key, Path(call.path))
            case UnloadAdapter():
                return self._unload_adapter(call.key)
            case _:
                raise AssertionError(call)

    def _unload_adapter(self, key: str) -> None:
        if self._adapters is not None:
            salt = self._adapters.find_salt(key)
            sequences = (*self._scheduler.waiting, *self._scheduler.running)
            assert salt not in [s.cache_salt for s in sequences], "a job uses the adapter"
            self._adapters.unload(key)

    def check(self) -> None:
        """Asserts the invariants that hold between two steps."""
        self._scheduler.check()

    def _admit(self) -> None:
        images = self._images
        while (
            not (self._embedder.waiting_for_memory or (images and images.waiting_for_memory))
            and (
                sequence := self._scheduler.next_to_start(
                    seconds_per_row=self._pacing.seconds_per_row
                )
            )
            is not None
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

    def _begin_prompts(self) -> None:
        """Chooses the prompt chunks, the embedding inputs or the part of an image of the next step.
        A step contains only one of them, to bound the inter-token latency of running sequences.
        Then reads all tokens, because the next step blocks."""
        if self._images is not None:
            self._images.prepare()
        self._next_work = self._choose_work()
        if self._next_work == "prompts":
            self._rounds_left = self._pacing.count_next()
            self._planned = self._plan_round()
            # A pass with prompt log probabilities waits for the device while it is built.
            if self._planned and not any(s.num_unscored_tokens for s, _ in self._planned[0]):
                self._begun = self._build_chunk(self._planned.pop(0))
                if self._begun is not None:
                    self._begun.dispatch_first_layers()
        if self._next_work != "prompts" or self._planned or self._begun is not None:
            reading, self._unread = self._unread, []
            self._read_tokens(reading)

    def _continue_prompts(self) -> None:
        """Dispatches what `_begin_prompts` chose."""
        begun, self._begun = self._begun, None
        planned, self._planned = self._planned, []
        self._last_work, self._next_work = self._next_work, "prompts"
        if self._last_work != "prompts":
            if self._run_other_work(self._last_work):
                return
            self._last_work = "prompts"
            self._rounds_left = 1
            planned = self._plan_round()
        if begun is not None:
            self._dispatch_chunk(begun)
        while begun is not None or planned:
            begun = None
            for plan in planned:
                chunk = self._build_chunk([part for part in plan if part[0].prefilling])
                if chunk is not None:
                    self._dispatch_chunk(chunk)
            self._rounds_left -= 1
            planned = self._plan_round()

    def _choose_work(self) -> _Work:
        """Returns the work of the next step. If there is work of several kinds, they take turns."""
        available: list[tuple[_Work, bool]] = [
            ("embeddings", bool(self._embedder.num_jobs)),
            ("image", self._images is not None and self._images.is_due()),
            ("prompts", bool(self._prefilling())),
        ]
        turn = [work for work, _ in available].index(self._last_work) + 1
        order = available[turn:] + available[:turn]
        for work, has_work in order:
            if has_work:
                return work
        return "prompts"

    def _run_other_work(self, work: _Work) -> bool:
        """Computes embedding inputs or a part of an image, and waits for it. Returns whether there
        was work, and enough memory."""
        if work == "image":
            assert self._images is not None, "the model computes no images"
            self.on_stage("image encoding")
            return self._images.encode(self._pacing.decode_seconds or 0.0)
        self.on_stage("embedding")
        dispatched = self._embedder.dispatch()
        self._embedder.collect()
        return dispatched

    def _waits_for_pixels(self) -> bool:
        """Whether all running sequences wait for pixels, and there is no other work."""
        if self._images is None:
            return False
        running = self._scheduler.running
        return (
            bool(running)
            and all(sequence.awaits_features for sequence in running)
            and not self._images.has_work
            and not (self._planned or self._begun or self._sampled or self._unread)
            and self._embedder.idle
        )

    def _prefilling(self) -> list[Sequence]:
        return [
            s
            for s in self._scheduler.running
            if s.prefilling and not s.num_in_flight and not s.awaits_features
        ]

    def _plan_round(self) -> list[PassPlan]:
        """Returns the forward passes of the next round. Short prompts share a pass if the model
        can compute them together."""
        if self._rounds_left <= 0:
            return []
        prefilling = self._prefilling()
        if not prefilling:
            return []
        shares = self._pacing.plan(
            [
                PendingPrompt(computed=s.num_computed_tokens, remaining=s.num_uncomputed_tokens)
                for s in prefilling
            ],
            pack=self._packs_prompts,
        )
        parts = [(prefilling[i], prefilling[i].limit_chunk(share)) for i, share in shares]
        if not self._packs_prompts:
            return [[part] for part in parts]
        packed = [
            (s, n)
            for s, n in parts
            if not (s.isolated or s.num_unscored_tokens or s.job.adapter or s.current_image)
        ]
        return [*([packed] if packed else []), *([part] for part in parts if part not in packed)]

    def _build_chunk(self, plan: PassPlan) -> PrefillChunk | None:
        """Builds a forward pass. Returns None if this fails, or if the plan is empty."""
        if not plan:
            return None
        sequence, count = plan[0]
        start = sequence.num_computed_tokens
        many = f" and {len(plan) - 1} more prompts" if len(plan) > 1 else ""
        self.on_stage(f"prefill of positions {start} to {start + count - 1}{many}")
        try:
            if len(plan) == 1:
                chunk = self._model_runner.prefill(sequence, count)
            else:
                chunk = self._model_runner.prefill_packed(plan)
        except Exception:
            log.exception("prefill of %s failed", pluralize(len(plan), "sequence"))
            self._handle_batch_failure([s for s, _ in plan])
            return None
        self._counters.prefilled_tokens += chunk.num_tokens
        return chunk

    def _dispatch_chunk(self, chunk: PrefillChunk) -> None:
        self.on_stage(f"prefill, chunk size {chunk.num_tokens}")
        try:
            # If a sequence was cancelled, the prefix cache contains its chunk.
            chunk.dispatch()
            scored = chunk.scored and chunk.scored.without_ended()
            if scored is not None and scored.sequences:
                self._sample(scored)
            for sequence, end in zip(chunk.sequences, chunk.ends, strict=True):
                if sequence.running:
                    sequence.publish(end)
        except Exception:
            log.exception("prefill of %s failed", pluralize(len(chunk.sequences), "sequence"))
            self._handle_batch_failure([s for s in chunk.sequences if s.running])
            return
        self._pacing.add_tokens(chunk.num_tokens)
        self._dispatched.append(chunk)

    def _await_prefills(self) -> None:
        """Waits for the chunks of this step. Decoded tokens were dispatched later, so if there are
        any, the chunks are complete."""
        chunks, self._dispatched = self._dispatched, []
        for chunk in chunks:
            self.on_stage("waiting for a prefill chunk")
            try:
                chunk.wait()
            except Exception:
                log.exception("prefill of %s failed", pluralize(len(chunk.sequences), "sequence"))
                self._handle_batch_failure([s for s in chunk.sequences if s.running])
                continue
            for sequence, end in chunk.unfinished:
                if not sequence.num_output_tokens:
                    self._outputs.report_prefill(sequence, end)

    # decoding

    def _dispatch_decodes(self) -> None:
        """Dispatches the computation of the token that follows each sampled token."""
        sampled, self._sampled = self._sampled, []
        self._counters.preemptions += self._scheduler.make_decode_room()
        self._embedder.restart_if_reclaimed()
        if self._images is not None:
            self._images.restart_if_reclaimed()
        self._shift_contexts()
        growing = [
            s for group in sampled for s in group.sequences if s.decoding and s.needs_another_token
        ]
        together = [s for s in growing if not s.isolated]
        for batch in (together, *([s] for s in growing if s.isolated)):
            if batch:
                self._decode(batch, sampled)

    def _shift_contexts(self) -> None:
        """If context shift is enabled, shifts the sequences whose context is full. If the layers
        cannot shift, the remaining tokens are prefilled again."""
        if self._shift is None:
            return
        for sequence in self._scheduler.running:
            if sequence.decoding and sequence.num_computed_tokens >= self._context:
                sequence.shift(self._shift)

    def _decode(self, batch: Ids[Sequence], sampled: Ids[InFlight]) -> None:
        self.on_stage(f"decode, batch size {len(batch)}")
        try:
            if not batch[0].isolated:
                batch = self._model_runner.arrange(batch)
            scored = self._model_runner.decode(batch, gather_in_flight(sampled, batch))
            if scored.has_grammar:
                mx.async_eval(scored.logits)
                self._unsampled.append(scored)
            else:
                self._sample(scored)
        except Exception:
            log.exception("decode step of %s failed", pluralize(len(batch), "sequence"))
            self._handle_batch_failure(batch)
            return
        if len(batch) == 1:
            batch[0].isolated = False

    def _sample(self, scored: BatchLogits) -> None:
        group = self._model_runner.sample(scored)
        self._sampled.append(group)
        self._unread.append(group)

    def _handle_batch_failure(self, batch: Ids[Sequence]) -> None:
        """Handles a failed batch, which invalidates the caches of all its sequences. A single
        sequence ends with an error. Several sequences restart, and each one is prefilled and
        decoded unbatched."""
        if not batch:
            return
        self._counters.exceptions += 1
        if len(batch) == 1:
            self._outputs.fail(batch[0])
            return
        for sequence in reversed(batch):
            self._model_runner.reset_sampler(sequence)
            self._scheduler.discard(sequence)
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
                    self._sample(scored)
            except Exception:
                log.exception("sampling %s failed", pluralize(len(scored.sequences), "sequence"))
                self._handle_batch_failure(scored.sequences)
