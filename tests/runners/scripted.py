"""Runners that do as they are told: they load, answer, break and end when a test says so."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, Ended, EngineStats, Job, JobUpdate, Started
from app.core.model_files import ModelFiles
from app.core.model_state import MemoryRequirement, ServedModel
from app.core.ports import FailureCause, RunnerFailure, RunnerState, RunnerStatus
from app.core.sampling_params import SamplingParams
from app.core.settings import ModelSettings, Settings
from app.runners.pool import ModelPool
from app.runners.restart_policy import RestartPolicy

PATIENCE = 5.0

# Jobs that a runner runs at once.
PLACES = 2

CRASHED = "the engine stopped: it crashed"

# so short that a test need not wait, so long that a busy machine does not pass them unseen
QUICK = RestartPolicy(
    initial_delay=0.01, max_delay=0.02, healthy_after=60.0, max_load_failures=3, refuse_for=0.5
)


@dataclass
class House:
    """What all runners of a test look at. needs (whose budget is what the device has free),
    problems (errors that loads end with, one each), gates (what loads, and answers of what a model
    needs, wait for): by model. hold: while it is not set, jobs do not end."""

    needs: dict[str, MemoryRequirement] = field(default_factory=dict)
    problems: dict[str, list[Exception]] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    unreadable: dict[str, Exception] = field(default_factory=dict)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    runners: "list[Scripted]" = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hold.set()

    def make(self, settings: Settings) -> "Scripted":
        runner = Scripted(self, settings)
        self.runners.append(runner)
        return runner

    async def files(self, served: ServedModel) -> ModelFiles:
        if error := self.unreadable.get(served.name):
            raise error
        return files(served.name)

    async def need(self, files: ModelFiles, settings: Settings, held: int) -> MemoryRequirement:
        self.asked.append(files.name)
        if gate := self.gates.get(f"need of {files.name}"):
            await gate.wait()
        found = self.needs[files.name]
        return replace(found, device_budget=found.device_budget + held)

    @property
    def loads(self) -> list[str]:
        """In the order in which they began."""
        return [runner.name for runner in self.runners if runner.name]

    @property
    def here(self) -> list[str]:
        """Models in memory, or on their way in or out."""
        return [runner.name for runner in self.runners if runner.name and not runner.stopped]

    def of(self, name: str) -> "Scripted":
        """Its last runner."""
        return next(runner for runner in reversed(self.runners) if runner.name == name)


class Scripted:
    """Implements `Runner`."""

    def __init__(self, house: House, settings: Settings) -> None:
        self.house = house
        self.settings = settings
        self.name = ""
        self.state: RunnerState = "loading"
        self.stats = EngineStats()
        self.jobs: list[Job] = []
        self.most_at_once = self.at_once = 0
        self.stopped = False
        self.slow_stop: asyncio.Event | None = None
        self.places = asyncio.Semaphore(PLACES)
        self._lost: asyncio.Future[RunnerFailure] = asyncio.get_running_loop().create_future()

    async def start(self, files: ModelFiles) -> None:
        self.name = files.name
        if gate := self.house.gates.get(files.name):
            await gate.wait()
        if problems := self.house.problems.get(files.name):
            raise problems.pop(0)
        self.state = "ready"

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator["Going"]:
        if self.state != "ready":
            raise AppError(ErrorKind.ENGINE, "the engine is not running")
        self.jobs.append(job)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        going = Going(self, job)
        try:
            yield going
        finally:
            going.leave()
            self.at_once -= 1

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        async with self.submit(job) as going:  # pyright: ignore[reportArgumentType]
            ended = [update async for update in going][-1]
        assert isinstance(ended, Ended)
        if ended.reason == "error":
            raise AppError(ErrorKind.ENGINE, ended.error or "")
        return [b""] * len(job.inputs)

    def status(self) -> RunnerStatus:
        return RunnerStatus(
            state=self.state,
            progress=40 if self.state == "loading" else 100,
            stats=self.stats,
            error="the engine was stopped" if self.state == "failed" else None,
            capacity=Capacity(
                parallel=PLACES, context_length=64, kv_budget=1, kv_bytes_per_sequence=1
            ),
            pid=7,
        )

    async def wait_for_failure(self) -> RunnerFailure:
        return await asyncio.shield(self._lost)

    async def stop(self) -> None:
        self.state = "failed"
        if not self._lost.done():
            self._lost.cancel()
        if self.slow_stop is not None:
            await self.slow_stop.wait()
        self.stopped = True

    def die(self, why: str = "it crashed", *, cause: FailureCause = "fault") -> None:
        self.state = "failed"
        self._lost.set_result(RunnerFailure(message=why, cause=cause))

    @property
    def dead(self) -> asyncio.Future[RunnerFailure]:
        return self._lost


class Going:
    """Implements `Submission`: a job that starts when a place is free, and ends when the house lets
    jobs end, or when the runner dies."""

    def __init__(self, runner: Scripted, job: Job) -> None:
        self._runner = runner
        self._job = job
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self._updates: asyncio.Queue[JobUpdate] = asyncio.Queue()
        self._running = asyncio.create_task(self._run())

    def limit_cached_tokens(self, tokens: int) -> None:
        pass

    def leave(self) -> None:
        self._running.cancel()

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        while True:
            update = await self._updates.get()
            yield update
            if isinstance(update, Ended):
                return

    async def _run(self) -> None:
        playing = asyncio.create_task(self._play())
        try:
            await asyncio.wait({playing, self._runner.dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            playing.cancel()
        self.ended_ns = at = time.monotonic_ns()
        if self._runner.dead.done() and not self._runner.dead.cancelled():
            self._put(
                Ended(
                    job_id=self._job.id,
                    reason="error",
                    timestamp_ns=at,
                    error=CRASHED,
                    engine_lost=True,
                )
            )
        else:
            self._put(Ended(job_id=self._job.id, reason="stop", timestamp_ns=at))

    async def _play(self) -> None:
        async with self._runner.places:
            self.started_ns = time.monotonic_ns()
            self._put(Started(job_id=self._job.id, cached_tokens=0, timestamp_ns=self.started_ns))
            await self._runner.house.hold.wait()

    def _put(self, update: JobUpdate) -> None:
        self._updates.put_nowait(update)


def files(name: str) -> ModelFiles:
    return ModelFiles(
        name=name,
        path=Path(name),
        config={"max_position_embeddings": 64, "vocab_size": 9},
        shards=(),
        tokenizer_path=Path(name),
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        created=0,
    )


def served(
    name: str, *, max_queue: int = 64, memory: int | None = None, **changes: Any
) -> ServedModel:
    """Stays for ever."""
    settings = Settings(models=(ModelSettings(name=name, memory=memory),), max_queue=max_queue)
    whole: dict[str, Any] = {"source": name, "settings": settings, "keep_alive": math.inf}
    return ServedModel(name=name, **{**whole, **changes})


def need(least: int, wanted: int | None = None, budget: int = 0) -> MemoryRequirement:
    return MemoryRequirement(
        min_bytes=least, preferred_bytes=least if wanted is None else wanted, device_budget=budget
    )


def job(name: str, *ids: int) -> Job:
    return Job(
        id=name,
        prompt_token_ids=ids or (1,),
        sampling=SamplingParams(),
        max_tokens=1,
        stop_token_ids=frozenset({0}),
    )


@asynccontextmanager
async def pooled(
    house: House, *, total: int | None = 10, **options: Any
) -> AsyncGenerator[ModelPool]:
    """A started pool of several models, each of which needs what the house says."""
    pool = ModelPool(
        house.make, house.files, house.need, total_bytes=total, restart_policy=QUICK, **options
    )
    await pool.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield pool
    finally:
        house.hold.set()
        for runner in house.runners:
            if runner.slow_stop is not None:
                runner.slow_stop.set()
        await pool.stop()
    assert house.here == [], "nobody is left"


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.002)


async def settled() -> None:
    """Whatever could happen by now has happened."""
    for _ in range(20):
        await asyncio.sleep(0)
