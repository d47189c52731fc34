"""What a runner's process and the one that started it say to each other.

Knows: the words. Must not know: pipes, sockets, HTTP. Down: an `Opening` through standard input,
which stays open as long as the parent lives, then a `Job` or an `EmbedJob` per request. Up: a
`Status` when asked, and one line of `News` after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Job, PromptScores, Step
from app.core.messages import Failed, Heartbeat, Loading, Ready
from app.core.settings import Settings
from app.runners.codec import Codec

# scores of a prompt's positions in one line: a long prompt's are millions of numbers, and whoever
# reads a line of them does nothing else meanwhile
_SCORES = 512

# heartbeats per `Settings.watchdog`, at least, and seconds between two of them, at most
_BEATS = 4
_SLOWEST_BEAT = 1.0

Scores = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first words. parent: its pid. socket: descriptor of a loopback socket that listens
    already. secret: what every request must bring as its bearer token."""

    parent: int
    socket: int
    secret: str
    settings: Settings
    files: ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """GET /v1/status. The first four are spelt and counted as Ollama's client reads them of its
    runner (llm.ServerStatus: 0 ready, 3 loading, 5 error); Memory is in bytes."""

    Status: int
    Progress: int
    ContextLength: int
    Memory: int
    State: Loading | Ready | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreScores:
    """Some of a prompt's scores; others come behind them, the last of all in the `PromptScores` of
    the next step."""

    job: str
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An AppError."""

    kind: Kind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


# of an engine that is loaded
News = Heartbeat | MoreScores | Step | Failed

OPENING = Codec[Opening](Opening)
STATUS = Codec[Status](Status)
NEWS = Codec[News](News)
JOB = Codec[Job](Job)
EMBED_JOB = Codec[EmbedJob](EmbedJob)
PROBLEM = Codec[Problem](Problem)


def problem(error: AppError) -> Problem:
    return Problem(
        kind=error.kind,
        message=error.marked,
        param=error.param,
        code=error.code,
        retry_after=error.retry_after,
    )


def app_error(problem: Problem) -> AppError:
    return AppError(
        problem.kind,
        problem.message,
        param=problem.param,
        code=problem.code,
        retry_after=problem.retry_after,
    )


def beat_interval(settings: Settings) -> float:
    """Seconds between two heartbeats."""
    return min(_SLOWEST_BEAT, settings.watchdog / _BEATS)


def split(step: Step) -> Iterator[MoreScores | Step]:
    """The step, behind those of its scores that make it too long for one line."""
    if not any(isinstance(update, PromptScores) for update in step.updates):
        yield step
        return
    kept = list(step.updates)
    for place, update in enumerate(kept):
        if isinstance(update, PromptScores):
            last = max(0, len(update.scores) - 1) // _SCORES * _SCORES
            for start in range(0, last, _SCORES):
                yield MoreScores(job=update.job, scores=update.scores[start : start + _SCORES])
            kept[place] = replace(update, scores=update.scores[last:])
    yield replace(step, updates=tuple(kept))


class Joiner:
    """Undoes `split`."""

    def __init__(self) -> None:
        self._held: dict[str, list[Scores]] = {}

    def hold(self, more: MoreScores) -> None:
        self._held.setdefault(more.job, []).append(more.scores)

    def joined(self, step: Step) -> Step:
        if not self._held:
            return step
        held, self._held = self._held, {}
        return replace(
            step,
            updates=tuple(
                replace(update, scores=tuple(chain(*held.get(update.job, ()), update.scores)))
                if isinstance(update, PromptScores)
                else update
                for update in step.updates
            ),
        )
