"""The model pool: owns all handles, and loads and unloads models according to the policy.

Knows: the policy (`app.runners.eviction`), the runner factory, the memory estimate. Must not know:
HTTP, text, the implementation of runners.

A supervisor task on the event loop computes a plan after each change, and starts the actions of the
plan. Each model has its own task, which loads, watches and stops its runner (`ModelHandle.run`), so
that models do not block each other.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, PrefixSnapshot
from app.core.model_files import ModelFiles
from app.core.models import ModelState, ServedModel
from app.core.ports import Runner
from app.core.settings import Settings
from app.runners.admission import ModelLease, build_busy_error, build_stopping_error, copy_error
from app.runners.eviction import Evict, Load, LoadRequest, PoolLimits, RejectLoad, SkipPreload, plan
from app.runners.handle import ModelHandle
from app.runners.preflight import EstimateMemory, Preflight
from app.runners.restart_policy import RestartPolicy

log = logging.getLogger(__name__)

# The delay in seconds before the next plan after a failed one, which is always due to a bug.
_PLAN_RETRY_DELAY = 1.0


class ModelPool:
    """Loads and unloads models.

    make_runner: creates a runner from settings, with the model's allocation as `memory`.
    read_files: reads and checks the files of a model.
    estimate_memory: estimates the memory requirement of a model while no model is being loaded.
        None for a server with one model, which may use all the memory in its settings.
    total_bytes: the memory budget for all models; None for the device's memory.
    max_loaded: the maximum number of loaded models.
    on_unloaded: called when the runner of a model has stopped.
    """

    on_unloaded: Callable[[ServedModel], None]

    def __init__(
        self,
        make_runner: Callable[[Settings], Runner],
        read_files: Callable[[ServedModel], Awaitable[ModelFiles]],
        estimate_memory: EstimateMemory | None = None,
        *,
        total_bytes: int | None = None,
        max_loaded: int | None = None,
        restart_policy: RestartPolicy | None = None,
    ) -> None:
        self.on_unloaded = lambda _: None
        self._make_runner = make_runner
        self._total_bytes = total_bytes
        self._max_loaded = max_loaded
        self._restart_policy = restart_policy or RestartPolicy()
        self._clock = time.monotonic
        self._handles: dict[str, ModelHandle] = {}
        # the models of the last reload, because a request may have been resolved before it
        self._reloaded: dict[str, ServedModel] = {}
        self._retired: set[str] = set()
        self._run_tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._lease_released = asyncio.Event()
        self._preflight = Preflight(read_files, estimate_memory, total_bytes, self._changed.set)
        self._supervisor_task: asyncio.Task[None] | None = None
        self._stopping = False

    # for serving requests

    def get_handle(self, served: ServedModel) -> ModelHandle:
        """Returns the handle of the model. Every call returns the same object."""
        served = self._reloaded.get(served.name, served)
        handle = self._handles.get(served.name)
        if handle is None:
            handle = ModelHandle(
                served,
                clock=self._clock,
                restart_policy=self._restart_policy,
                notify_pool=self._changed.set,
            )
            self._handles[served.name] = handle
        handle.served = served
        return handle

    @asynccontextmanager
    async def lease(self, served: ServedModel) -> AsyncGenerator[ModelLease]:
        """Yields a lease of the model. Entering the context does not wait, so the lease may still
        be waiting."""
        handle, now = self.get_handle(served), self._clock()
        waiting = handle.leases.num_waiting
        lease = handle.leases.add(now)
        if self._stopping:
            lease.fail(build_stopping_error())
        elif handle.accepts_requests:
            handle.grant_leases()
        elif lease.is_held:
            pass  # it replaced a placeholder that holds the model, so there is no wait
        elif (error := handle.restart_state.error) and handle.restart_state.is_refused(
            now, self._restart_policy
        ):
            lease.fail(copy_error(error, math.ceil(handle.restart_state.not_before - now)))
        elif waiting >= max(1, handle.served.settings.max_queue):  # one request may always wait
            handle.count_rejected()
            lease.fail(build_busy_error(served.name, waiting))
        else:
            self._changed.set()
        try:
            yield lease
        except AppError as error:
            handle.leases.keep_place(lease, error, self._clock())
            raise
        finally:
            if lease.is_held:
                handle.last_used = self._clock()
            handle.leases.release(lease)
            self._lease_released.set()
            self._changed.set()

    def set_keep_alive(self, served: ServedModel, seconds: float, *, admin: bool) -> None:
        """Sets the keep-alive of an accepted request, in seconds. `admin`: whether the caller may
        manage models; see `ModelHandle.set_keep_alive`."""
        self.get_handle(served).set_keep_alive(seconds, admin=admin)
        self._changed.set()

    def model_state(self, served: ServedModel) -> ModelState:
        handle = self._handles.get(served.name)
        if handle is None:
            return ModelState(name=served.name, phase="unloaded", pinned=served.pinned)
        return handle.state()

    def get_prefix_snapshot(self, served: ServedModel) -> PrefixSnapshot | None:
        """Implements `Models.get_prefix_snapshot`."""
        handle = self._handles.get(served.name)
        return None if handle is None else handle.get_prefix_snapshot()

    def capacity(self, served: ServedModel) -> Capacity | None:
        """Returns the capacity of the model's engine, or None while the model is not loaded.
        Thread-safe, because requests are parsed outside the event loop."""
        handle = self._handles.get(served.name)
        return None if handle is None else handle.capacity

    def loaded_files(self, served: ServedModel) -> ModelFiles | None:
        """Returns the files from which the model was loaded, or None while it is not loaded.
        Thread-safe."""
        handle = self._handles.get(served.name)
        return None if handle is None or handle.capacity is None else handle.files

    def preload(self, served: ServedModel) -> None:
        """Loads the model if memory is free, and restarts it after failures, even without requests,
        until it is unloaded or evicted or its keep-alive expires. Resets the backoff after failed
        loads."""
        handle = self.get_handle(served)
        handle.keep_loaded = True
        handle.reset_backoff()
        self._changed.set()

    async def unload(self, served: ServedModel) -> None:
        """Unloads the model after its running requests have finished, and returns when its memory
        has been freed. New requests load the model again. Clears the records of prompts that were
        running when the model crashed. Raises AppError(INVALID) for a pinned model."""
        if served.pinned:
            raise AppError(
                ErrorKind.INVALID,
                f"{served.name} is pinned and cannot be unloaded: serve it without `pinned` first",
                param="model",
            )
        handle = self.get_handle(served)
        handle.keep_loaded = False
        handle.leases.drop_placeholder()
        handle.forget_crashes()
        run_task = self._run_tasks.get(served.name)
        if run_task is not None:
            self._request_unload(handle)
            await asyncio.wait({run_task})

    def _request_unload(self, handle: ModelHandle) -> None:
        """Unloads a loaded model after its running requests."""
        handle.unload_requested = True
        if handle.phase == "loading" and not len(handle.leases):
            self._start_unload(handle.served.name)
        self._changed.set()

    # for a reload of the settings

    def apply(self, served: ServedModel) -> None:
        """Applies new limits to a model."""
        self._retired.discard(served.name)
        self._apply(served)

    def _apply(self, served: ServedModel) -> None:
        if (handle := self._handles.get(served.name)) is not None:
            self._reloaded[served.name] = served
            handle.apply(served)
            self._changed.set()

    def reload(self, served: ServedModel) -> None:
        """Applies settings that need a new process: the model is unloaded after its running
        requests, and loaded again if it was loaded. New requests wait for that."""
        self.apply(served)
        handle = self._handles.get(served.name)
        if handle is None:
            return
        handle.requirement = None  # the settings determine it as well
        run_task = self._run_tasks.get(served.name)
        if run_task is not None:
            self._request_unload(handle)
            run_task.add_done_callback(lambda _: self.preload(served))

    def retire(self, served: ServedModel) -> None:
        """Unloads a model that is no longer served when it is idle. Requests that already wait for
        it are served."""
        handle = self._handles.get(served.name)
        if handle is None:
            return
        handle.keep_loaded = False
        handle.leases.drop_placeholder()
        self._retired.add(served.name)
        self._apply(replace(served, pinned=False, keep_alive=0.0))
        self._forget_if_retired(handle)

    def _forget_if_retired(self, handle: ModelHandle) -> None:
        name = handle.served.name
        if name in self._retired and handle.phase == "out" and not len(handle.leases):
            self._retired.discard(name)
            del self._handles[name], self._reloaded[name]

    def set_limits(self, estimate_memory: EstimateMemory | None, max_loaded: int | None) -> None:
        """Replaces two arguments of the constructor."""
        self._preflight.estimate_memory = estimate_memory
        self._max_loaded = max_loaded

    # lifecycle

    async def start(self) -> None:
        self._supervisor_task = asyncio.create_task(self._supervise())

    async def stop(self, drain: float = 0.0) -> None:
        """Shuts down gracefully: rejects new and waiting requests, waits up to `drain` seconds for
        running requests, and stops all runners concurrently. May be called again."""
        self._stopping = True
        for handle in self._handles.values():
            handle.leases.fail_waiting(build_stopping_error())
        with suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while any(r.leases.held_since is not None for r in self._handles.values()):
                    self._lease_released.clear()
                    await self._lease_released.wait()
        run_tasks = list(self._run_tasks.values())
        for name in self._run_tasks:
            self._start_unload(name)
        if self._supervisor_task is not None:
            self._supervisor_task.cancel()
            await asyncio.gather(self._supervisor_task, return_exceptions=True)
        await self._preflight.stop()
        await asyncio.gather(*run_tasks, return_exceptions=True)

    async def _supervise(self) -> None:
        while True:
            self._changed.clear()
            try:
                wake = self._run_plan(self._clock())
            except Exception:
                log.exception("planning which models to load failed")
                wake = self._clock() + _PLAN_RETRY_DELAY
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wake is None else wake - self._clock()):
                    await self._changed.wait()

    def _run_plan(self, now: float) -> float | None:
        """Computes a plan and starts its actions. Returns the time of the next plan if nothing
        changes before then; None for never."""
        queue = self._pending_models(now)
        here = [self._handles[name] for name in self._run_tasks]
        head = next((handle for handle in queue if handle.phase == "out"), None)
        self._preflight.select(head, here)
        loaded = [handle.to_loaded_model() for handle in here]
        requests = [self._build_load_request(handle) for handle in queue]
        decided = plan(now, requests, loaded, self._build_limits(now, head))
        for action in decided.actions:
            handle = self._handles[action.name]
            match action:
                case Load():
                    self._start_load(handle, action.allocation)
                case Evict():
                    # keep_loaded must not prevent other models from being loaded.
                    handle.keep_loaded = False
                    self._start_unload(action.name)
                case RejectLoad():
                    log.warning("%s", action.reason)
                    handle.fail_load(AppError(ErrorKind.MODEL_FILES, action.reason))
                case SkipPreload():
                    log.warning("not preloading %s: %s", action.name, action.reason)
                    handle.keep_loaded = False
        changed = bool(decided.actions)
        for name in self._run_tasks:
            handle = self._handles[name]
            handle.draining = name in decided.draining
            handle.set_spare_memory(decided.spare_bytes.get(name, 0))
            changed |= handle.accepts_requests and handle.grant_leases()
        if changed:
            self._changed.set()
        later = [wake for r in self._handles.values() for wake in self._wake_times(r, now)]
        return min([*later, *([] if decided.wake_at is None else [decided.wake_at])], default=None)

    def _pending_models(self, now: float) -> list[ModelHandle]:
        """Returns the models with demand that may be loaded now, ordered by request time."""
        queue: list[tuple[float, ModelHandle]] = []
        for handle in self._handles.values():
            handle.leases.expire_placeholder(now)
            since = handle.leases.waiting_since
            if handle.phase == "out" and (handle.restart_state.not_before > now or self._stopping):
                continue
            if since is not None:
                queue.append((since, handle))
            elif handle.keep_loaded and handle.phase == "out":
                queue.append((now, handle))
        queue.sort(key=lambda item: (item[0], not item[1].served.pinned))
        return [handle for _, handle in queue]

    def _wake_times(self, handle: ModelHandle, now: float) -> Iterator[float]:
        if handle.phase == "out" and handle.has_demand and handle.restart_state.not_before > now:
            yield handle.restart_state.not_before
        if handle.leases.placeholder_until is not None:
            yield handle.leases.placeholder_until

    def _build_load_request(self, handle: ModelHandle) -> LoadRequest:
        served, since = handle.served, handle.leases.waiting_since
        found = self._preflight.get_result(served.name)
        return LoadRequest(
            name=served.name,
            waiting_since=self._clock() if since is None else since,
            requirement_known=found is not None,
            requirement=None if found is None else found.requirement,
            max_bytes=next((model.memory for model in served.settings.models), None),
            may_evict=since is not None or served.pinned,
        )

    def _build_limits(self, now: float, head: ModelHandle | None) -> PoolLimits:
        gone = [
            handle
            for handle in self._handles.values()
            if handle.phase == "out" and handle.would_have_expired > now and handle is not head
        ]
        gone.sort(key=lambda handle: handle.last_used, reverse=True)
        return PoolLimits(
            total_bytes=self._preflight.total_bytes,
            max_loaded=self._max_loaded,
            evicted_min_bytes=[
                handle.requirement.min_bytes for handle in gone if handle.requirement is not None
            ],
            shared_bytes=self._total_bytes if self._has_allocations() else None,
        )

    def _has_allocations(self) -> bool:
        """Whether all loaded models have allocations. A reload of the settings may leave a model
        that may use all memory."""
        return self._preflight.estimate_memory is not None and all(
            self._handles[name].allocation is not None for name in self._run_tasks
        )

    # the plan's actions

    def _start_load(self, handle: ModelHandle, allocation: int | None) -> None:
        served = handle.served
        files = self._preflight.take_files(served.name)
        settings = served.settings
        runner = self._make_runner(
            settings if allocation is None else replace(settings, memory=allocation)
        )
        handle.phase, handle.allocation = "loading", allocation
        run_task = asyncio.create_task(handle.run(runner, files, allocation))
        self._run_tasks[served.name] = run_task
        run_task.add_done_callback(lambda _: self._on_unloaded(handle))
        log.info("loading %s", served.name)

    def _start_unload(self, name: str) -> None:
        """Starts to unload a model. Does nothing if it is already being unloaded, because the
        cleanup must not be interrupted."""
        handle = self._handles[name]
        if handle.phase != "leaving":
            log.info("unloading %s", name)
            handle.phase = "leaving"
            self._run_tasks[name].cancel()

    def _on_unloaded(self, handle: ModelHandle) -> None:
        name = handle.served.name
        del self._run_tasks[name]
        handle.mark_unloaded()
        self._forget_if_retired(handle)
        self.on_unloaded(handle.served)
        self._changed.set()
