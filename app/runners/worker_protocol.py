"""What a runner's process and the one that started it say to each other.

Knows: the words. Must not know: pipes, sockets, HTTP. Down: an `WorkerInit` through standard input,
which stays open as long as the parent lives, then a `Job` or an `EmbedJob` per request. Up: a
`WorkerStatus` when asked, and one line of `WorkerEvent` after the other.
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
from app.core.settings import Settings
from app.runners.codec import Codec

# scores of a prompt's positions in one line: a long prompt's are millions of numbers, and whoever
# reads a line of them does nothing else meanwhile
_SCORES_PER_CHUNK = 512

# heartbeats per `Settings.watchdog`, at least, and seconds between two of them, at most
_HEARTBEATS_PER_WATCHDOG = 4
_MAX_HEARTBEAT_INTERVAL = 1.0

Scores = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInit:
    """The first words. parent_pid: its pid. socket_fd: descriptor of a loopback socket that listens
    already. secret: what every request must bring as its bearer token."""

    parent_pid: int
    socket_fd: int
    secret: str
    settings: Settings
    files: ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """GET /v1/status. The first four are spelt and counted as Ollama's client reads them of its
    runner (llm.ServerStatus: 0 ready, 3 loading, 5 error); Memory is in bytes."""

    Status: int
    Progress: int
    ContextLength: int
    Memory: int
    State: LoadProgress | EngineReady | EngineFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoresChunk:
    """Some of a prompt's scores; others come behind them, the last of all in the `PromptLogprobs`
    of the next step."""

    job: str
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An AppError."""

    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


# of an engine that is loaded
WorkerEvent = Heartbeat | PromptScoresChunk | StepOutput | EngineFailed

WORKER_INIT = Codec[WorkerInit](WorkerInit)
WORKER_STATUS = Codec[WorkerStatus](WorkerStatus)
WORKER_EVENT = Codec[WorkerEvent](WorkerEvent)
JOB = Codec[Job](Job)
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
    """Seconds between two heartbeats."""
    return min(_MAX_HEARTBEAT_INTERVAL, settings.watchdog / _HEARTBEATS_PER_WATCHDOG)


def split_step(step: StepOutput) -> Iterator[PromptScoresChunk | StepOutput]:
    """The step, behind those of its scores that make it too long for one line."""
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
    """Undoes `split`."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[Scores]] = {}

    def add(self, more: PromptScoresChunk) -> None:
        self._chunks.setdefault(more.job, []).append(more.scores)

    def join(self, step: StepOutput) -> StepOutput:
        if not self._chunks:
            return step
        held, self._chunks = self._chunks, {}
        return replace(
            step,
            updates=tuple(
                replace(
                    update, logprobs=tuple(chain(*held.get(update.job_id, ()), update.logprobs))
                )
                if isinstance(update, PromptLogprobs)
                else update
                for update in step.updates
            ),
        )
