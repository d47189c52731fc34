"""Embedding jobs in progress, and their computation with a model that also generates text: the
hidden states of token IDs are pooled into one vector per input.

Knows: the model as a function, embedding jobs and their results, borrowed memory. Must not know:
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
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from app.core.requests import EmbedJob, EmbedResult
from app.core.units import pluralize
from app.engine.memory_profile import MemoryProfile
from app.engine.pooler import (
    EmbeddingHead,
    pool_hidden_states,
    pooling_weights,
    scores_to_bytes,
    vectors_to_bytes,
)
from app.engine.scheduler import Scheduler
from models.base import Model
from models.kv import LayerCache

# The number of layer caches that exist at the same time if nothing else references them: one cache
# is read while the next one is created.
_LAYERS_ALIVE = 2

_FAILED = "the engine failed while processing this request"
_INVALID_OUTPUT = (
    "the model produced NaN or infinite hidden states: its weights or its "
    "quantization may be corrupt"
)


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


# an input of a task, by its index
TaskInput = tuple[EmbedTask, int]


class EmbedQueue:
    """The embedding jobs of one engine.

    tasks: in scheduling order.
    exceptions: the number of failed forward passes since startup.
    """

    def __init__(self) -> None:
        self.tasks: deque[EmbedTask] = deque()
        self.exceptions = 0
        self._ended: list[EmbedResult] = []

    @property
    def idle(self) -> bool:
        return not (self.tasks or self._ended)

    def submit(self, job: EmbedJob) -> None:
        self.tasks.append(EmbedTask(job))

    def cancel(self, job: str) -> None:
        """Removes a job. Does nothing if the job has already ended."""
        for task in [task for task in self.tasks if task.job.id == job]:
            self.tasks.remove(task)

    def drain(self) -> tuple[EmbedResult, ...]:
        """Returns the results of the jobs that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def store(self, inputs: Sequence[TaskInput], vectors: Sequence[bytes | None]) -> None:
        """Stores the vectors of a forward pass. A job ends with its last vector, or with an error
        if a vector is None. Inputs of jobs that have ended are ignored."""
        for (task, index), vector in zip(inputs, vectors, strict=True):
            task.isolated = False
            if task not in self.tasks:  # cancelled, or failed by another of its inputs
                continue
            if vector is None:
                self._end(task, error=_INVALID_OUTPUT)
                continue
            task.vectors[index] = vector
            if len(task.vectors) == len(task.job.inputs):
                self._end(task)

    def fail(self, inputs: Sequence[TaskInput]) -> None:
        """Handles a failed forward pass with these inputs. If the inputs belong to one job, it ends
        with an error. Otherwise, all inputs are recomputed, with a separate pass for each job."""
        self.exceptions += 1
        tasks = {task for task, _ in inputs}
        if len(tasks) == 1:
            for task in tasks & set(self.tasks):
                self._end(task, error=_FAILED)
            return
        for task, index in reversed(inputs):
            task.isolated = True
            task.pending_inputs.appendleft(index)

    def _end(self, task: EmbedTask, *, error: str | None = None) -> None:
        self.tasks.remove(task)
        vectors = () if error else tuple(task.vectors[i] for i in range(len(task.job.inputs)))
        self._ended.append(EmbedResult(job_id=task.job.id, vectors=vectors, error=error))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _EmbedStep:
    """A forward pass that the device is computing.

    inputs: the tasks and the indices of their inputs.
    tokens: the number of tokens without padding.
    vectors: the resulting embeddings [B, D]; None for a chunk of a long input that is not the last.
    logits: the selected logits of the rows whose jobs request logits instead of an embedding.
    state: all arrays that must be evaluated.
    """

    inputs: Sequence[TaskInput]
    tokens: int
    vectors: mx.array | None
    logits: Mapping[int, mx.array] = field(default_factory=dict[int, mx.array])
    state: Sequence[mx.array]


class Embedder:
    """Runs the embedding jobs of one engine.

    chunk: the maximum number of tokens per forward pass, including padding.
    waiting_for_memory: whether the embedder is waiting for memory. Meanwhile, no new sequence may
        start.
    embedded_tokens: the number of tokens embedded since startup, without padding.
    """

    def __init__(
        self, model: Model, memory: MemoryProfile, scheduler: Scheduler, *, chunk: int
    ) -> None:
        self.waiting_for_memory = False
        self.embedded_tokens = 0
        self._model = model
        self._head = EmbeddingHead(memory.hidden_size or 0)
        self._memory = memory
        self._scheduler = scheduler
        self._chunk = chunk
        self._layers = len(model.make_kv())
        self._queue = EmbedQueue()
        self._long: LongInput | None = None
        self._step: _EmbedStep | None = None
        self._borrowed_for_step = 0  # bytes borrowed for this forward pass only

    @property
    def exceptions(self) -> int:
        """The number of failed forward passes since startup."""
        return self._queue.exceptions

    @property
    def idle(self) -> bool:
        return self._step is None and self._queue.idle

    @property
    def num_jobs(self) -> int:
        return len(self._queue.tasks)

    def submit(self, job: EmbedJob) -> None:
        self._queue.submit(job)

    def cancel(self, job: str) -> None:
        """Removes a job. Does nothing if the job has already ended. A forward pass that is in
        flight is completed, and its result is discarded."""
        self._queue.cancel(job)
        self._drop_ended_input()

    def drain(self) -> tuple[EmbedResult, ...]:
        """Returns the results of the jobs that ended since the last call."""
        return self._queue.drain()

    def dispatch(self) -> bool:
        """Dispatches the next forward pass. Returns False if there is no work or not enough
        memory."""
        assert self._step is None, "only one pass may be in flight"
        self.waiting_for_memory = False
        tasks = self._queue.tasks
        for _ in range(len(tasks)):
            work = tasks[0]
            tasks.rotate(-1)
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
            self._fail(piece.inputs)
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

    def _next_inputs(self, task: EmbedTask) -> Sequence[TaskInput]:
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

    def _pack_short_inputs(self, first: EmbedTask) -> Sequence[TaskInput]:
        """Returns short inputs of this task, and of other tasks if they fit in the same pass."""
        chosen, width = list[TaskInput](), 0
        tasks = self._queue.tasks
        others = () if first.isolated else (w for w in tasks if w is not first and not w.isolated)
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

    def _dispatch_inputs(self, inputs: Sequence[TaskInput]) -> None:
        long = self._long
        try:
            going_on = long is not None and inputs[0] == (long.task, long.index)
            piece = self._embed_chunk(long) if long and going_on else self._embed_batch(inputs)
            mx.async_eval(piece.state)
            self._step = piece
        except Exception:
            log.exception("embedding step failed")
            self._fail(inputs)
            self._return_borrowed()

    def _embed_batch(self, inputs: Sequence[TaskInput]) -> _EmbedStep:
        rows = [work.job.inputs[number] for work, number in inputs]
        width = max(map(len, rows))
        tokens = mx.array([(*ids, *[0] * (width - len(ids))) for ids in rows])
        shares = [
            pooling_weights(work.job.pooling, len(ids), 0, width)
            for (work, _), ids in zip(inputs, rows, strict=True)
        ]
        # Nothing references the layer caches, so each one is freed when its layer is complete.
        found = pool_hidden_states(self._model(tokens, self._model.make_kv()), mx.array(shares))
        return self._finish_rows(inputs, found, sum(map(len, rows)))

    def _embed_chunk(self, long: LongInput) -> _EmbedStep:
        job, length = long.task.job, len(long.ids)
        count = min(self._chunk, length - long.num_computed)
        shares = pooling_weights(job.pooling, length, long.num_computed, count)
        tokens = mx.array([long.ids[long.num_computed : long.num_computed + count]])
        found = pool_hidden_states(self._model(tokens, long.kv), mx.array([shares]))
        long.pooled_sum = found if long.pooled_sum is None else long.pooled_sum + found
        long.num_computed += count
        inputs = [(long.task, long.index)]
        if long.num_computed == length:
            return self._finish_rows(inputs, long.pooled_sum, count)
        caches = [array for layer in long.kv for array in layer.state()]
        state = [long.pooled_sum, *caches]
        return _EmbedStep(inputs=inputs, tokens=count, vectors=None, state=state)

    def _finish_rows(
        self, inputs: Sequence[TaskInput], pooled: mx.array, tokens: int
    ) -> _EmbedStep:
        """Builds the results of pooled hidden states [B, D]."""
        vectors = self._head(pooled, [task.job.dimensions for task, _ in inputs])
        logits: dict[int, mx.array] = {}
        for row, (task, _) in enumerate(inputs):
            if task.job.logit_ids:
                chosen = mx.array(task.job.logit_ids)
                logits[row] = self._model.logits(pooled[row : row + 1])[0][chosen]
        state = [vectors, *logits.values()]
        return _EmbedStep(inputs=inputs, tokens=tokens, vectors=vectors, logits=logits, state=state)

    # ends

    def _finish_step(self, step: _EmbedStep) -> None:
        self.embedded_tokens += step.tokens
        if step.vectors is None:
            for task, _ in step.inputs:
                task.isolated = False
            return
        if self._long is not None and (self._long.task, self._long.index) in step.inputs:
            self._drop_long_input()
        results = vectors_to_bytes(step.vectors, [task.job.dimensions for task, _ in step.inputs])
        for row, logits in step.logits.items():
            results[row] = scores_to_bytes(logits)
        self._queue.store(step.inputs, results)
        self._drop_ended_input()

    def _fail(self, inputs: Sequence[TaskInput]) -> None:
        self._queue.fail(inputs)
        self._drop_ended_input()

    def _drop_ended_input(self) -> None:
        """Frees the memory of the long input if its job has ended."""
        self.waiting_for_memory = False  # set again if the next task needs memory
        if self._long is not None and self._long.task not in self._queue.tasks:
            self._drop_long_input()

    def _drop_long_input(self) -> None:
        assert self._long is not None
        self._scheduler.return_borrowed(self._long.borrowed_bytes)
        self._long = None
