"""Jobs on their way to a model's runner, careful with those that a runner died with.

Knows: which jobs are at the runner, which ones are suspects (`app.runners.suspects`). Must not
know: why there is a runner or none.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Job
from app.core.ports import Runner, Submission
from app.core.residents import Served
from app.runners.alone import Alone, Apart
from app.runners.suspects import GUILTY, Suspect, Suspects


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
        self._left: set[str] = set()  # of those dispatched, while it is not known how the runner is

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

    def accuse(self, parallel: int) -> None:
        """The runner died. parallel: jobs that ran at once. They are taken in the order in which
        they come, so whoever cannot have had a place is innocent. What the runner said of the start
        of a job is not asked: it dies before it has said so, of a prompt that kills at once."""
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
        try:
            async with runner.submit(job) as submission:
                yield submission
        finally:
            self._forget(job, runner)

    async def _embedded(self, job: EmbedJob) -> Sequence[bytes]:
        runner = self._serving()
        self._dispatched[job.id] = job
        try:
            return await runner.embed(job)
        finally:
            self._forget(job, runner)

    def _forget(self, job: Suspect, runner: Runner) -> None:
        """Whoever hears of its runner's death before we do must still be there when we do."""
        if job.id not in self._dispatched:
            return
        self._left.add(job.id)
        if runner.status().state == "ready":
            for id_ in self._left:
                self._dispatched.pop(id_, None)
            self._left.clear()
