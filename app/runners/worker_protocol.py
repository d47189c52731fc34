"""The messages between a model process and its parent.

Knows: the messages. Must not know: sockets, how messages are sent (app/runners/channel.py).

The parent first sends a `WorkerInit` and then `Command`s. To stop the process, it closes the
channel. The process sends `WorkerEvent`s: the progress of the load, `EngineReady`, and then the
output of the engine, with one message per step.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    AnyEngineCall,
    EngineFailed,
    EngineReady,
    EngineReply,
    Heartbeat,
    Job,
    LoadProgress,
    PromptLogprobs,
    StepOutput,
)
from app.core.model_files import ModelFiles
from app.core.requests import EmbedJob, EmbedResult
from app.core.settings import Settings
from app.runners.channel import make_decoder

# The number of positions of prompt log probabilities per message. A long prompt has millions of
# numbers, and decoding a message blocks the event loop.
_SCORES_PER_CHUNK = 512

# The maximum number of alternatives in them, unless a single position has more.
_ALTERNATIVES_PER_CHUNK = 1 << 17

# The maximum size of the embeddings in a message in bytes, unless a single one is larger.
_VECTOR_BYTES_PER_CHUNK = 1 << 18

# The minimum number of probes per `Settings.watchdog`, and the maximum interval between them in
# seconds.
_PROBES_PER_WATCHDOG = 4
_MAX_PROBE_INTERVAL = 1.0

Scores = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


class WorkerInit(Struct, frozen=True, kw_only=True, array_like=True):
    """The first message. parent_pid: the process ID of the parent."""

    parent_pid: int
    settings: Settings
    files: ModelFiles


class Submit(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The process replies with `JobReceived`, if it must compile a grammar, and then with
    `JobAccepted` or `Rejected`."""

    job: Job


class Embed(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The process replies with `JobReceived`, and then with `Embedded`."""

    job: EmbedJob


class ProvideImages(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Pixels that a job has requested, which may have ended. The process does not reply."""

    job: str
    images: tuple[ImagePixels, ...]


class Cancel(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Cancels a job of any kind, which may have ended. keep: see `EngineClient.cancel`."""

    job: str
    keep: int | None


class Probe(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The process replies with `ProbeReply`."""


class Call(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A call of the engine. The process replies with `CallReply` or `Rejected`."""

    id: str
    call: AnyEngineCall


class JobReceived(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The process has read a job or an embedding job, and has not done anything with it yet. If the
    process crashes before this event, the job is not the cause."""

    job: str


class JobAccepted(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The job is in the engine's queue."""

    job: str


class Rejected(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The AppError that rejected a job or a call. message: its `marked_message`."""

    id: str
    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @staticmethod
    def from_error(id: str, error: AppError) -> "Rejected":
        return Rejected(
            id=id,
            kind=error.kind,
            message=error.marked_message,
            param=error.param,
            code=error.code,
            retry_after=error.retry_after,
        )

    def to_error(self) -> AppError:
        return AppError(
            self.kind,
            self.message,
            param=self.param,
            code=self.code,
            retry_after=self.retry_after,
        )


class CallReply(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """reply: the reply to the call with that ID."""

    id: str
    reply: EngineReply


class ProbeReply(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """takes_commands: whether the engine has taken the command that the last probe put into its
    queue, as it would take a job."""

    heartbeat: Heartbeat
    takes_commands: bool


class PromptScoresChunk(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A chunk of the log probabilities of a prompt. More chunks may follow. The last chunk is in
    the `PromptLogprobs` of the next step."""

    job: str
    scores: Scores


class Embedded(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A chunk of the result of an embedding job. error: see `EmbedResult`. is_last: whether no more
    chunks follow."""

    job: str
    vectors: tuple[bytes, ...]
    error: str | None
    is_last: bool


Command = Submit | Embed | ProvideImages | Cancel | Probe | Call

WorkerEvent = (
    LoadProgress
    | EngineReady
    | EngineFailed
    | JobReceived
    | JobAccepted
    | Rejected
    | CallReply
    | ProbeReply
    | PromptScoresChunk
    | Embedded
    | StepOutput
)

WORKER_INIT: Decoder[WorkerInit] = make_decoder(WorkerInit)
COMMAND: Decoder[Command] = make_decoder(Command)
WORKER_EVENT: Decoder[WorkerEvent] = make_decoder(WorkerEvent)


def probe_interval(settings: Settings) -> float:
    """Returns the number of seconds between two probes."""
    return min(_MAX_PROBE_INTERVAL, settings.watchdog / _PROBES_PER_WATCHDOG)


def split_step(step: StepOutput) -> Iterator[PromptScoresChunk | StepOutput]:
    """Splits prompt log probabilities that are too long for one message. Yields chunks, and then
    the step with the remaining part."""
    if not any(isinstance(update, PromptLogprobs) for update in step.updates):
        yield step
        return
    kept = list(step.updates)
    for index, update in enumerate(kept):
        if isinstance(update, PromptLogprobs):
            chunk = _chunk_length(update.logprobs)
            # a step may complete several prompts, so it keeps none with many alternatives
            last = len(update.logprobs)
            if chunk == _SCORES_PER_CHUNK:
                last = max(0, last - 1) // chunk * chunk
            for start in range(0, last, chunk):
                yield PromptScoresChunk(
                    job=update.job_id, scores=update.logprobs[start : min(start + chunk, last)]
                )
            kept[index] = replace(update, logprobs=update.logprobs[last:])
    yield replace(step, updates=tuple(kept))


def _chunk_length(scores: Scores) -> int:
    """Returns the number of positions per message."""
    alternatives = max((len(top) for _, top in scores[:1]), default=0)
    return min(_SCORES_PER_CHUNK, max(1, _ALTERNATIVES_PER_CHUNK // (1 + alternatives)))


def split_embeddings(result: EmbedResult) -> Iterator[Embedded]:
    """Splits embeddings, whose megabytes must not delay tokens."""
    vectors: Sequence[bytes] = result.vectors
    size = max(1, _VECTOR_BYTES_PER_CHUNK // len(vectors[0])) if vectors else 1
    for start in range(0, max(1, len(vectors)), size):
        yield Embedded(
            job=result.job_id,
            vectors=tuple(vectors[start : start + size]),
            error=result.error,
            is_last=start + size >= len(vectors),
        )


class EventJoiner:
    """Reassembles the events that `split_step` and `split_embeddings` have split."""

    def __init__(self) -> None:
        self._scores: dict[str, list[Scores]] = {}
        self._vectors: dict[str, list[bytes]] = {}

    def add_scores(self, chunk: PromptScoresChunk) -> None:
        self._scores.setdefault(chunk.job, []).append(chunk.scores)

    def join_step(self, step: StepOutput) -> StepOutput:
        if not self._scores:
            return step
        scores, self._scores = self._scores, {}
        return replace(
            step,
            updates=tuple(
                replace(
                    update, logprobs=tuple(chain(*scores.get(update.job_id, ()), update.logprobs))
                )
                if isinstance(update, PromptLogprobs)
                else update
                for update in step.updates
            ),
        )

    def join_embeddings(self, chunk: Embedded) -> EmbedResult | None:
        """Returns the result if it is complete."""
        vectors = self._vectors.setdefault(chunk.job, [])
        vectors += chunk.vectors
        if not chunk.is_last:
            return None
        del self._vectors[chunk.job]
        return EmbedResult(job_id=chunk.job, vectors=tuple(vectors), error=chunk.error)
