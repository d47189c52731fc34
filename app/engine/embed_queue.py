"""Embedding jobs in progress, and the pooling of hidden states into one vector per input.

Knows: embedding jobs and their results, hidden states. Must not know: models, memory, scheduling.

The poolings are weighted sums over positions. Rows of different poolings can therefore share a
batch, and an input can be split into several chunks. For "mean", the weight of each position is 1 /
length. For "cls" and "last", the weight of the first or last position is 1 and all other weights
are 0. Sources: Reimers and Gurevych 2019 (arXiv:1908.10084) for the mean over all tokens, including
special tokens; Devlin et al. 2018 (arXiv:1810.04805) for the first token; Neelakantan et al. 2022
(arXiv:2201.10005) for the last token; Kusupati et al. 2022 (arXiv:2205.13147) for embeddings that
may be truncated to their first dimensions.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from app.core.requests import EmbedJob, EmbedResult, PoolingType

# The epsilon of torch.nn.functional.normalize, which the reference implementations use.
_MIN_NORM = 1e-12


def pooling_weights(pooling: PoolingType, length: int, start: int, width: int) -> list[float]:
    """Returns the pooling weights of `width` positions, beginning at position `start` of an input
    with `length` tokens. Positions after the end of the input have weight 0."""
    if pooling == "mean":
        here = max(0, min(width, length - start))
        return [1 / length] * here + [0.0] * (width - here)
    chosen = 0 if pooling == "cls" else length - 1
    return [float(start + place == chosen) for place in range(width)]


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
    """Returns the first `dimensions` values of each row (None for all) as little-endian float32.
    MLX supports only little-endian machines. Returns None for a row that contains NaN or infinity.
    Waits for the device."""
    width = vectors.shape[-1]
    sound = cast(list[bool], mx.all(mx.isfinite(vectors), axis=-1).tolist())
    # MLX's type stubs lack the buffer protocol.
    view = memoryview(cast(Any, mx.contiguous(vectors))).cast("B")
    return [
        bytes(view[4 * width * row : 4 * (width * row + (count or width))]) if sound[row] else None
        for row, count in enumerate(dimensions)
    ]


def scores_to_bytes(scores: mx.array) -> bytes | None:
    """Returns scores [N] like `vectors_to_bytes`."""
    return vectors_to_bytes(scores[None].astype(mx.float32), [None])[0]


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

_FAILED = "the engine failed while processing this request"
_INVALID_OUTPUT = (
    "the model produced NaN or infinite hidden states: its weights or its "
    "quantization may be corrupt"
)


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
