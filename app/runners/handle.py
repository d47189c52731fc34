"""The handle of one model. It exists for the lifetime of the server, while its runners may be
replaced.

Knows: the current runner, if any, the requests waiting for the model, past failures, accumulated
counters of all runners. Must not know: other models, the eviction policy. All code runs on the
event loop.
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

from msgspec import structs

from app.core.errors import AppError, ErrorKind, redact_paths
from app.core.events import ModelLoading
from app.core.jobs import (
    CacheMissReason,
    CallResult,
    Capacity,
    EngineCall,
    EngineStats,
    GetPrefixSnapshot,
    Job,
    PrefixSnapshot,
    SetSpareMemory,
)
from app.core.model_files import ModelFiles
from app.core.models import MemoryRequirement, ModelPhase, ModelState, ServedModel
from app.core.ports import ReservedSlots, Runner, RunnerFailure, RunnerStatus, Submission
from app.core.requests import EmbedJob
from app.core.units import format_memory
from app.runners.admission import Admission, ModelLeases, copy_error
from app.runners.eviction import LoadedModel
from app.runners.quarantine import CrashQuarantine
from app.runners.restart_policy import (
    RUNNER_CRASHED,
    RestartPolicy,
    RestartState,
    after_crash,
    after_failed_load,
    after_load,
)
from app.runners.snapshot_refresh import SnapshotRefresh

log = logging.getLogger(__name__)

_COUNTERS = (
    "cached_tokens",
    "prefix_query_tokens",
    "prefilled_tokens",
    "generated_tokens",
    "embedded_tokens",
    "prefix_evictions",
    "preemptions",
    "failures",
    "images_encoded",
    "image_cache_hits",
    "steps",
)

# The Retry-After value in seconds if a model did not load in time.
_LOADING_RETRY_AFTER = 10


def accumulate_stats(previous: EngineStats, current: EngineStats) -> EngineStats:
    """Returns `current` with the counters of `previous` added."""
    if previous.steps == 0:
        return current
    misses: dict[CacheMissReason, int] = dict(previous.prefix_miss_counts)
    for reason, count in current.prefix_miss_counts:
        misses[reason] = misses.get(reason, 0) + count
    return structs.replace(
        current,
        **{name: getattr(previous, name) + getattr(current, name) for name in _COUNTERS},
        prefix_hit_counts=tuple(
            map(sum, zip(previous.prefix_hit_counts, current.prefix_hit_counts, strict=True))
        ),
        prefix_miss_counts=tuple(misses.items()),
    )


def counters_only(stats: EngineStats) -> EngineStats:
    """Returns the counters of `stats` without the gauges, for an engine that has exited."""
    return accumulate_stats(stats, EngineStats())


class ModelHandle:
    """Implements `Engine`. Public attributes are read and set by the pool.

    phase: the phase of the runner; "out" if there is none.
    capacity: the capacity of the engine while it is ready, otherwise None.
    allocation: the memory budget of the model in bytes.
    spare_bytes: the bytes that its cached prefixes may be using in addition.
    requirement: the estimated memory requirement of the model.
    keep_alive: the keep-alive in seconds; see `set_keep_alive`.
    last_used: the time at which a request last started or ended.
    keep_loaded: whether to keep it loaded without requests.
    unload_requested: whether to unload it after its running requests.
    draining: whether it is being drained, because another model needs its memory.
    would_have_expired: the time at which the keep-alive of an evicted model would have expired. For
        other models, it is in the past.
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        clock: Callable[[], float],
        restart_policy: RestartPolicy,
        notify_pool: Callable[[], None],
    ) -> None:
        """Creates the handle. `notify_pool` is called when the model becomes ready."""
        self.served = served
        self.files: ModelFiles | None = None
        self.phase: Literal["out", "loading", "ready", "leaving"] = "out"
        self.allocation: int | None = None
        self.spare_bytes = self._desired_spare_bytes = 0
        self._spare_memory_task: asyncio.Task[None] | None = None
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
        self._quarantine = CrashQuarantine(served, self.get_runner, clock)
        self._admission = Admission(self, served.settings.max_queue)
        self._runner: Runner | None = None
        self._snapshots: SnapshotRefresh | None = None
        self.capacity: Capacity | None = None
        self._previous_stats = EngineStats()
        self._rejected = 0
        self._restarts = self._loads = self._evictions = 0
        self._failed_since_ready = False  # whether it has failed since it was last ready

    # for generation

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

    def get_prefix_snapshot(self) -> PrefixSnapshot | None:
        """Implements `Models.get_prefix_snapshot`."""
        runner = self._ready_runner()
        if runner is None:
            return None
        if self._snapshots is None:
            self._snapshots = SnapshotRefresh(lambda: runner.call(GetPrefixSnapshot()))
        return self._snapshots.get()

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        """Calls the engine, for callers that hold a lease. Raises AppError."""
        with self._redacting_errors():
            runner = await self.get_runner()
            reply = await runner.call(call)
            if runner is self._runner:
                self.capacity = runner.status().capacity
            return reply

    async def get_runner(self, lost_runner: Runner | None = None) -> Runner:
        """Returns the runner when it is ready, and is not `lost_runner`, for requests that hold a
        lease. The lease makes the pool reload the model."""
        try:
            async with asyncio.timeout(self.served.settings.load_wait):
                while (runner := self._ready_runner()) is None or runner is lost_runner:
                    await self.leases.wait_until_ready(self._clock())
                return runner
        except TimeoutError:
            message = f"{self.served.name} is still being reloaded: try again"
            raise AppError(ErrorKind.LOADING, message, retry_after=_LOADING_RETRY_AFTER) from None

    def _ready_runner(self) -> Runner | None:
        """Returns the runner if it is ready, otherwise None. A failed runner is not ready, even if
        the failure has not been handled yet."""
        runner = self._runner
        if runner is None or self.phase != "ready" or runner.status().state == "failed":
            return None
        return runner

    # for the pool

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes held by the runner's allocator, as last reported."""
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
            # a waiting request is about to use the model
            expires_at=self.expires_at() if self.leases.waiting_since is None else math.inf,
            has_demand=self.has_demand,
            pinned=self.served.pinned,
            unload_requested=self.unload_requested,
            draining=self.draining,
            spare_bytes=self.spare_bytes,
            max_bytes=next((model.memory for model in self.served.settings.models), None),
        )

    def apply(self, served: ServedModel) -> None:
        """Applies new limits, and the keep-alive if it has changed."""
        if served.keep_alive != self.served.keep_alive:
            self.keep_alive = self._min_keep_alive = served.keep_alive
        self.served = served
        self._admission.max_queue = served.settings.max_queue

    def expires_at(self) -> float:
        """Returns the time at which the model may be unloaded if it is idle."""
        return self.last_used + self.keep_alive

    def set_keep_alive(self, seconds: float, *, admin: bool) -> None:
        """Sets the keep-alive requested by a client.

        An admin's value replaces the operator's value until the model is unloaded. Other callers
        can only extend the keep-alive. An extension is harmless, because the model is still evicted
        when another model needs its memory. A shorter keep-alive would unload the model for all
        other users.
        """
        if admin:
            self._min_keep_alive = seconds
        self.keep_alive = max(seconds, self._min_keep_alive)

    def set_spare_memory(self, num_bytes: int) -> None:
        """Starts to set the memory that cached prefixes may use in addition to the allocation.
        Until the engine has replied, `spare_bytes` is the larger of the old and new value. If it is
        still too large then, because requests use it, call this method again when one has ended."""
        self._desired_spare_bytes = num_bytes
        runner = self._ready_runner()
        if runner is None or self._spare_memory_task or num_bytes == self.spare_bytes:
            return
        self.spare_bytes = max(self.spare_bytes, num_bytes)
        self._spare_memory_task = asyncio.create_task(self._set_spare_memory(runner, num_bytes))

    async def _set_spare_memory(self, runner: Runner, num_bytes: int) -> None:
        try:
            now = await runner.call(SetSpareMemory(num_bytes=num_bytes))
        except AppError:
            return  # the runner is ending, which frees all of its memory
        finally:
            self._spare_memory_task = None
        changed, self.spare_bytes = now != self.spare_bytes, now
        if changed or num_bytes != self._desired_spare_bytes:
            self._notify_pool()

    def count_rejected(self) -> None:
        """Counts a request that was rejected because the queue was full."""
        self._rejected += 1

    def grant_leases(self) -> bool:
        """Grants a lease to all waiting requests. Returns whether there were any."""
        now = self._clock()
        granted = self.leases.grant(now)
        if granted:
            self.last_used = now
        return granted

    def reset_backoff(self) -> None:
        """Allows an immediate load, as if there had been no recent failures."""
        self.restart_state = replace(self.restart_state, load_failures=0, not_before=self._clock())

    def fail_load(self, error: AppError) -> None:
        """Records that the model could not be loaded. Fails the waiting requests with the error,
        unless a process crashed. After a crash, the requests keep waiting while the load is
        retried, because the next load may succeed."""
        error, now = self._redact(error), self._clock()
        self.restart_state = after_failed_load(self.restart_state, now, error, self._restart_policy)
        if error.code != RUNNER_CRASHED:
            self.leases.fail_waiting(error)
        elif self.restart_state.is_refused(now, self._restart_policy):
            retry_after = math.ceil(self.restart_state.not_before - now)
            self.leases.fail_waiting(copy_error(error, retry_after))

    def forget_crashes(self) -> None:
        """Clears the records of prompts that were running when the model crashed."""
        self._quarantine.forget_crashes()

    async def run(self, runner: Runner, files: ModelFiles, allocation: int | None) -> None:
        """Loads the model, serves requests until the runner fails or this call is cancelled, and
        stops the runner. `allocation` is the memory budget in bytes; None means all memory."""
        self._runner, self.files, self.allocation, self.phase = runner, files, allocation, "loading"
        self._restarts += self._failed_since_ready
        try:
            began = self._clock()
            await runner.start(files)
            self._on_ready(began)
            since = self._clock()
            loss = await runner.wait_for_failure()
            self._on_runner_lost(loss, self._clock() - since)
        except Exception as error:  # a failure of one model must not affect other models
            self._on_load_failed(error)
        finally:
            self.phase = "leaving"
            if self._snapshots is not None:
                self._snapshots.cancel()
                self._snapshots = None
            if self._spare_memory_task is not None:
                self._spare_memory_task.cancel()
            try:
                await runner.stop()
            except Exception:
                log.exception("stopping the runner of %s failed", self.served.name)

    def mark_unloaded(self) -> None:
        """Resets the handle. Must be called when the task of `run` has ended, even if it never
        started."""
        if self._runner is not None:
            self._previous_stats = counters_only(self.status().stats)
        self.would_have_expired = 0.0 if self.unload_requested else self.expires_at()
        # Failures, requested unloads and unloads of a model that was never ready do not count as
        # evictions.
        self._evictions += self.capacity is not None and not (
            self._failed_since_ready or self.would_have_expired <= self._clock()
        )
        if not self._failed_since_ready:
            self.keep_alive = self._min_keep_alive = self.served.keep_alive
        self._runner = self.capacity = self.allocation = None
        self.spare_bytes = self._desired_spare_bytes = 0
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
            kv_dtype=None if capacity is None else capacity.kv_dtype,
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
        ledger = self._runner.status().stats.ledger
        log.info(
            "%s is ready after %.1f s (context %d tokens, up to %s for cached prefixes, %.0f %% of "
            "the KV cache memory)",
            self.served.name,
            now - started_at,
            context,
            format_memory(ledger.prefix_limit),
            100 * ledger.prefix_share,
        )
        # These requests are served even if an unload was requested during the load, because they
        # arrived earlier.
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
        self._quarantine.record_crash(parallel, stats, loss)

    def _redact(self, error: AppError) -> AppError:
        source = self.served.source
        folder = Path(source).expanduser() if source else None
        return redact_paths(error, self.files.path if self.files else folder, self.served.name)

    def _redact_text(self, message: str) -> str:
        return self._redact(AppError(ErrorKind.ENGINE, message)).message

    @contextmanager
    def _redacting_errors(self) -> Generator[None]:
        """Removes paths from the runner's errors. The log still contains the paths. Request errors
        are left unchanged, because they quote client text, which may look like a path."""
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
        self._failed_since_ready = True
        name = self.served.name
        if not isinstance(error, AppError):
            log.error("%s could not be loaded", name, exc_info=error)
            error = AppError(ErrorKind.MODEL_FILES, f"{name} could not be loaded: {error}")
        else:
            log.error("%s", error.message)
        self.fail_load(error)
