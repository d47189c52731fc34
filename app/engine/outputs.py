"""Processes the results of sequences, reports them as job updates, and counts the engine's work.

Knows: sequences, the scheduler, the clock. Must not know: the model, the stages of a step.
All engine results that clients receive are reported here, in order and exactly once.
"""

import contextlib
import logging
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator

from app.core.jobs import (
    PREFIX_HIT_BUCKETS,
    CacheMiss,
    CacheMissReason,
    Ended,
    EndReason,
    JobUpdate,
    PixelsNeeded,
    Prefilled,
    PromptLogprobs,
    Started,
    Token,
)
from app.engine.memory_profile import clear_allocator_cache
from app.engine.model_runner import SampledToken
from app.engine.scheduler import Scheduler
from app.engine.sequence import Sequence
from app.grammar.compiler import GrammarError, GrammarTooComplexError


class EngineCounters:
    """The counters since the engine started. `exceptions` is the number of exceptions."""

    def __init__(self) -> None:
        self.cached_tokens = self.prefix_query_tokens = self.prefilled_tokens = (
            self.generated_tokens
        ) = 0
        self.preemptions = self.failures = self.exceptions = self.steps = 0
        self.images_encoded = self.image_cache_hits = 0
        self.prefix_hits = [0] * (len(PREFIX_HIT_BUCKETS) + 1)
        self.prefix_misses: Counter[CacheMissReason] = Counter()

    def record_lookup(self, length: int, cached: int, miss: CacheMiss | None) -> None:
        """Records a prefix cache lookup for a prompt of `length` tokens."""
        self.prefix_query_tokens += length
        self.cached_tokens += cached
        self.prefix_hits[bisect_left(PREFIX_HIT_BUCKETS, cached)] += 1
        if miss is not None:
            self.prefix_misses[miss.reason] += 1


log = logging.getLogger(__name__)

# The number of sampled tokens between two prefix cache updates of a sequence.
PUBLISH_EVERY = 64

_FAILED = "the engine failed while processing this request"
_INVALID_LOGITS = (
    "the model produced NaN or infinite logits: its weights or its quantization may be corrupt"
)
_NO_TOKEN_ALLOWED = (
    "no token can be sampled: the logits are NaN, or -inf for every token that the grammar allows"
)


class OutputProcessor:
    """Reports the results of all sequences. If `exact` is set, only prefilled positions are cached,
    because decode kernels round differently."""

    def __init__(self, scheduler: Scheduler, counters: EngineCounters, *, exact: bool) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._exact = exact
        self._updates: list[JobUpdate] = []

    @property
    def has_updates(self) -> bool:
        """Whether there are updates that have not been drained yet."""
        return bool(self._updates)

    def drain(self) -> tuple[JobUpdate, ...]:
        """Returns all updates since the last call, in order."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def report_start(self, sequence: Sequence) -> None:
        job, lease = sequence.job, sequence.lease
        self._counters.record_lookup(len(job.prompt_token_ids), lease.cached, lease.miss)
        self._updates.append(
            Started(job_id=job.id, cached_tokens=lease.cached, timestamp_ns=_now(), miss=lease.miss)
        )
        left = len(job.prompt_token_ids) - lease.cached
        log.debug(
            "prompt tokens: %d, cached: %d, to compute: %d",
            len(job.prompt_token_ids),
            lease.cached,
            left,
        )

    def request_pixels(self, sequence: Sequence, keys: tuple[bytes, ...]) -> None:
        self._updates.append(PixelsNeeded(job_id=sequence.job.id, keys=keys))

    def report_prefill(self, sequence: Sequence, computed: int) -> None:
        """Reports that a prompt chunk other than the last one was computed, or a part of an image.
        `computed` is the number of computed tokens."""
        self._updates.append(Prefilled(job_id=sequence.job.id, computed_tokens=computed))

    def process_token(self, sequence: Sequence, sampled: SampledToken) -> None:
        """Processes the next token of the sequence, whose value is now known."""
        job = sequence.job
        if not sampled.valid or not _has_valid_logprobs(sequence):
            self.fail(sequence, _INVALID_LOGITS if sequence.matcher is None else _NO_TOKEN_ALLOWED)
            return
        if sequence.num_output_tokens == 0:
            self._report_prompt_done(sequence)
        try:
            sequence.append_token(sampled.token)
        except GrammarError as error:
            message = f"the grammar of the request failed during generation: {error}"
            self.fail(sequence, message, invalid_request=isinstance(error, GrammarTooComplexError))
            return
        if sampled.token in job.stop_token_ids:
            self.finish(sequence, "stop", stop_token_id=sampled.token)
            return
        self._updates.append(
            Token(
                job_id=job.id,
                id=sampled.token,
                timestamp_ns=_now(),
                logprob=sampled.logprob,
                top_logprobs=sampled.top_logprobs,
            )
        )
        self._counters.generated_tokens += 1
        if sequence.grammar_done:
            self.finish(sequence, "stop")
        elif sequence.num_output_tokens == job.max_tokens:
            self.finish(sequence, "length")
        elif (
            sequence.running and not self._exact and sequence.num_output_tokens % PUBLISH_EVERY == 0
        ):
            sequence.publish(sequence.num_computed_tokens)

    def finish(
        self,
        sequence: Sequence,
        reason: EndReason,
        *,
        keep: int | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """Ends a sequence. keep: the number of sampled tokens to cache; None caches all.
        stop_token_id: the stop token that ended the sequence."""
        self._report_end(
            sequence,
            Ended(
                job_id=sequence.job.id,
                reason=reason,
                timestamp_ns=_now(),
                stop_token_id=stop_token_id,
            ),
        )
        if sequence.running:
            if self._exact:
                keep = 0
            unwanted = 0 if keep is None else sequence.num_output_tokens - keep
            self._scheduler.commit(sequence, keep=len(sequence.ids) - unwanted)

    def fail(
        self, sequence: Sequence, error: str = _FAILED, *, invalid_request: bool = False
    ) -> None:
        """Ends a sequence with an error. `invalid_request` indicates that the request caused the
        error."""
        self._counters.failures += 1
        self._report_end(
            sequence,
            Ended(
                job_id=sequence.job.id,
                reason="error",
                timestamp_ns=_now(),
                error=error,
                invalid_request=invalid_request,
            ),
        )
        if sequence.running:
            self._scheduler.discard(sequence)
        clear_allocator_cache()

    @contextlib.contextmanager
    def fail_on_error(self, sequence: Sequence, message: str) -> Generator[None]:
        """If an exception is raised in the context, fails only this sequence."""
        try:
            yield
        except Exception:
            log.exception(message)
            self._counters.exceptions += 1
            self.fail(sequence)

    def _report_end(self, sequence: Sequence, ended: Ended) -> None:
        """Removes a sequence from the scheduler and reports its end. Both happen before the lease
        ends, so that each removed sequence is reported, even if an assertion then fails."""
        self._scheduler.remove(sequence)
        self._updates.append(ended)

    def _report_prompt_done(self, sequence: Sequence) -> None:
        """Reports that the whole prompt was computed."""
        job = sequence.job
        self._updates.append(Prefilled(job_id=job.id, computed_tokens=len(job.prompt_token_ids)))
        if job.prompt_logprobs is not None:
            assert not sequence.num_unscored_tokens, "the prompt must be scored first"
            self._updates.append(
                PromptLogprobs(job_id=job.id, logprobs=tuple(sequence.prompt_logprobs))
            )


def _has_valid_logprobs(sequence: Sequence) -> bool:
    return sequence.num_output_tokens > 0 or not any(
        math.isnan(score) for score, _ in sequence.prompt_logprobs
    )


def _now() -> int:
    return time.monotonic_ns()
