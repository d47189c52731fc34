"""Inputs -> vectors: texts of which only pooled hidden states are wanted.

Knows: the model as a function, jobs of inputs, how much memory it is lent. Must not know:
sequences, sampling, who else runs. Jobs take turns, a piece each, and a piece is never larger than
a chunk of a prompt:

    short inputs, of any jobs   one forward pass [B, L], padded on the right
    a long input                a chunk of it, behind its layer caches; one such input at a time

Padding on the right changes nothing. Every layer looks backwards only, be it attention, whole or
windowed, a convolution or a recurrent state, and a mixture of experts treats each position by
itself, without a bound on how many an expert takes: so no position can know what stands behind it.
What the padding leaves in the layer caches goes with them.

The prefix cache is neither asked nor filled: it keeps what layers need to go on, and not the hidden
states behind the last one, of which vectors are made.

Hidden states -> one vector a row.

Both kinds are sums with weights over positions, so that rows of either kind are pooled together,
and a row in several pieces: mean gives each position one over the length, last gives one to the
last. Sources: Reimers and Gurevych 2019 (arXiv:1908.10084) for the mean, of which all tokens are
part, special ones too; Neelakantan et al. 2022 (arXiv:2201.10005) for the last; Kusupati et al.
2022 (arXiv:2205.13147) for vectors of which the first numbers do.

Inputs that are embedded, on their way, and who lends the memory for it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx

from app.core.embeddings import EmbedJob, EmbedResult, PoolingType
from app.engine.memory_profile import MemoryProfile
from models.base import Model
from models.kv import LayerCache

# torch.nn.functional.normalize, of which all the others' vectors come, does the same
_MIN_NORM = 1e-12


def pooling_weights(pooling: PoolingType, length: int, start: int, width: int) -> list[float]:
    """Those of `width` positions from `start` on, of a row of `length`; what is behind that has
    none."""
    if pooling == "mean":
        here = max(0, min(width, length - start))
        return [1 / length] * here + [0.0] * (width - here)
    return [float(start + place == length - 1) for place in range(width)]


def pool_hidden_states(hidden: mx.array, weights: mx.array) -> mx.array:
    """hidden [B, L, D], shares [B, L] -> [B, D] float32. A position without a share may hold
    anything, NaN too."""
    weights = weights[..., None]
    return mx.sum(mx.where(weights > 0, weights * hidden.astype(mx.float32), 0), axis=1)


def normalise(vectors: mx.array, dimensions: Sequence[int | None]) -> mx.array:
    """[B, D] -> the same with all behind a row's first `dimensions` numbers zero, and of length
    one; zeros stay zeros."""
    width = vectors.shape[-1]
    kept = mx.array([[width if count is None else count] for count in dimensions])
    cut = mx.where(mx.arange(width) < kept, vectors, 0)
    # a number may be too large to be squared
    largest = mx.max(mx.abs(cut), axis=-1, keepdims=True)
    cut = cut / mx.where(largest > 0, largest, 1)
    return cut / mx.maximum(mx.linalg.norm(cut, axis=-1, keepdims=True), _MIN_NORM)


def vectors_to_bytes(vectors: mx.array, dimensions: Sequence[int | None]) -> list[bytes | None]:
    """Each row's first `dimensions` numbers, as little-endian as the machines are that MLX runs on;
    None for a row that is not all numbers. Waits for them."""
    width = vectors.shape[-1]
    sound = cast(list[bool], mx.all(mx.isfinite(vectors), axis=-1).tolist())
    # MLX's stubs do not know of buffers
    view = memoryview(cast(Any, mx.contiguous(vectors))).cast("B")
    return [
        bytes(view[4 * width * row : 4 * (width * row + (count or width))]) if sound[row] else None
        for row, count in enumerate(dimensions)
    ]


class MemoryLender(Protocol):
    """Who has the memory."""

    @property
    def borrowed_bytes(self) -> int:
        """Bytes; 0 after they were called back."""
        ...

    def borrow(self, num_bytes: int) -> bool:
        """So many bytes more; False where they are not to be had now."""
        ...

    def return_borrowed(self, num_bytes: int) -> None: ...


class EmbedTask:
    """A job on its way. pending_inputs: numbers of its inputs, shortest first. isolated: whether it
    shares no forward pass, because one failed that it was in."""

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
    """An input that takes several pieces. borrowed_bytes: bytes that it holds until its end.
    pooled_sum: what is pooled of it so far, [1, D] float32."""

    def __init__(
        self, task: EmbedTask, index: int, kv: list[LayerCache], borrowed_bytes: int
    ) -> None:
        self.task, self.index, self.kv, self.borrowed_bytes = task, index, kv, borrowed_bytes
        self.ids = task.job.inputs[index]
        self.num_computed = 0
        self.pooled_sum: mx.array | None = None


log = logging.getLogger(__name__)

# inputs in one forward pass: each takes a whole step of positions (models/kv.py) in every layer's
# cache, however short it is
MAX_ROWS = 16

# layers whose caches exist at the same time where nobody holds on to them: one is read while the
# next one is made
_LAYERS_ALIVE = 2

_FAILED = "the engine failed while processing this request"
_INVALID_OUTPUT = (
    "the model produced NaN or infinite hidden states: its weights or its "
    "quantization may be corrupt"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EmbedStep:
    """What the device works on. inputs: jobs and numbers of their inputs, whose vectors [B, D] it
    gives; None where it is of a long input that is not at its end. tokens: without padding. state:
    all that must be evaluated."""

    inputs: Sequence[tuple[EmbedTask, int]]
    tokens: int
    vectors: mx.array | None
    state: Sequence[mx.array]


class Embedder:
    """chunk: tokens of a piece, padding included.

    waiting_for_memory: whether it waits for memory, and nobody else should get any first.
    embedded_tokens: evaluated since the start, without padding. exceptions: times that something
    raised.
    """

    def __init__(
        self, model: Model, memory: MemoryProfile, lender: MemoryLender, *, chunk: int
    ) -> None:
        self.waiting_for_memory = False
        self.embedded_tokens = 0
        self.exceptions = 0
        self._model = model
        self._memory = memory
        self._lender = lender
        self._chunk = chunk
        self._layers = len(model.make_kv())
        self._tasks: deque[EmbedTask] = deque()  # whose turn it is, first
        self._long: LongInput | None = None
        self._step: _EmbedStep | None = None
        self._borrowed_for_step = 0  # bytes that are lent for the piece alone
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
        """Forget a job; unknown ones have ended already. A piece of it that the device works on is
        waited for, and that is all."""
        for work in [work for work in self._tasks if work.job.id == job]:
            self._remove(work)

    def drain(self) -> tuple[EmbedResult, ...]:
        """The jobs that ended since this was asked last."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def dispatch(self) -> bool:
        """Give the device the next piece. False where there is nothing to do, or no memory to do it
        in."""
        assert self._step is None, "one piece at a time"
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
        """Wait for the piece that was dispatched."""
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
        """Between two pieces. A long input whose memory was called back begins again later."""
        long = self._long
        if long is not None and self._lender.borrowed_bytes < long.borrowed_bytes:
            assert self._step is None, "the device still writes into its layer caches"
            log.info("restarting an embedding input of %d tokens: out of KV memory", len(long.ids))
            long.task.pending_inputs.appendleft(long.index)
            self._long = None

    # pieces

    def _next_inputs(self, task: EmbedTask) -> Sequence[tuple[EmbedTask, int]]:
        """What the work's turn is for; nothing where it has to wait."""
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
        """Short inputs of this work, and of others as far as there is room beside them."""
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
                if not (self._lender.borrow(more) if chosen else self._borrow(more)):
                    return chosen
                self._borrowed_for_step += more
                chosen.append((work, work.pending_inputs.popleft()))
                width = wider
        return chosen

    def _cache_bytes(self, width: int, rows: int) -> int:
        """Of layer caches that go as soon as the next layer has been evaluated."""
        alive = min(_LAYERS_ALIVE, self._layers)
        return rows * self._memory.kv_footprint(width) * alive // self._layers

    def _borrow(self, num_bytes: int) -> bool:
        self.waiting_for_memory = not self._lender.borrow(num_bytes)
        return not self.waiting_for_memory

    def _return_borrowed(self) -> None:
        self._lender.return_borrowed(self._borrowed_for_step)
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
        # nobody holds on to the layer caches, so that each goes when its layer is done
        found = pool_hidden_states(self._model(tokens, self._model.make_kv()), mx.array(shares))
        vectors = normalise(found, [work.job.dimensions for work, _ in inputs])
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
            normalise(long.pooled_sum, [job.dimensions]) if long.num_computed == length else None
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
            if work not in self._tasks:  # cancelled, or lost by another input of its own
                continue
            if vector is None:
                self._end(work, error=_INVALID_OUTPUT)
                continue
            work.vectors[number] = vector
            if len(work.vectors) == len(work.job.inputs):
                self._end(work)

    def _handle_failure(self, inputs: Sequence[tuple[EmbedTask, int]]) -> None:
        """One of these failed. If they are of one job, it ends; if of several, these begin again,
        each for itself."""
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
        self.waiting_for_memory = False  # if another one is, it says so at its turn
        if self._long is not None and self._long.task is task:
            self._drop_long_input()

    def _drop_long_input(self) -> None:
        assert self._long is not None
        self._lender.return_borrowed(self._long.borrowed_bytes)
        self._long = None
