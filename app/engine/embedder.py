"""Computes embeddings: pools the hidden states of token IDs into one vector per input.

Knows: the model as a function, embedding jobs, borrowed memory. Must not know:
sequences, sampling, scheduling.

Jobs are scheduled round-robin, one forward pass at a time. A forward pass never has more tokens
than a prefill chunk:

    short inputs, of any jobs   one forward pass [B, L], padded on the right
    a long input                one chunk per pass, using its layer caches; one long input at a time

Padding on the right does not change the results, because every layer is causal (full or sliding
window attention, a convolution, a recurrent state), and a mixture of experts processes each
position separately, without a capacity limit per expert. Layer caches that contain padding are
discarded.

The prefix cache is not used, because it contains KV caches, but not the hidden states of earlier
positions, from which the embeddings are computed.

Both pooling types are weighted sums over positions. Rows of both types can therefore share a batch,
and an input can be split into several chunks. For "mean", the weight of each position is 1 /
length. For "last", the weight of the last position is 1 and all other weights are 0. Sources:
Reimers and Gurevych 2019 (arXiv:1908.10084) for the mean over all tokens, including special tokens;
Neelakantan et al. 2022 (arXiv:2201.10005) for the last token; Kusupati et al. 2022
(arXiv:2205.13147) for embeddings that may be truncated to their first dimensions.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from app.core.requests import EmbedJob, EmbedResult, PoolingType
from app.core.units import pluralize
from app.engine.memory_profile import MemoryProfile
from app.engine.scheduler import Scheduler
from models.base import Model
from models.kv import LayerCache

# The epsilon of torch.nn.functional.normalize, which the reference implementations use.
_MIN_NORM = 1e-12


def pooling_weights(pooling: PoolingType, length: int, start: int, width: int) -> list[float]:
    """Returns the pooling weights of `width` positions, beginning at position `start` of an input
    with `length` tokens. Positions after the end of the input have weight 0."""
    if pooling == "mean":
        here = max(0, min(width, length - start))
        return [1 / length] * here + [0.0] * (width - here)
    return [float(start + place == length - 1) for place in range(width)]


def pool_hidden_states(hidden: mx.array, weights: mx.array) -> mx.array:
    """Pools hidden states [B, L, D] with weights [B, L]. Returns [B, D] in float32. Positions with
    weight 0 may contain any value, including NaN."""
    weights = weights[..., None]
    return mx.sum(mx.where(weights > 0, weights * hidden.astype(mx.float32), 0), axis=1)


def normalize(vectors: mx.array, dimensions: Sequence[int | None]) -> mx.array:
    """Scales each row of [B, D] to unit length. Before that, all but the first `dimensions`
    elements of a row are set to zero (None keeps all). Zero vectors stay zero."""
    width = vectors.shape[-1]
    kept = mx.array([[width if count is None else count] for count in dimensions])
    cut = mx.where(mx.arange(width) < kept, vectors, 0)
    # Dividing by the maximum first prevents overflow when the values are squared.
    largest = mx.max(mx.abs(cut), axis=-1, keepdims=True)
    cut = cut / mx.where(largest > 0, largest, 1)
    return cut / mx.maximum(mx.linalg.norm(cut, axis=-1, keepdims=True), _MIN_NORM)


def vectors_to_bytes(vectors: mx.array, dimensions: Sequence[int | None]) -> list[bytes | None]:
    """Returns the first `dimensions` values of each row as little-endian float32. MLX supports only
    little-endian machines. Returns None for a row that contains NaN or infinity. Waits for the
    device."""
    width = vectors.shape[-1]
    sound = cast(list[bool], mx.all(mx.isfinite(vectors), axis=-1).tolist())
    # MLX's type stubs lack the buffer protocol.
    view = memoryview(cast(Any, mx.contiguous(vectors))).cast("B")
    return [
        bytes(view[4 * width * row : 4 * (width * row + (count or width))]) if sound[row] else None
        for row, count in enumerate(dimensions)
    ]


class EmbedTask:
    """A job in progress.

    pending_inputs: the indices of the inputs that are not embedded yet, shortest first.
    isolated: whether the inputs must run in separate forward passes, because an earlier pass that
        was shared with other jobs failed.
    """

    def __init__(self, job: EmbedJob) -> None:
        self.job = job
        self.pending_inputs = deque(
            sorted(range(len(job.inputs)), key=lambda i: len(job.inputs[i]))
        )
        self.vectors: dict[int, bytes] = {}
        self.isolated = False

    @property
    def next_length(self) -> int:
        return len(self.job.inputs[self.pending_inputs[0]])


class LongInput:
    """An input that takes several forward passes.

    borrowed_bytes: the number of bytes that the input borrows until it is complete.
    pooled_sum: the weighted sum of the hidden states so far, of shape [1, D] in float32.
    """

    def __init__(
        self, task: EmbedTask, index: int, kv: list[LayerCache], borrowed_bytes: int
    ) -> None:
        self.task, self.index, self.kv, self.borrowed_bytes = task, index, kv, borrowed_bytes
        self.ids = task.job.inputs[index]
        self.num_computed = 0
        self.pooled_sum: mx.array | None = None


log = logging.getLogger(__name__)

# The maximum number of inputs in one forward pass. Even a short input allocates a full step of
# positions (models/kv.py) in the cache of every layer.
MAX_ROWS = 16

# The number of layer caches that exist at the same time if nothing else references them: one cache
# is read while the next one is created.
_LAYERS_ALIVE = 2

_FAILED = "the engine failed while processing this request"
_INVALID_OUTPUT = (
    "the model produced NaN or infinite hidden states: its weights or its "
    "quantization may be corrupt"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EmbedStep:
    """A forward pass that the device is computing.

    inputs: the tasks and the indices of their inputs.
    tokens: the number of tokens without padding.
    vectors: the resulting embeddings [B, D]; None for a chunk of a long input that is not the last.
    state: all arrays that must be evaluated.
    """

    inputs: Sequence[tuple[EmbedTask, int]]
    tokens: int
    vectors: mx.array | None
    state: Sequence[mx.array]


class Embedder:
    """Runs the embedding jobs of one engine.

    chunk: the maximum number of tokens per forward pass, including padding.
    waiting_for_memory: whether the embedder is waiting for memory. Meanwhile, no new sequence may
        start.
    embedded_tokens: the number of tokens embedded since startup, without padding.
    exceptions: the number of exceptions so far.
    """

    def __init__(
        self, model: Model, memory: MemoryProfile, scheduler: Scheduler, *, chunk: int
    ) -> None:
        self.waiting_for_memory = False
        self.embedded_tokens = 0
        self.exceptions = 0
        self._model = model
        self._memory = memory
        self._scheduler = scheduler
        self._chunk = chunk
        self._layers = len(model.make_kv())
        self._tasks: deque[EmbedTask] = deque()  # in scheduling order
        self._long: LongInput | None = None
        self._step: _EmbedStep | None = None
        self._borrowed_for_step = 0  # bytes borrowed for this forward pass only
        self._ended: list[EmbedResult] = []

    @property
    def idle(self) -> bool:
        return not (self._tasks or self._step or self._ended)

    @property
    def num_jobs(self) -> int:
        return len(self._tasks)

    def submit(self, job: EmbedJob) -> None:
        self._tasks.append(EmbedTask(job))

    def cancel(self, job: str) -> None:
        """Removes a job. Does nothing if the job has already ended. A forward pass that is in
        flight is completed, and its result is discarded."""
        for work in [work for work in self._tasks if work.job.id == job]:
            self._remove(work)

    def drain(self) -> tuple[EmbedResult, ...]:
        """Returns the results of the jobs that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def dispatch(self) -> bool:
        """Dispatches the next forward pass. Returns False if there is no work or not enough
        memory."""
        assert self._step is None, "only one pass may be in flight"
        self.waiting_for_memory = False
        for _ in range(len(self._tasks)):
            work = self._tasks[0]
            self._tasks.rotate(-1)
            if inputs := self._next_inputs(work):
                self._dispatch_inputs(inputs)
                return True
            if self.waiting_for_memory:
                return False
        return False

    def collect(self) -> None:
        """Waits for the forward pass that was dispatched."""
        piece, self._step = self._step, None
        if piece is None:
            return
        try:
            mx.eval(piece.state)
            self._finish_step(piece)
        except Exception:
            log.exception("embedding step failed")
            self._handle_failure(piece.inputs)
        self._return_borrowed()

    def restart_if_reclaimed(self) -> None:
        """Schedules a restart of the long input if its memory was reclaimed. Must be called between
        two forward passes."""
        long = self._long
        if long is not None and self._scheduler.borrowed_bytes < long.borrowed_bytes:
            assert self._step is None, "the device still writes into its layer caches"
            log.info(
                "restarting an embedding input of %s: out of KV cache memory",
                pluralize(len(long.ids), "token"),
            )
            long.task.pending_inputs.appendleft(long.index)
            self._long = None

    # forward passes

    def _next_inputs(self, task: EmbedTask) -> Sequence[tuple[EmbedTask, int]]:
        """Returns the inputs of the task's next forward pass. Returns an empty list if the task
        must wait."""
        if self._long is not None and self._long.task is task:
            return [(task, self._long.index)]
        if not task.pending_inputs:
            return []
        if task.next_length <= self._chunk:
            return self._pack_short_inputs(task)
        if self._long is not None:
            return []
        room = self._memory.kv_footprint(task.next_length)
        if not self._borrow(room):
            return []
        self._long = LongInput(task, task.pending_inputs.popleft(), self._model.make_kv(), room)
        return [(task, self._long.index)]

    def _pack_short_inputs(self, first: EmbedTask) -> Sequence[tuple[EmbedTask, int]]:
        """Returns short inputs of this task, and of other tasks if they fit in the same pass."""
        chosen, width = list[tuple[EmbedTask, int]](), 0
        others = (
            () if first.isolated else (w for w in self._tasks if w is not first and not w.isolated)
        )
        for work in (first, *others):
            while work.pending_inputs:
                rows, wider = len(chosen) + 1, max(width, work.next_length)
                if rows > 1 and (rows > MAX_ROWS or rows * wider > self._chunk):
                    break
                more = self._cache_bytes(wider, rows) - self._borrowed_for_step
                if not (self._scheduler.borrow(more) if chosen else self._borrow(more)):
                    return chosen
                self._borrowed_for_step += more
                chosen.append((work, work.pending_inputs.popleft()))
                width = wider
        return chosen

    def _cache_bytes(self, width: int, rows: int) -> int:
        """Returns the size of the layer caches of a forward pass. Each cache is freed when the next
        layer has been computed."""
        alive = min(_LAYERS_ALIVE, self._layers)
        return rows * self._memory.kv_footprint(width) * alive // self._layers

    def _borrow(self, num_bytes: int) -> bool:
        self.waiting_for_memory = not self._scheduler.borrow(num_bytes)
        return not self.waiting_for_memory

    def _return_borrowed(self) -> None:
        self._scheduler.return_borrowed(self._borrowed_for_step)
        self._borrowed_for_step = 0

    def _dispatch_inputs(self, inputs: Sequence[tuple[EmbedTask, int]]) -> None:
        long = self._long
        try:
            going_on = long is not None and inputs[0] == (long.task, long.index)
            piece = self._embed_chunk(long) if long and going_on else self._embed_batch(inputs)
            mx.async_eval(piece.state)
            self._step = piece
        except Exception:
            log.exception("embedding step failed")
            self._handle_failure(inputs)
            self._return_borrowed()

    def _embed_batch(self, inputs: Sequence[tuple[EmbedTask, int]]) -> _EmbedStep:
        rows = [work.job.inputs[number] for work, number in inputs]
        width = max(map(len, rows))
        tokens = mx.array([(*ids, *[0] * (width - len(ids))) for ids in rows])
        shares = [
            pooling_weights(work.job.pooling, len(ids), 0, width)
            for (work, _), ids in zip(inputs, rows, strict=True)
        ]
        # Nothing references the layer caches, so each one is freed when its layer is complete.
        found = pool_hidden_states(self._model(tokens, self._model.make_kv()), mx.array(shares))
        vectors = normalize(found, [work.job.dimensions for work, _ in inputs])
        count = sum(map(len, rows))
        return _EmbedStep(inputs=inputs, tokens=count, vectors=vectors, state=[vectors])

    def _embed_chunk(self, long: LongInput) -> _EmbedStep:
        job, length = long.task.job, len(long.ids)
        count = min(self._chunk, length - long.num_computed)
        shares = pooling_weights(job.pooling, length, long.num_computed, count)
        tokens = mx.array([long.ids[long.num_computed : long.num_computed + count]])
        found = pool_hidden_states(self._model(tokens, long.kv), mx.array([shares]))
        long.pooled_sum = found if long.pooled_sum is None else long.pooled_sum + found
        long.num_computed += count
        vectors = (
            normalize(long.pooled_sum, [job.dimensions]) if long.num_computed == length else None
        )
        caches = [array for layer in long.kv for array in layer.state()]
        state = [long.pooled_sum, *caches] if vectors is None else [vectors]
        inputs = [(long.task, long.index)]
        return _EmbedStep(inputs=inputs, tokens=count, vectors=vectors, state=state)

    # ends

    def _finish_step(self, step: _EmbedStep) -> None:
        self.embedded_tokens += step.tokens
        for work, _ in step.inputs:
            work.isolated = False
        if step.vectors is None:
            return
        found = vectors_to_bytes(step.vectors, [work.job.dimensions for work, _ in step.inputs])
        for (work, number), vector in zip(step.inputs, found, strict=True):
            if self._long is not None and self._long.task is work and self._long.index == number:
                self._drop_long_input()
            if work not in self._tasks:  # cancelled, or failed by another of its inputs
                continue
            if vector is None:
                self._end(work, error=_INVALID_OUTPUT)
                continue
            work.vectors[number] = vector
            if len(work.vectors) == len(work.job.inputs):
                self._end(work)

    def _handle_failure(self, inputs: Sequence[tuple[EmbedTask, int]]) -> None:
        """Handles a failed forward pass with these inputs. If the inputs belong to one job, it ends
        with an error. Otherwise, all inputs are recomputed, with a separate pass for each job."""
        self.exceptions += 1
        works = {work for work, _ in inputs}
        if len(works) == 1:
            for work in works & set(self._tasks):
                self._end(work, error=_FAILED)
            return
        for work, number in reversed(inputs):
            work.isolated = True
            work.pending_inputs.appendleft(number)

    def _end(self, task: EmbedTask, *, error: str | None = None) -> None:
        self._remove(task)
        vectors = () if error else tuple(task.vectors[i] for i in range(len(task.job.inputs)))
        self._ended.append(EmbedResult(job_id=task.job.id, vectors=vectors, error=error))

    def _remove(self, task: EmbedTask) -> None:
        self._tasks.remove(task)
        self.waiting_for_memory = False  # set again if the next task needs memory
        if self._long is not None and self._long.task is task:
            self._drop_long_input()

    def _drop_long_input(self) -> None:
        assert self._long is not None
        self._scheduler.return_borrowed(self._long.borrowed_bytes)
        self._long = None
