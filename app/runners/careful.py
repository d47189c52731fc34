"""Jobs on their way to a model's runner: submitted again where the runner died before they began,
tried alone where they ran when one died.

Knows: which jobs are at the runner, which ones are suspects (`app.runners.suspects`). Must not
know: why there is a runner or none.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.jobs import Ended, EngineStats, Job, Update
from app.core.ports import LossCause, Runner, Submission
from app.core.residents import Served
from app.runners.alone import Alone, Apart
from app.runners.suspects import GUILTY, WEIGHTS, Suspect, Suspects

# Turns of an engine in which it has surely heard that a job was left: two (`Runner.submit`), and
# those which it had made already when the news of them had not come yet.
_TURNS = 8

# jobs that were left and may still be run which are remembered: more than run at once
_MOST_LEFT = 64


class Serving(Protocol):
    """Where runners come from."""

    async def serving(self, lost: Runner | None = None) -> Runner:
        """The runner of now, or the next one where there is none, or where it is `lost`. Raises
        AppError if there will be none."""
        ...


class Careful:
    """Runs the jobs of one model."""

    def __init__(self, served: Served, source: Serving, clock: Callable[[], float]) -> None:
        self._name = served.name
        self._source = source
        self._suspects = Suspects(clock)
        self._alone = Alone(served.settings.max_queue)
        self._dispatched: dict[str, _Dispatched] = {}
        self._left: dict[str, int] = {}  # of those dispatched, and the engine's turns until then

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        """As `Runner.submit`; AppError(INVALID) also for a prompt that killed two runners. One that
        stood by when one died waits, while it is iterated, until no other such one runs. One whose
        runner is lost before it began is submitted to the next runner."""
        if not self._check(job):
            async with self._requeued(job) as submission:
                yield submission
            return
        async with Apart(job, self._requeued, self._alone, self._suspects.clear) as apart:
            yield apart

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """As `Runner.embed`, and as `submit`; inputs count as begun."""
        if not self._check(job):
            return await self._embedded(job)
        async with self._alone.turn():
            vectors = await self._embedded(job)
        self._suspects.clear(job)
        return vectors

    def accuse(self, parallel: int, stats: EngineStats, *, cause: LossCause) -> None:
        """The runner was lost. parallel: jobs that ran at once. Those that had begun ran; so may
        have as many of the others as there were places left, in the order in which they came: of a
        prompt that kills at once, a runner dies before it has said that the job began. stats: the
        last that it said. cause: see `RunnerLoss`."""
        self._let_go(stats)
        jobs = [one for one in self._dispatched.values() if isinstance(one.job, Job)]
        began = [one for one in jobs if one.began]
        others = [one for one in jobs if not one.began]
        embedding = [one for one in self._dispatched.values() if isinstance(one.job, EmbedJob)]
        accused = [*began, *others[: max(0, parallel - len(began))], *embedding]
        if weight := WEIGHTS[cause]:
            self._suspects.accuse((one.job for one in accused), weight=weight)
        for one in self._dispatched.values():
            one.judge(accused=one in accused)

    def reset(self) -> None:
        """There is no runner any more."""
        for one in self._dispatched.values():
            one.judge(accused=True)  # unless it was judged before: it ends with the runner
        self._dispatched.clear()
        self._left.clear()

    def trust(self) -> None:
        """Forget all suspects."""
        self._suspects.clear_all()

    def _check(self, job: Suspect) -> bool:
        """Whether it is a suspect. Raises AppError(INVALID) if it is more than that."""
        record = self._suspects.record(job)
        if record.weight >= GUILTY:
            raise AppError(
                Kind.INVALID,
                f"this prompt is refused: {self._name} failed {record.deaths} times while "
                "evaluating "
                "it. Change the prompt or its response format; an operator can clear this by "
                "unloading the model",
                code="prompt_refused",
            )
        return record.weight > 0

    @asynccontextmanager
    async def _requeued(self, job: Job) -> AsyncGenerator[Submission]:
        async with AsyncExitStack() as stack:
            requeued = _Requeued(job, self._source, self._dispatch, stack)
            await requeued.enter()
            yield requeued

    @asynccontextmanager
    async def _dispatch(self, job: Job, runner: Runner) -> AsyncGenerator["_Dispatched"]:
        # before it is submitted: compiling its grammar may be what kills
        one = self._dispatched[job.id] = _Dispatched(job, runner)
        try:
            yield one
        finally:
            self._leave(one)

    async def _embedded(self, job: EmbedJob) -> Sequence[bytes]:
        runner = await self._source.serving()
        one = self._dispatched[job.id] = _Dispatched(job, runner)
        try:
            vectors = await runner.embed(job)
            one.ended_well = True
            return vectors
        finally:
            self._leave(one)

    def _leave(self, one: "_Dispatched") -> None:
        """One that did not end well is remembered until the engine has turned without it: it may
        hang in it, and clients are less patient than a watchdog; or it is dead, and the client
        heard of it before we did."""
        if self._dispatched.get(one.job.id) is not one:
            return  # of a runner that is gone
        status = one.runner.status()
        alive = status.state != "failed"
        if alive:
            self._let_go(status.stats)
        if one.ended_well or (alive and len(self._left) >= _MOST_LEFT):
            del self._dispatched[one.job.id]
        else:
            self._left[one.job.id] = status.stats.steps

    def _let_go(self, stats: EngineStats) -> None:
        """Those whose leaving the engine has heard of."""
        idle = not (stats.running or stats.waiting or stats.embedding)
        for id_, turns in list(self._left.items()):
            if stats.steps >= turns + (1 if idle else _TURNS):
                del self._left[id_], self._dispatched[id_]


class _Dispatched:
    """A job that a runner was given. ended_well: it came to a good end."""

    def __init__(self, job: Suspect, runner: Runner) -> None:
        self.job = job
        self.runner = runner
        self.submission: Submission | None = None
        self.ended_well = False
        self._accused: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def began(self) -> bool:
        return self.submission is not None and self.submission.started is not None

    def judge(self, *, accused: bool) -> None:
        """The runner is lost; accused: the job may be the cause. Only the first one counts."""
        if not self._accused.done():
            self._accused.set_result(accused)

    async def may_be_submitted_again(self) -> bool:
        """To be asked when the runner is lost; returns when that was noticed. Not a job that had
        begun, of which its client has seen something, nor one that may be the cause."""
        return not self.began and not await self._accused


class _Requeued:
    """Implements `Submission`: a job at one runner after the other, until it begins. stack: left
    when the job is."""

    def __init__(
        self,
        job: Job,
        source: Serving,
        dispatch: Callable[[Job, Runner], AbstractAsyncContextManager[_Dispatched]],
        stack: AsyncExitStack,
    ) -> None:
        self._job = job
        self._source = source
        self._dispatch = dispatch
        self._stack = stack
        self._now: _Dispatched | None = None

    @property
    def started(self) -> int | None:
        submission = None if self._now is None else self._now.submission
        return None if submission is None else submission.started

    @property
    def ended(self) -> int | None:
        """A job that may be submitted again keeps its place."""
        one = self._now
        if one is None or one.submission is None or one.submission.ended is None:
            return None
        if not one.began and one.runner.status().state == "failed":
            return None
        return one.submission.ended

    def keep(self, tokens: int) -> None:
        assert self._now is not None
        assert self._now.submission is not None, "nothing is seen of a job before it is submitted"
        self._now.submission.keep(tokens)

    async def enter(self, lost: Runner | None = None) -> None:
        """Submits the job, to another runner than the one that was lost. Raises as `Runner.submit`
        does, and what keeps the model from being loaded again."""
        while True:
            await self._stack.aclose()
            runner = await self._source.serving(lost)
            one = self._now = await self._stack.enter_async_context(
                self._dispatch(self._job, runner)
            )
            try:
                one.submission = await self._stack.enter_async_context(runner.submit(self._job))
                return
            except AppError:
                if runner.status().state != "failed" or not await one.may_be_submitted_again():
                    raise
                lost = runner

    async def __aiter__(self) -> AsyncIterator[Update]:
        while True:
            one = self._now
            assert one is not None
            assert one.submission is not None
            async for update in one.submission:
                if isinstance(update, Ended):
                    if update.lost and await one.may_be_submitted_again():
                        break
                    one.ended_well = update.reason in ("stop", "length")
                yield update
                if isinstance(update, Ended):
                    return
            await self.enter(one.runner)
