"""Scripted runners: tests decide when they load, answer, fail and stop."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EngineCall,
    EngineStats,
    Job,
    JobUpdate,
    SetSpareMemory,
    Started,
)
from app.core.model_files import ModelFiles
from app.core.models import MemoryRequirement, ServedModel
from app.core.ports import FailureCause, RunnerFailure, RunnerState, RunnerStatus
from app.core.requests import EmbedJob
from app.core.sampling_params import SamplingParams
from app.core.settings import ModelSettings, Settings
from app.runners.pool import ModelPool
from app.runners.restart_policy import RestartPolicy
from tests.batches import flatten

PATIENCE = 30.0

# concurrent jobs of a runner
SLOTS = 2

CRASHED = "the engine stopped: it crashed"

# short enough for tests, long enough to be observed on a busy machine
QUICK = RestartPolicy(
    initial_delay=0.01, max_delay=0.02, healthy_after=60.0, max_load_failures=3, refuse_for=0.5
)


@dataclass
class RunnerScript:
    """The script of all runners of a test, by model. requirements: with the free memory of the
    device as budget. load_errors, estimate_errors: one for each load or estimate. gates: loads and
    estimates wait for them. may_end: while it is not set, jobs do not end."""

    requirements: dict[str, MemoryRequirement] = field(default_factory=dict)
    load_errors: dict[str, list[Exception]] = field(default_factory=dict)
    estimate_errors: dict[str, list[Exception]] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    file_errors: dict[str, Exception] = field(default_factory=dict)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    runners: "list[ScriptedRunner]" = field(default_factory=list)
    estimated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_end.set()

    def make(self, settings: Settings) -> "ScriptedRunner":
        runner = ScriptedRunner(self, settings)
        self.runners.append(runner)
        return runner

    async def files(self, model: ServedModel) -> ModelFiles:
        if error := self.file_errors.get(model.name):
            raise error
        return files(model.name)

    async def estimate(self, files: ModelFiles, settings: Settings, held: int) -> MemoryRequirement:
        self.estimated.append(files.name)
        if gate := self.gates.get(f"estimate of {files.name}"):
            await gate.wait()
        if errors := self.estimate_errors.get(files.name):
            raise errors.pop(0)
        found = self.requirements[files.name]
        return replace(found, device_budget=found.device_budget + held)

    @property
    def loads(self) -> list[str]:
        """Models in the order of their loads."""
        return [runner.name for runner in self.runners if runner.name]

    @property
    def loaded(self) -> list[str]:
        """Models that are loading, loaded or unloading."""
        return [runner.name for runner in self.runners if runner.name and not runner.stopped]

    def runner_of(self, name: str) -> "ScriptedRunner":
        """The last runner of a model."""
        return next(runner for runner in reversed(self.runners) if runner.name == name)


class ScriptedRunner:
    """Implements `Runner`."""

    def __init__(self, script: RunnerScript, settings: Settings) -> None:
        self.script = script
        self.settings = settings
        self.name = ""
        self.state: RunnerState = "loading"
        self.stats = EngineStats()
        self.jobs: list[Job] = []
        self.spare_memory: list[int] = []  # what the pool has set
        self.spare_in_use = 0
        self.max_running = self.num_running = 0
        self.stopped = False
        self.slow_stop: asyncio.Event | None = None
        self.slots = asyncio.Semaphore(SLOTS)
        self.hung = asyncio.Event()
        self._failure: asyncio.Future[RunnerFailure] = asyncio.get_running_loop().create_future()

    async def start(self, files: ModelFiles) -> None:
        self.name = files.name
        if gate := self.script.gates.get(files.name):
            await gate.wait()
        if load_errors := self.script.load_errors.get(files.name):
            raise load_errors.pop(0)
        self.state = "ready"

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator["ScriptedSubmission"]:
        if self.state != "ready":
            raise AppError(ErrorKind.ENGINE, "the engine is not running")
        self.jobs.append(job)
        self.num_running += 1
        self.max_running = max(self.num_running, self.max_running)
        submission = ScriptedSubmission(self, job)
        try:
            yield submission
        finally:
            submission.cancel()
            self.num_running -= 1

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        async with self.submit(job) as submission:  # pyright: ignore[reportArgumentType]
            ended = [update async for update in flatten(submission)][-1]
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
                parallel=SLOTS, context_length=64, kv_budget=1, kv_bytes_per_sequence=1
            ),
            pid=7,
        )

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        assert isinstance(call, SetSpareMemory), call
        if (gate := self.script.gates.get(f"spare memory of {self.name}")) is not None:
            await gate.wait()
        self.spare_memory.append(call.num_bytes)
        return cast("CallResult", max(call.num_bytes, self.spare_in_use))

    async def wait_for_failure(self) -> RunnerFailure:
        return await asyncio.shield(self._failure)

    async def stop(self) -> None:
        self.state = "failed"
        if not self._failure.done():
            self._failure.cancel()
        if self.slow_stop is not None:
            await self.slow_stop.wait()
        self.stopped = True

    def fail(
        self,
        message: str = "it crashed",
        *,
        cause: FailureCause = "fault",
        not_received: Iterable[str] = (),
        stuck_since_ns: int | None = None,
    ) -> None:
        self.state = "failed"
        self._failure.set_result(
            RunnerFailure(
                message=message,
                cause=cause,
                not_received=frozenset(not_received),
                stuck_since_ns=stuck_since_ns,
            )
        )

    @property
    def failure(self) -> asyncio.Future[RunnerFailure]:
        return self._failure


class ScriptedSubmission:
    """Implements `Submission`: a job that starts when a slot is free, and ends when the script
    allows it, or when the runner fails."""

    def __init__(self, runner: ScriptedRunner, job: Job) -> None:
        self._runner = runner
        self._job = job
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self._updates: asyncio.Queue[JobUpdate] = asyncio.Queue()
        self._running = asyncio.create_task(self._run())

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        pass

    def cancel(self) -> None:
        self._running.cancel()

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        while True:
            update = await self._updates.get()
            yield [update]
            if isinstance(update, Ended):
                return

    async def _run(self) -> None:
        run = asyncio.create_task(self._run_job())
        try:
            await asyncio.wait({run, self._runner.failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.cancel()
        self.ended_ns = now = time.monotonic_ns()
        if self._runner.failure.done() and not self._runner.failure.cancelled():
            self._put(
                Ended(
                    job_id=self._job.id,
                    reason="error",
                    timestamp_ns=now,
                    error=CRASHED,
                    engine_lost=True,
                )
            )
        else:
            self._put(Ended(job_id=self._job.id, reason="stop", timestamp_ns=now))

    async def _run_job(self) -> None:
        if self._runner.hung.is_set():
            await asyncio.Event().wait()
        async with self._runner.slots:
            self.started_ns = time.monotonic_ns()
            self._put(Started(job_id=self._job.id, cached_tokens=0, timestamp_ns=self.started_ns))
            await self._runner.script.may_end.wait()

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


def make_model(
    name: str, *, max_queue: int = 64, memory: int | None = None, **changes: Any
) -> ServedModel:
    """A model that is never unloaded when idle."""
    settings = Settings(models=(ModelSettings(name=name, memory=memory),), max_queue=max_queue)
    defaults: dict[str, Any] = {"source": name, "settings": settings, "keep_alive": math.inf}
    return ServedModel(name=name, **{**defaults, **changes})


def make_requirement(
    minimum: int, preferred: int | None = None, budget: int = 0
) -> MemoryRequirement:
    return MemoryRequirement(
        min_bytes=minimum,
        preferred_bytes=minimum if preferred is None else preferred,
        device_budget=budget,
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
async def run_pool(
    script: RunnerScript, *, total: int | None = 10, **options: Any
) -> AsyncGenerator[ModelPool]:
    """A started pool of several models, with the requirements of the script."""
    pool = ModelPool(
        script.make,
        script.files,
        script.estimate,
        total_bytes=total,
        restart_policy=QUICK,
        **options,
    )
    await pool.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield pool
    finally:
        script.may_end.set()
        for runner in script.runners:
            if runner.slow_stop is not None:
                runner.slow_stop.set()
        await pool.stop()
    assert script.loaded == [], "a runner is still loaded"


async def settle() -> None:
    """Let all ready tasks run."""
    for _ in range(20):
        await asyncio.sleep(0)
