"""One model as long as the server lives: the runners behind it come and go.

Knows: its runner, if it has one now, who waits for it, how it fared. Must not know: other models,
when it is loaded or evicted: the pool says so. Everything here runs on the event loop.

What several lives of an engine came to.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind, redact_paths
from app.core.events import ModelLoading
from app.core.jobs import CacheMissReason, Capacity, EngineStats, Job
from app.core.model_files import ModelFiles
from app.core.model_state import MemoryRequirement, ModelPhase, ModelState, ServedModel
from app.core.ports import ReservedSlots, Runner, RunnerFailure, RunnerStatus, Submission
from app.runners.admission import Admission
from app.runners.eviction import LoadedModel
from app.runners.lease import ModelLeases
from app.runners.quarantine import CrashQuarantine
from app.runners.restart_policy import (
    RUNNER_CRASHED,
    RestartPolicy,
    RestartState,
    after_crash,
    after_failed_load,
    after_load,
)

_COUNTERS = (
    "cached_tokens",
    "looked_up_tokens",
    "prefilled_tokens",
    "generated_tokens",
    "embedded_tokens",
    "evictions",
    "preemptions",
    "failures",
    "steps",
)


def accumulate_stats(previous: EngineStats, current: EngineStats) -> EngineStats:
    """now, with what was counted before it."""
    if previous.steps == 0:
        return current
    misses: dict[CacheMissReason, int] = dict(previous.prefix_miss_counts)
    for reason, count in current.prefix_miss_counts:
        misses[reason] = misses.get(reason, 0) + count
    return replace(
        current,
        **{name: getattr(previous, name) + getattr(current, name) for name in _COUNTERS},
        prefix_hit_counts=tuple(
            map(sum, zip(previous.prefix_hit_counts, current.prefix_hit_counts, strict=True))
        ),
        prefix_miss_counts=tuple(misses.items()),
    )


def counters_only(stats: EngineStats) -> EngineStats:
    """What is left of an engine's figures when it is gone."""
    return accumulate_stats(stats, EngineStats())


log = logging.getLogger(__name__)

# Seconds after which a client is asked to come again that waited for a model in vain.
_LOADING_RETRY_AFTER = 10


class ModelHandle:
    """Implements `Engine`, and `app.runners.quarantine.RunnerSource`. What the pool decides by and
    sets is public.

    phase: of its runner; "out" is none. capacity: while it is ready. allocation, requirement:
    bytes, see `AccessLevel`. keep_alive: seconds that it stays without requests; see
    `set_keep_alive`. last_used: when a request last began or ended to hold it. keep_loaded: it is
    to be here also while nobody asks. unload_requested: it was asked to go. draining: it takes no
    new requests, because others need its room. would_have_expired: when it would have gone, had it
    been let; in the past for one that was not driven out."""

    def __init__(
        self,
        served: ServedModel,
        *,
        clock: Callable[[], float],
        restart_policy: RestartPolicy,
        notify_pool: Callable[[], None],
    ) -> None:
        """notify_pool: called when it became ready."""
        self.served = served
        self.files: ModelFiles | None = None
        self.phase: Literal["out", "loading", "ready", "leaving"] = "out"
        self.allocation: int | None = None
        self.requirement: MemoryRequirement | None = None
        self.keep_alive = self._min_keep_alive = served.keep_alive
        self.last_used = clock()
        self.would_have_expired = 0.0
        self.keep_loaded = self.unload_requested = self.draining = False
        self.restart_state = RestartState()
        self.leases = ModelLeases(self._loading_event)
        self._notify_pool = notify_pool
        self._clock = clock
        self._restart_policy = restart_policy
        self._quarantine = CrashQuarantine(served, self, clock)
        self._admission = Admission(self, served.settings.max_queue)
        self._runner: Runner | None = None
        self.capacity: Capacity | None = None
        self._previous_stats = EngineStats()
        self._rejected = 0
        self._restarts = self._loads = self._evictions = 0
        self._failed_since_ready = False  # since it was last ready

    # what generation asks for

    def reserve(self, count: int = 1) -> AbstractContextManager[ReservedSlots]:
        return self._admission.reserve(count)

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        with self._redacting_errors():
            async with self._quarantine.submit(job) as submission:
                yield submission

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        with self._redacting_errors():
            return await self._quarantine.embed(job)

    def status(self) -> RunnerStatus:
        if self._runner is None:
            error = self.restart_state.error
            return RunnerStatus(
                state="loading" if error is None else "failed",
                progress=0,
                stats=self._previous_stats,
                error=None if error is None else error.message,
                rejected=self._rejected + self._admission.rejected,
            )
        now = self._runner.status()
        return replace(
            now,
            stats=accumulate_stats(self._previous_stats, now.stats),
            rejected=self._rejected + self._admission.rejected,
            preparing=self._admission.preparing,
            error=None if now.error is None else self._redact_text(now.error),
        )

    async def get_runner(self, lost_runner: Runner | None = None) -> Runner:
        """`RunnerSource.get_runner`: for requests that hold a lease, so that the model is loaded
        again."""
        try:
            async with asyncio.timeout(self.served.settings.load_wait):
                while (runner := self._ready_runner()) is None or runner is lost_runner:
                    await self.leases.wait_until_ready(self._clock())
                return runner
        except TimeoutError:
            message = f"{self.served.name} is still being reloaded, try again"
            raise AppError(ErrorKind.LOADING, message, retry_after=_LOADING_RETRY_AFTER) from None

    def _ready_runner(self) -> Runner | None:
        """None also while it was not noticed yet that a runner was lost."""
        runner = self._runner
        if runner is None or self.phase != "ready" or runner.status().state == "failed":
            return None
        return runner

    # what the pool asks for

    @property
    def allocated_bytes(self) -> int:
        """By its allocator, as last told."""
        return 0 if self._runner is None else self._runner.status().stats.allocated_bytes

    @property
    def has_demand(self) -> bool:
        return self.keep_loaded or self.leases.waiting_since is not None

    @property
    def accepts_requests(self) -> bool:
        return self.phase == "ready" and not self.draining

    def to_loaded_model(self) -> LoadedModel:
        assert self.phase != "out"
        return LoadedModel(
            name=self.served.name,
            phase=self.phase,
            allocation=self.allocation or 0,
            busy_since=self.leases.held_since,
            last_used=self.last_used,
            # whoever waits for it is about to use it
            expires_at=self.expires_at() if self.leases.waiting_since is None else math.inf,
            has_demand=self.has_demand,
            pinned=self.served.pinned,
            unload_requested=self.unload_requested,
            draining=self.draining,
        )

    def expires_at(self) -> float:
        """When it may go, in case that it is idle then."""
        return self.last_used + self.keep_alive

    def set_keep_alive(self, seconds: float, *, admin: bool) -> None:
        """An admin's word replaces the operator's until the model is gone. Any other caller may
        have the model stay longer than these two say, since it leaves in any case when another one
        needs its room, but not shorter: that would unload it under all who use it."""
        if admin:
            self._min_keep_alive = seconds
        self.keep_alive = max(seconds, self._min_keep_alive)

    def count_rejected(self) -> None:
        """Count a request that was refused because too many wait."""
        self._rejected += 1

    def grant_leases(self) -> bool:
        """To all who wait; whether anybody did."""
        now = self._clock()
        granted = self.leases.grant(now)
        if granted:
            self.last_used = now
        return granted

    def reset_backoff(self) -> None:
        """Try again at once, as if it had not broken lately."""
        self.restart_state = replace(self.restart_state, load_failures=0, not_before=self._clock())

    def fail_load(self, error: AppError) -> None:
        """It cannot be loaded, and nobody tried."""
        error = self._redact(error)
        self.restart_state = after_failed_load(
            self.restart_state, self._clock(), error, self._restart_policy
        )
        self.leases.fail_waiting(error)

    def forget_crashes(self) -> None:
        """Forget which prompts it broke with."""
        self._quarantine.forget_crashes()

    async def run(self, runner: Runner, files: ModelFiles, allocation: int | None) -> None:
        """Loads, serves until the runner breaks or this is cancelled, ends the runner."""
        self._runner, self.files, self.allocation, self.phase = runner, files, allocation, "loading"
        self._restarts += self._failed_since_ready
        try:
            began = self._clock()
            await runner.start(files)
            self._on_ready(began)
            since = self._clock()
            loss = await runner.wait_for_failure()
            self._on_runner_lost(loss, self._clock() - since)
        except Exception as error:  # whatever broke this model, the others go on
            self._on_load_failed(error)
        finally:
            self.phase = "leaving"
            try:
                await runner.stop()
            except Exception:
                log.exception("stopping the runner of %s failed", self.served.name)

    def mark_unloaded(self) -> None:
        """To be said when `live` is over, also if it never began."""
        if self._runner is not None:
            self._previous_stats = counters_only(self.status().stats)
        self.would_have_expired = 0.0 if self.unload_requested else self.expires_at()
        # one that broke, or was asked to go, was not driven out; nor one that had not been here
        self._evictions += self.capacity is not None and not (
            self._failed_since_ready or self.would_have_expired <= self._clock()
        )
        if not self._failed_since_ready:
            self.keep_alive = self._min_keep_alive = self.served.keep_alive
        self._runner = self.capacity = self.allocation = None
        self._quarantine.reset()
        self.phase = "out"
        self.draining = self.unload_requested = False
        self.leases.return_to_waiting(self._clock())

    def state(self) -> ModelState:
        status, now = self.status(), self._clock()
        capacity = status.capacity
        idle = self.phase == "ready" and self.leases.held_since is None
        expires = self.expires_at() - now if idle and not self.served.pinned else math.inf
        return ModelState(
            name=self.served.name,
            phase=self._reported_phase(status, now),
            progress=status.progress if self.phase in ("loading", "ready") else 0,
            stats=status.stats,
            context_length=None if capacity is None else capacity.context_length,
            parallel=None if capacity is None else capacity.parallel,
            leases=len(self.leases),
            preparing=status.preparing,
            compiling=status.compiling,
            rejected=status.rejected,
            pinned=self.served.pinned,
            allocation=self.allocation,
            expires_at=None if expires == math.inf else time.time() + expires,
            loads=self._loads,
            evictions=self._evictions,
            restarts=self._restarts,
            error=self._reported_error(status),
            pid=status.pid,
            backend=None if capacity is None else capacity.backend,
        )

    # private

    def _reported_phase(self, status: RunnerStatus, now: float) -> ModelPhase:
        if self.phase == "out":
            if self.restart_state.is_refused(now, self._restart_policy):
                return "refused"
            if not self.has_demand:
                return "unloaded"
            return "failed" if now < self.restart_state.not_before else "queued"
        if self.phase == "leaving" or (
            self.phase == "ready" and (self.draining or self.unload_requested)
        ):
            return "unloading"
        return "loading" if self.phase == "loading" else status.state

    def _reported_error(self, status: RunnerStatus) -> str | None:
        if self.phase != "leaving":
            return status.error
        error = self.restart_state.error
        return error.message if self._failed_since_ready and error is not None else None

    def _loading_event(self) -> ModelLoading:
        if self.phase == "loading":
            return ModelLoading(progress=self.status().progress)
        return ModelLoading(progress=0, queued=True)

    def _on_ready(self, started_at: float) -> None:
        now = self._clock()
        assert self._runner is not None
        self.capacity = self._runner.status().capacity
        self.phase = "ready"
        self._loads += 1
        self.restart_state = after_load(self.restart_state)
        self.last_used = now
        self._failed_since_ready = False
        self.keep_loaded = self.keep_loaded or self.served.pinned
        context = self.capacity.context_length if self.capacity else 0
        log.info(
            "%s is ready after %.1f s (context %d tokens)",
            self.served.name,
            now - started_at,
            context,
        )
        # also where it was asked to go meanwhile: these came before
        self.grant_leases()
        self._notify_pool()

    def _on_runner_lost(self, loss: RunnerFailure, uptime: float) -> None:
        self._failed_since_ready = True
        error = AppError(ErrorKind.ENGINE, f"{self.served.name} failed: {loss.message}")
        log.error("%s", error.message)
        error = self._redact(error)
        self.restart_state = after_crash(
            self.restart_state, self._clock(), uptime, error, self._restart_policy
        )
        parallel = self.capacity.parallel if self.capacity else 1
        stats = self._runner.status().stats if self._runner else self._previous_stats
        self._quarantine.record_crash(parallel, stats, cause=loss.cause)

    def _redact(self, error: AppError) -> AppError:
        source = self.served.source
        folder = Path(source).expanduser() if source else None
        return redact_paths(error, self.files.path if self.files else folder, self.served.name)

    def _redact_text(self, message: str) -> str:
        return self._redact(AppError(ErrorKind.ENGINE, message)).message

    @contextmanager
    def _redacting_errors(self) -> Generator[None]:
        """What the runner says goes to a client without paths; the log has them. What is wrong with
        a request is the client's own words, some of which look like paths."""
        try:
            yield
        except AppError as error:
            if error.kind not in (ErrorKind.ENGINE, ErrorKind.MODEL_FILES):
                raise
            cleaned = self._redact(error)
            if cleaned.message != error.message:
                log.error("%s: %s", self.served.name, error.message)
            raise cleaned from error

    def _on_load_failed(self, error: Exception) -> None:
        """Whoever waits is told at once what is wrong with the model; a runner that crashed may
        get through the next time, and is waited for as long as it is tried."""
        self._failed_since_ready = True
        name = self.served.name
        if not isinstance(error, AppError):
            log.error("%s could not be loaded", name, exc_info=error)
            error = AppError(ErrorKind.MODEL_FILES, f"{name} could not be loaded: {error}")
        else:
            log.error("%s", error.message)
        error = self._redact(error)
        self.restart_state = after_failed_load(
            self.restart_state, self._clock(), error, self._restart_policy
        )
        if error.code != RUNNER_CRASHED or self.restart_state.is_refused(
            self._clock(), self._restart_policy
        ):
            self.leases.fail_waiting(error)
