"""Jobs on their way to a model's runner, careful with those that a runner died with.

Knows: which jobs are at the runner, which ones are suspects (`app.runners.suspects`). Must not
know: why there is a runner or none.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Ended, EngineStats, Job, Update
from app.core.ports import Runner, Submission
from app.core.residents import Served
from app.runners.alone import Alone, Apart
from app.runners.suspects import GUILTY, Suspect, Suspects

# Turns of an engine in which it has surely heard that a job was left: two (`Engine.submit`), and
# those which it had made already when the news of them had not come yet.
_TURNS = 8

# jobs that were left and may still be run which are remembered: more than run at once
_MOST_LEFT = 64


class Careful:
    """serving: the runner of now; raises AppError where there is none."""

    def __init__(
        self, served: Served, serving: Callable[[], Runner], clock: Callable[[], float]
    ) -> None:
        self._name = served.name
        self._serving = serving
        self._suspects = Suspects(clock)
        self._alone = Alone(served.settings.max_queue)
        self._dispatched: dict[str, Suspect] = {}
        self._left: dict[str, int] = {}  # of those dispatched, and the engine's turns until then

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        """As `Engine.submit`; AppError(INVALID) also for a prompt that killed two runners. One that
        stood by when one died waits, while it is iterated, until no other such one runs."""
        if not self._check(job):
            async with self._submitted(job) as submission:
                yield submission
            return
        async with Apart(job, self._submitted, self._alone, self._suspects.clear) as apart:
            yield apart

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """As `Engine.embed`, and as `submit`."""
        if not self._check(job):
            return await self._embedded(job)
        async with self._alone.turn():
            vectors = await self._embedded(job)
        self._suspects.clear(job)
        return vectors

    def accuse(self, parallel: int, stats: EngineStats) -> None:
        """The runner died. parallel: jobs that ran at once. They are taken in the order in which
        they come, so whoever cannot have had a place is innocent. What the runner said of the start
        of a job is not asked: it dies before it has said so, of a prompt that kills at once. stats:
        the last that it said."""
        self._let_go(stats)
        here = self._dispatched.values()
        jobs = [job for job in here if isinstance(job, Job)]
        embedding = [job for job in here if isinstance(job, EmbedJob)]
        self._suspects.accuse([*jobs[:parallel], *embedding])

    def reset(self) -> None:
        """There is no runner any more."""
        self._dispatched.clear()
        self._left.clear()

    def trust(self) -> None:
        """Forget all suspects."""
        self._suspects.clear_all()

    def _check(self, job: Suspect) -> bool:
        """Whether it is a suspect. Raises AppError(INVALID) if it is more than that."""
        deaths = self._suspects.deaths(job)
        if deaths >= GUILTY:
            raise AppError(
                Kind.INVALID,
                f"this prompt is refused: {self._name} broke {deaths} times while it was "
                "evaluated. Change the prompt, or what its answer must follow; an operator can "
                "unload the model, which forgets this",
                code="prompt_refused",
            )
        return deaths > 0

    @asynccontextmanager
    async def _submitted(self, job: Job) -> AsyncGenerator[Submission]:
        runner = self._serving()
        # before it is submitted: compiling its grammar may be what kills
        self._dispatched[job.id] = job
        read: _Read | None = None
        try:
            async with runner.submit(job) as submission:
                read = _Read(submission)
                yield read
        finally:
            self._leave(job, runner, ended_well=read is not None and read.ended_well)

    async def _embedded(self, job: EmbedJob) -> Sequence[bytes]:
        runner = self._serving()
        self._dispatched[job.id] = job
        ended_well = False
        try:
            vectors = await runner.embed(job)
            ended_well = True
            return vectors
        finally:
            self._leave(job, runner, ended_well=ended_well)

    def _leave(self, job: Suspect, runner: Runner, *, ended_well: bool) -> None:
        """One that did not end well is remembered until the engine has turned without it: it may
        hang in it, and clients are less patient than a watchdog; or it is dead, and the client
        heard of it before we did."""
        if self._dispatched.get(job.id) is not job:
            return  # of a runner that is gone
        status = runner.status()
        alive = status.state != "failed"
        if alive:
            self._let_go(status.stats)
        if ended_well or (alive and len(self._left) >= _MOST_LEFT):
            del self._dispatched[job.id]
        else:
            self._left[job.id] = status.stats.steps

    def _let_go(self, stats: EngineStats) -> None:
        """Those whose leaving the engine has heard of."""
        idle = not (stats.running or stats.waiting or stats.embedding)
        for id_, turns in list(self._left.items()):
            if stats.steps >= turns + (1 if idle else _TURNS):
                del self._left[id_], self._dispatched[id_]


class _Read:
    """A submission, and whether it came to a good end."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self.ended_well = False

    async def __aiter__(self) -> AsyncIterator[Update]:
        async for update in self._submission:
            if isinstance(update, Ended):
                self.ended_well = update.reason in ("stop", "length")
            yield update

    def keep(self, tokens: int) -> None:
        self._submission.keep(tokens)
