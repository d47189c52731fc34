"""The engine loop of an encoder (models/encoder.py), which computes embeddings and scores only.

Knows: the model as a function, embedding jobs. Must not know: sequences, layer caches, text, HTTP.

A step computes one forward pass. Its inputs are packed without padding, of any jobs, in round-robin
order. Each input is computed as a whole, because its tokens attend to each other in both
directions. An encoder has no layer caches, so its memory does not grow: the weights, and the
activations of the largest forward pass.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    Capacity,
    EngineCall,
    EngineStats,
    GetPrefixSnapshot,
    Job,
    Ledger,
    PrefixSnapshot,
    SetSpareMemory,
    StepOutput,
)
from app.core.requests import EmbedJob
from app.engine.device import detect_backend
from app.engine.embedder import EmbedQueue, EmbedTask, TaskInput
from app.engine.pooler import EmbeddingHead, pool_hidden_states, pooling_weights, vectors_to_bytes
from app.grammar.compiler import Matcher
from models.cpu_layout import get_activation_bits
from models.encoder import Encoder, split_inputs

log = logging.getLogger(__name__)

# The maximum number of inputs in one forward pass.
MAX_INPUTS = 64

# The maximum number of tokens in one forward pass, unless a single input has more.
MAX_TOKENS = 1024


class EncoderLoop:
    """Implements `app.engine.thread.EngineLoop`. It is not thread-safe.

    context: the maximum number of tokens in an input. working: the bytes reserved for the
    activations of a forward pass. weights, budget: in bytes.
    """

    def __init__(
        self,
        model: Encoder,
        head: EmbeddingHead,
        *,
        context: int,
        budget: int,
        weights: int,
        working: int,
        limited_by_memory: bool = False,
    ) -> None:
        self.on_stage: Callable[[str], None] = lambda _: None
        self.capacity = Capacity(
            parallel=1,
            context_length=context,
            kv_budget=0,
            kv_bytes_per_sequence=0,
            limited_by_memory=limited_by_memory,
            hidden_size=head.size,
            needs_checkpoints=False,
            backend=detect_backend(get_activation_bits(model)),
        )
        self._model = model
        self._head = head
        self._queue = EmbedQueue()
        self._ledger = Ledger(budget=budget, weights=weights, working=working)
        self._embedded_tokens = self._steps = 0

    @property
    def idle(self) -> bool:
        return self._queue.idle

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        raise AssertionError("an encoder cannot generate text")

    def embed(self, job: EmbedJob) -> None:
        assert not job.logit_ids, "an encoder has no token logits"
        assert job.pooling != "rank" or self._model.num_scores, "the model has no scores"
        self._queue.submit(job)

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("an encoder has no images")

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._queue.cancel(job)

    def step(self) -> StepOutput:
        """Computes a forward pass. A failed pass is handled by `EmbedQueue.fail`."""
        self.on_stage("embedding")
        if inputs := self._choose_inputs():
            try:
                self._queue.store(inputs, self._compute(inputs))
            except Exception:
                log.exception("embedding step failed")
                self._queue.fail(inputs)
            self._steps += 1
        return StepOutput(updates=(), stats=self.stats(), embed_results=self._queue.drain())

    def stats(self) -> EngineStats:
        return EngineStats(
            allocated_bytes=mx.get_active_memory() + mx.get_cache_memory(),
            embedding_jobs=len(self._queue.tasks),
            embedded_tokens=self._embedded_tokens,
            ledger=self._ledger,
            steps=self._steps,
        )

    def maintain_memory(self, idle_seconds: float) -> bool:
        return False

    def call(self, call: EngineCall[Any]) -> Any:
        """An encoder has neither cached prefixes nor a use for more memory."""
        match call:
            case GetPrefixSnapshot():
                return PrefixSnapshot()
            case SetSpareMemory():
                return 0
            case _:
                raise AppError(ErrorKind.MODEL_FILES, "an encoder supports no adapters")

    def check(self) -> None:
        """There are no invariants between two steps."""

    def _choose_inputs(self) -> Sequence[TaskInput]:
        """Returns the inputs of the next forward pass: those of the next task, and then those of
        others, while they fit."""
        tasks = self._queue.tasks
        if not tasks:
            return []
        first = tasks[0]
        tasks.rotate(-1)
        others = [] if first.isolated else [t for t in tasks if t is not first and not t.isolated]
        # a task computes scores or hidden states
        others = [task for task in others if _wants_scores(task) == _wants_scores(first)]
        chosen, total = list[TaskInput](), 0
        for task in (first, *others):
            while task.pending_inputs:
                wider = total + task.next_length
                if chosen and (len(chosen) == MAX_INPUTS or wider > MAX_TOKENS):
                    return chosen
                chosen.append((task, task.pending_inputs.popleft()))
                total = wider
        return chosen

    def _compute(self, inputs: Sequence[TaskInput]) -> list[bytes | None]:
        """Returns the results of the inputs. Waits for the device."""
        rows = [task.job.inputs[index] for task, index in inputs]
        lengths = [len(ids) for ids in rows]
        tokens = mx.array([token for ids in rows for token in ids])
        hidden = self._model.encode(tokens, lengths, _segments(inputs, lengths))
        if _wants_scores(inputs[0][0]):
            results = self._model.score(hidden, lengths).astype(mx.float32)
            dimensions = [None] * len(inputs)
        else:
            pooled = [
                _pool(part, task)
                for part, (task, _) in zip(split_inputs(hidden, lengths), inputs, strict=True)
            ]
            dimensions = [task.job.dimensions for task, _ in inputs]
            results = self._head(mx.concatenate(pooled), dimensions)
        mx.eval(results)
        self._embedded_tokens += len(tokens)
        return vectors_to_bytes(results, dimensions)


def _wants_scores(task: EmbedTask) -> bool:
    return task.job.pooling == "rank"


def _pool(hidden: mx.array, task: EmbedTask) -> mx.array:
    """Pools the hidden states [L, D] of an input to [1, D]."""
    length = hidden.shape[0]
    weights = pooling_weights(task.job.pooling, length, 0, length)
    return pool_hidden_states(hidden[None], mx.array([weights]))


def _segments(inputs: Sequence[TaskInput], lengths: Sequence[int]) -> mx.array | None:
    """Returns the segment of each packed token, or None if no input has two segments."""
    if not any(task.job.first_segments for task, _ in inputs):
        return None
    parts: list[mx.array] = []
    for (task, index), length in zip(inputs, lengths, strict=True):
        first = task.job.first_segments[index] if task.job.first_segments else length
        parts.append((mx.arange(length) >= first).astype(mx.int32))
    return mx.concatenate(parts)
