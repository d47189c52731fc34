"""Who is in memory, in fact: the one owner of all residents, on the event loop.

Knows: the policy (`app.runners.eviction`), how to make a runner and how to ask what a model needs.
Must not know: HTTP, text, what a runner is. One task supervises: it asks for a plan whenever
something changed and starts what the plan says. Loading, watching and ending a runner is a task of
its own per model (`ModelHandle.run`), so that none of them holds up the others.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.model_state import ModelState, ServedModel
from app.core.ports import Runner
from app.core.settings import Settings
from app.runners.eviction import Evict, Load, LoadRequest, PoolLimits, RejectLoad, SkipPreload, plan
from app.runners.handle import ModelHandle
from app.runners.lease import ModelLease, build_busy_error, build_stopping_error, copy_error
from app.runners.preflight import EstimateMemory, Preflight
from app.runners.restart_policy import RestartPolicy

log = logging.getLogger(__name__)

# seconds until the next plan where making one failed, which is a mistake of ours
_PLAN_RETRY_DELAY = 1.0


class ModelPool:
    """make_runner: a runner with these settings, whose `memory` is its share. read_files: reads and
    checks a model's files. estimate_memory: what a model asks for, measured while nothing is being
    loaded; None for a server with one model, which then gets all that the settings give.
    total_bytes: bytes for all models; None is what the device can give. max_loaded: models at once.
    on_unloaded: told of a model whose runner is gone."""

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
        self._max_loaded = max_loaded
        self._restart_policy = restart_policy or RestartPolicy()
        self._clock = time.monotonic
        self._handles: dict[str, ModelHandle] = {}
        self._run_tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._lease_released = asyncio.Event()
        self._preflight = Preflight(read_files, estimate_memory, total_bytes, self._changed.set)
        self._supervisor_task: asyncio.Task[None] | None = None
        self._stopping = False

    # for whoever serves requests

    def get_handle(self, served: ServedModel) -> ModelHandle:
        """The model's stable handle: the same one at every call."""
        resident = self._handles.get(served.name)
        if resident is None:
            resident = ModelHandle(
                served,
                clock=self._clock,
                restart_policy=self._restart_policy,
                notify_pool=self._changed.set,
            )
            self._handles[served.name] = resident
        resident.served = served
        return resident

    @asynccontextmanager
    async def lease(self, served: ServedModel) -> AsyncGenerator[ModelLease]:
        """Entering waits for nothing."""
        resident, now = self.get_handle(served), self._clock()
        waiting = resident.leases.num_waiting
        lease = resident.leases.add(now)
        if self._stopping:
            lease.fail(build_stopping_error())
        elif resident.accepts_requests:
            resident.grant_leases()
        elif lease.is_held:
            pass  # a place was kept for it, though nobody else is let in
        elif (error := resident.restart_state.error) and resident.restart_state.is_refused(
            now, self._restart_policy
        ):
            lease.fail(copy_error(error, math.ceil(resident.restart_state.not_before - now)))
        elif waiting >= max(1, served.settings.max_queue):  # one always may, or it is never loaded
            resident.count_rejected()
            lease.fail(build_busy_error(served.name, waiting))
        else:
            self._changed.set()
        try:
            yield lease
        except AppError as error:
            resident.leases.keep_place(lease, error, self._clock())
            raise
        finally:
            if lease.is_held:
                resident.last_used = self._clock()
            resident.leases.release(lease)
            self._lease_released.set()
            self._changed.set()

    def set_keep_alive(self, served: ServedModel, seconds: float, *, admin: bool) -> None:
        """How long the model stays without requests from now on, as a request says that was
        accepted. admin: whether its caller may manage models: see `ModelHandle.set_keep_alive`."""
        self.get_handle(served).set_keep_alive(seconds, admin=admin)
        self._changed.set()

    def model_state(self, served: ServedModel) -> ModelState:
        resident = self._handles.get(served.name)
        if resident is None:
            return ModelState(name=served.name, phase="unloaded", pinned=served.pinned)
        return resident.state()

    def context_length(self, served: ServedModel) -> int | None:
        """Positions of one sequence; None while the model is not loaded. May be asked on any
        thread: requests are read on others than the event loop's."""
        resident = self._handles.get(served.name)
        capacity = None if resident is None else resident.capacity
        return None if capacity is None else capacity.context_length

    def loaded_files(self, served: ServedModel) -> ModelFiles | None:
        """Those that the model was loaded from; None while it is not loaded. On any thread."""
        resident = self._handles.get(served.name)
        return None if resident is None or resident.capacity is None else resident.files

    def preload(self, served: ServedModel) -> None:
        """Load it where there is room, and start it again when it breaks, though nobody asks for
        it: until it is unloaded, its time is over or others need its room. Forgets a refusal."""
        resident = self.get_handle(served)
        resident.keep_loaded = True
        resident.reset_backoff()
        self._changed.set()

    async def unload(self, served: ServedModel) -> None:
        """Returns when it is out of memory; the requests that are here are answered first, and new
        ones load it again. Forgets which prompts it broke with. Raises AppError(INVALID) for a
        pinned one."""
        if served.pinned:
            raise AppError(
                ErrorKind.INVALID,
                f"{served.name} is pinned and cannot be unloaded: serve it without `pinned` first",
                param="model",
            )
        resident = self.get_handle(served)
        resident.keep_loaded = False
        resident.leases.drop_placeholder()
        resident.forget_crashes()
        life = self._run_tasks.get(served.name)
        if life is not None:
            resident.unload_requested = True
            if resident.phase == "loading" and not len(resident.leases):
                self._start_unload(served.name)
            self._changed.set()
            await asyncio.wait({life})

    # its life

    async def start(self) -> None:
        self._supervisor_task = asyncio.create_task(self._supervise())

    async def stop(self, drain: float = 0.0) -> None:
        """Refuses whoever comes from now on or waits for a model, lets the others end for `drain`
        seconds, and ends all runners at once. May be called again."""
        self._stopping = True
        for resident in self._handles.values():
            resident.leases.fail_waiting(build_stopping_error())
        with suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while any(r.leases.held_since is not None for r in self._handles.values()):
                    self._lease_released.clear()
                    await self._lease_released.wait()
        lives = list(self._run_tasks.values())
        for name in self._run_tasks:
            self._start_unload(name)
        if self._supervisor_task is not None:
            self._supervisor_task.cancel()
            await asyncio.gather(self._supervisor_task, return_exceptions=True)
        await self._preflight.stop()
        await asyncio.gather(*lives, return_exceptions=True)

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
        """Do what there is to do; when there will be more, if nothing happens before."""
        queue = self._pending_models(now)
        here = [self._handles[name] for name in self._run_tasks]
        head = next((resident for resident in queue if resident.phase == "out"), None)
        self._preflight.select(head, here)
        tenants = [resident.to_loaded_model() for resident in here]
        applicants = [self._build_load_request(resident) for resident in queue]
        decided = plan(now, applicants, tenants, self._build_limits(now, head))
        for action in decided.actions:
            resident = self._handles[action.name]
            match action:
                case Load():
                    self._start_load(resident, action.allocation)
                case Evict():
                    # those who keep models here did not mean that others cannot be
                    resident.keep_loaded = False
                    self._start_unload(action.name)
                case RejectLoad():
                    log.warning("%s", action.reason)
                    resident.fail_load(AppError(ErrorKind.MODEL_FILES, action.reason))
                case SkipPreload():
                    log.warning("not preloading %s: %s", action.name, action.reason)
                    resident.keep_loaded = False
        news = bool(decided.actions)
        for name in self._run_tasks:
            resident = self._handles[name]
            resident.draining = name in decided.draining
            news |= resident.accepts_requests and resident.grant_leases()
        if news:
            self._changed.set()
        later = [wake for r in self._handles.values() for wake in self._wake_times(r, now)]
        return min([*later, *([] if decided.wake_at is None else [decided.wake_at])], default=None)

    def _pending_models(self, now: float) -> list[ModelHandle]:
        """Models that are waited for and may be tried now, in the order in which they came."""
        queue: list[tuple[float, ModelHandle]] = []
        for resident in self._handles.values():
            resident.leases.expire_placeholder(now)
            since = resident.leases.waiting_since
            if resident.phase == "out" and (
                resident.restart_state.not_before > now or self._stopping
            ):
                continue
            if since is not None:
                queue.append((since, resident))
            elif resident.keep_loaded and resident.phase == "out":
                queue.append((now, resident))
        queue.sort(key=lambda item: (item[0], not item[1].served.pinned))
        return [resident for _, resident in queue]

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
            resident
            for resident in self._handles.values()
            if resident.phase == "out"
            and resident.would_have_expired > now
            and resident is not head
        ]
        gone.sort(key=lambda resident: resident.last_used, reverse=True)
        return PoolLimits(
            total_bytes=self._preflight.total_bytes,
            max_loaded=self._max_loaded,
            evicted_min_bytes=[
                resident.requirement.min_bytes
                for resident in gone
                if resident.requirement is not None
            ],
        )

    # what the plan says

    def _start_load(self, handle: ModelHandle, allocation: int | None) -> None:
        served = handle.served
        files = self._preflight.take_files(served.name)
        settings = served.settings
        runner = self._make_runner(
            settings if allocation is None else replace(settings, memory=allocation)
        )
        handle.phase = "loading"
        life = asyncio.create_task(handle.run(runner, files, allocation))
        self._run_tasks[served.name] = life
        life.add_done_callback(lambda _: self._on_unloaded(handle))
        log.info("loading %s", served.name)

    def _start_unload(self, name: str) -> None:
        """Unless it is on its way out already: whoever cleans up must not be interrupted."""
        resident = self._handles[name]
        if resident.phase != "leaving":
            log.info("unloading %s", name)
            resident.phase = "leaving"
            self._run_tasks[name].cancel()

    def _on_unloaded(self, handle: ModelHandle) -> None:
        del self._run_tasks[handle.served.name]
        handle.mark_unloaded()
        self.on_unloaded(handle.served)
        self._changed.set()
