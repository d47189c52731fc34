"""The messages between a model process and its parent.

Knows: the messages. Must not know: pipes, sockets, HTTP.

The parent first sends a `WorkerInit` on stdin, which stays open as long as the parent is running.
It then sends one `Job` or `EmbedJob` per request. The process responds with a `WorkerStatus` or a
`PrefixSnapshot` on request. It sends `WorkerEvent`s through a pipe (app/runners/event_pipe.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import (
    EngineFailed,
    EngineReady,
    Heartbeat,
    Job,
    LoadProgress,
    PromptLogprobs,
    StepOutput,
)
from app.core.model_files import ModelFiles
from app.core.prefix_snapshot import PrefixSnapshot
from app.core.settings import Settings
from app.runners.codec import Codec

# The number of positions of prompt log probabilities per line. A long prompt has millions of
# numbers, and decoding a line blocks the event loop.
_SCORES_PER_CHUNK = 512

# The minimum number of heartbeats per `Settings.watchdog`, and the maximum interval between them in
# seconds.
_HEARTBEATS_PER_WATCHDOG = 4
_MAX_HEARTBEAT_INTERVAL = 1.0

Scores = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInit:
    """The first message.

    parent_pid: the process ID of the parent.
    socket_fd: the descriptor of a Unix socket that already listens.
    events_fd: the descriptor of the process's end of the event pipe.
    """

    parent_pid: int
    socket_fd: int
    events_fd: int
    settings: Settings
    files: ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The response to GET /v1/status. The first four fields have the same names and values as in
    Ollama's runner (llm.ServerStatus: 0 ready, 3 loading, 5 error). `Progress` is a percentage from
    0 to 100, and `Memory` is in bytes."""

    Status: int
    Progress: int
    ContextLength: int
    Memory: int
    State: LoadProgress | EngineReady | EngineFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReceived:
    """The process has read a job or an embedding job, and has not done anything with it yet. If the
    process crashes before this event, the job is not the cause."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoresChunk:
    """A chunk of the log probabilities of a prompt. More chunks may follow. The last chunk is in
    the `PromptLogprobs` of the next step."""

    job: str
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An AppError as a response body."""

    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


# The events of a loaded engine.
WorkerEvent = Heartbeat | JobReceived | PromptScoresChunk | StepOutput | EngineFailed

WORKER_INIT = Codec[WorkerInit](WorkerInit)
WORKER_STATUS = Codec[WorkerStatus](WorkerStatus)
WORKER_EVENT = Codec[WorkerEvent](WorkerEvent)
JOB = Codec[Job](Job)
PREFIX_SNAPSHOT = Codec[PrefixSnapshot](PrefixSnapshot)
EMBED_JOB = Codec[EmbedJob](EmbedJob)
ERROR_BODY = Codec[ErrorBody](ErrorBody)


def build_error_body(error: AppError) -> ErrorBody:
    return ErrorBody(
        kind=error.kind,
        message=error.marked_message,
        param=error.param,
        code=error.code,
        retry_after=error.retry_after,
    )


def build_app_error(body: ErrorBody) -> AppError:
    return AppError(
        body.kind,
        body.message,
        param=body.param,
        code=body.code,
        retry_after=body.retry_after,
    )


def heartbeat_interval(settings: Settings) -> float:
    """Returns the number of seconds between two heartbeats."""
    return min(_MAX_HEARTBEAT_INTERVAL, settings.watchdog / _HEARTBEATS_PER_WATCHDOG)


def split_step(step: StepOutput) -> Iterator[PromptScoresChunk | StepOutput]:
    """Splits prompt log probabilities that are too long for one line. Yields chunks, and then the
    step with the remaining part."""
    if not any(isinstance(update, PromptLogprobs) for update in step.updates):
        yield step
        return
    kept = list(step.updates)
    for place, update in enumerate(kept):
        if isinstance(update, PromptLogprobs):
            last = max(0, len(update.logprobs) - 1) // _SCORES_PER_CHUNK * _SCORES_PER_CHUNK
            for start in range(0, last, _SCORES_PER_CHUNK):
                yield PromptScoresChunk(
                    job=update.job_id, scores=update.logprobs[start : start + _SCORES_PER_CHUNK]
                )
            kept[place] = replace(update, logprobs=update.logprobs[last:])
    yield replace(step, updates=tuple(kept))


class StepJoiner:
    """Reassembles the steps that `split_step` has split."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[Scores]] = {}

    def add(self, more: PromptScoresChunk) -> None:
        self._chunks.setdefault(more.job, []).append(more.scores)

    def join(self, step: StepOutput) -> StepOutput:
        if not self._chunks:
            return step
        chunks, self._chunks = self._chunks, {}
        return replace(
            step,
            updates=tuple(
                replace(
                    update, logprobs=tuple(chain(*chunks.get(update.job_id, ()), update.logprobs))
                )
                if isinstance(update, PromptLogprobs)
                else update
                for update in step.updates
            ),
        )
