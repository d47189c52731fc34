"""The generation loop: admit, prefill, decode, sample, report.

Knows: the model as a function, sequences, layer caches, the clock. Must not know: threads, text,
HTTP. Runs on one thread, which its owner provides; nothing here is shared.

One step:

    collect   wait for the prompt chunk that the last step dispatched
    admit     take waiting jobs, lease caches for them
    decode    dispatch token n+1 of every decoding sequence, though n has not been read yet
    prefill   dispatch the next chunk of prompts; the last chunk samples the first token
    read      take the value of token n, which the device finished meanwhile

So the device always has work while Python reads, reports and builds. The price is one evaluated
token too many behind an end-of-sequence id; it is recorded as evaluated, which keeps caches true.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence as Ids
from typing import cast

import mlx.core as mx

from app.core.jobs import (
    Ended,
    EndReason,
    EngineStats,
    Job,
    Prefilled,
    Started,
    Step,
    Token,
    Update,
)
from app.core.ports import PrefixCache
from app.engine.sampler import RowState, sample
from app.engine.scheduler import Limits, admissions, prefill_shares
from app.engine.sequence import Pending, Sequence
from models.base import Model
from models.kv import LayerCache

log = logging.getLogger(__name__)

# decode steps between two returns of free buffers to the system (mlx-lm and Ollama use 256)
CLEAR_EVERY = 256

_FAILED = "the engine failed on this request"


class Loop:
    """model, prefix: owned from now on. vocab: ids that may be sampled or biased, 0 to vocab-1.
    exact: cache only what was prefilled, never what was decoded (other kernels, other bits)."""

    def __init__(
        self,
        model: Model,
        prefix: PrefixCache[LayerCache],
        *,
        vocab: int,
        limits: Limits,
        exact: bool = False,
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._vocab = vocab
        self._limits = limits
        self._exact = exact
        self._waiting: deque[Job] = deque()
        self._running: list[Sequence] = []
        self._in_flight: list[Sequence] = []  # prompt chunks that the device works on
        self._updates: list[Update] = []
        self._decoded = 0
        self._cached_tokens = self._prefilled_tokens = self._generated_tokens = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and not self._updates

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        """End a job now; unknown ones have ended already. keep: cache only this many of its
        sampled tokens."""
        for waiting in self._waiting:
            if waiting.id == job:
                self._waiting.remove(waiting)
                self._report_end(job, "cancelled")
                return
        for sequence in self._running:
            if sequence.job.id == job:
                self._end(sequence, "cancelled", keep=keep)
                return

    def step(self) -> Step:
        """One turn. Returns what happened; never raises for what a job can bring about."""
        try:
            self._collect_chunk()
            self._admit()
            reading = self._dispatch_decodes()
            self._dispatch_prefills()
            for sequence, pending in reading:
                self._read(sequence, pending)
        except Exception:
            log.exception("a step failed; the sequences in it are lost")
            self._fail(list(self._running))
        updates, self._updates = tuple(self._updates), []
        return Step(updates=updates, stats=self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(
            memory=mx.get_active_memory() + mx.get_cache_memory(),
            running=len(self._running),
            waiting=len(self._waiting),
            cached_tokens=self._cached_tokens,
            prefilled_tokens=self._prefilled_tokens,
            generated_tokens=self._generated_tokens,
            prefix_bytes=self._prefix.nbytes,
        )

    def check(self) -> None:
        """Assert what must hold when nothing runs."""
        self._prefix.check()

    def _admit(self) -> None:
        count = admissions(
            waiting=len(self._waiting), running=len(self._running), limits=self._limits
        )
        for _ in range(count):
            job = self._waiting.popleft()
            try:
                self._start(job)
            except Exception:
                log.exception("a job could not be started")
                self._report_end(job.id, "error", _FAILED)

    def _start(self, job: Job) -> None:
        seed = job.sampling.seed if job.sampling.seed is not None else secrets.randbits(63)
        row = RowState(job.sampling, seed=seed, prompt=job.ids, vocab=self._vocab)
        lease = self._prefix.begin(job.ids)
        self._running.append(Sequence(job, lease, row))
        self._cached_tokens += lease.cached
        self._updates.append(Started(job=job.id, cached=lease.cached, at=_now()))
        left = len(job.ids) - lease.cached
        log.info("prompt of %d tokens: %d cached, %d left", len(job.ids), lease.cached, left)

    def _collect_chunk(self) -> None:
        chunks = [s for s in self._in_flight if s in self._running]
        self._in_flight = []
        if not chunks:
            return
        mx.eval([s.state() for s in chunks])
        mx.clear_cache()
        for sequence in chunks:
            self._updates.append(Prefilled(job=sequence.job.id, done=sequence.evaluated))

    def _dispatch_prefills(self) -> None:
        prefilling = [s for s in self._running if s.unread]
        shares = prefill_shares([s.unread for s in prefilling], self._limits)
        for sequence, share in zip(prefilling, shares, strict=True):
            if share == 0:
                continue
            try:
                self._prefill(sequence, share)
            except Exception:
                log.exception("a prompt could not be evaluated")
                self._fail([sequence])

    def _prefill(self, sequence: Sequence, count: int) -> None:
        start = sequence.evaluated
        tokens = mx.array([sequence.job.ids[start : start + count]])
        hidden = self._model(tokens, sequence.kv)
        sequence.evaluated += count
        self._prefilled_tokens += count
        if sequence.unread:
            mx.async_eval(sequence.state())
            self._in_flight.append(sequence)
        else:
            self._sample([sequence], hidden[:, -1])

    def _dispatch_decodes(self) -> list[tuple[Sequence, Pending]]:
        """Dispatch the successor of every pending token; return the pending ones, to be read."""
        reading = [(s, s.pending) for s in self._running if s.pending is not None]
        growing = list[Sequence]()
        last = list[mx.array]()
        for sequence, pending in reading:
            sequence.pending = None
            if not sequence.wants_another:
                continue
            sequence.row.saw(pending.token, sequence.ids)
            last.append(self._model(pending.token.reshape(1, 1), sequence.kv)[:, -1])
            sequence.evaluated += 1
            growing.append(sequence)
        if growing:
            self._sample(growing, mx.concatenate(last))
        return reading

    def _sample(self, sequences: Ids[Sequence], hidden: mx.array) -> None:
        """hidden: [B, D], the last position of each. Leaves each a pending token."""
        asked = [s.job.top_logprobs for s in sequences if s.job.top_logprobs is not None]
        sampled = sample(
            self._model.logits(hidden),
            [s.row for s in sequences],
            top_logprobs=max(asked) if asked else None,
        )
        for row, sequence in enumerate(sequences):
            wants = sequence.job.top_logprobs
            sequence.pending = Pending(
                token=sampled.tokens[row],
                logprob=None if wants is None else _row(sampled.logprobs, row),
                top_ids=_row(sampled.top_ids, row, wants) if wants else None,
                top_logprobs=_row(sampled.top_logprobs, row, wants) if wants else None,
            )
        mx.async_eval([s.pending.arrays() for s in sequences if s.pending is not None])

    def _read(self, sequence: Sequence, pending: Pending) -> None:
        token = cast(int, pending.token.item())
        if sequence.sampled == 0:
            self._updates.append(Prefilled(job=sequence.job.id, done=len(sequence.job.ids)))
        sequence.ids.append(token)
        if token in sequence.job.stop_ids:
            self._end(sequence, "stop")
            return
        self._updates.append(
            Token(
                job=sequence.job.id,
                id=token,
                at=_now(),
                logprob=None if pending.logprob is None else cast(float, pending.logprob.item()),
                top=_pairs(pending),
            )
        )
        self._generated_tokens += 1
        self._decoded += 1
        if self._decoded % CLEAR_EVERY == 0:
            mx.clear_cache()
        if sequence.sampled == sequence.job.max_tokens:
            self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: EndReason, *, keep: int | None = None) -> None:
        self._running.remove(sequence)
        prompt = len(sequence.job.ids)
        if self._exact:
            keep = prompt
        elif keep is not None:
            keep += prompt
        sequence.commit(keep=keep)
        self._report_end(sequence.job.id, reason)

    def _fail(self, sequences: Ids[Sequence]) -> None:
        for sequence in sequences:
            self._running.remove(sequence)
            sequence.discard()
            self._report_end(sequence.job.id, "error", _FAILED)
        mx.clear_cache()

    def _report_end(self, job: str, reason: EndReason, error: str | None = None) -> None:
        self._updates.append(Ended(job=job, reason=reason, at=_now(), error=error))


def _now() -> int:
    return time.monotonic_ns()


def _row(array: mx.array | None, row: int, count: int | None = None) -> mx.array:
    assert array is not None
    return array[row] if count is None else array[row, :count]


def _pairs(pending: Pending) -> tuple[tuple[int, float], ...]:
    if pending.top_ids is None or pending.top_logprobs is None:
        return ()
    ids = cast(list[int], pending.top_ids.tolist())
    values = cast(list[float], pending.top_logprobs.tolist())
    return tuple(zip(ids, values, strict=True))
