"""One model as long as the server lives: the runners behind it come and go.

Knows: its runner, if it has one now, who waits for it, how it fared. Must not know: other models,
when it is loaded or evicted: the pool says so. Everything here runs on the event loop.
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
from app.core.errors import AppError, Kind
from app.core.events import Loading
from app.core.files import ModelFiles
from app.core.jobs import Capacity, EngineStats, Job
from app.core.ports import Places, Runner, RunnerLoss, RunnerStatus, Submission
from app.core.residents import ModelPhase, ModelState, Need, Served
from app.runners.admission import Admission
from app.runners.careful import Careful
from app.runners.counted import all_told, of_the_past
from app.runners.discreet import discreet
from app.runners.lease import Leases
from app.runners.restarts import (
    CRASHED,
    Health,
    Patience,
    after_death,
    after_failed_load,
    after_load,
)
from app.runners.tenancy import Tenant

log = logging.getLogger(__name__)

# Seconds after which a client is asked to come again that waited for a model in vain.
_LOADING_AGAIN = 10


class Resident:
    """Implements `Engine`, and `app.runners.careful.Serving`. What the pool decides by and sets is
    public.

    phase: of its runner; "out" is none. capacity: while it is ready. share, need: bytes, see
    `Need`. keep_alive: seconds that it stays without requests; see `set_keep_alive`.
    used: when a request last began or ended to hold it. kept: it is to be here also while nobody
    asks. dismissed: it was asked to go. closed: it takes no new requests, because others need its
    room. missed_until: when it would have gone, had it been let; in the past for one that was not
    driven out."""

    def __init__(
        self,
        served: Served,
        *,
        clock: Callable[[], float],
        patience: Patience,
        changed: Callable[[], None],
    ) -> None:
        """changed: called when it became ready."""
        self.served = served
        self.files: ModelFiles | None = None
        self.phase: Literal["out", "loading", "ready", "leaving"] = "out"
        self.share: int | None = None
        self.need: Need | None = None
        self.keep_alive = self._least_keep_alive = served.keep_alive
        self.used = clock()
        self.missed_until = 0.0
        self.kept = self.dismissed = self.closed = False
        self.health = Health()
        self.leases = Leases(self._loading)
        self._changed = changed
        self._clock = clock
        self._patience = patience
        self._careful = Careful(served, self, clock)
        self._admission = Admission(self, served.settings.max_queue)
        self._runner: Runner | None = None
        self.capacity: Capacity | None = None
        self._past = EngineStats()
        self._rejected = 0
        self._restarts = self._loads = self._evictions = 0
        self._broke = False  # since it was last ready

    # what generation asks for

    def reserve(self, count: int = 1) -> AbstractContextManager[Places]:
        return self._admission.reserve(count)

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator[Submission]:
        with self._discreetly():
            async with self._careful.submit(job) as submission:
                yield submission

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        with self._discreetly():
            return await self._careful.embed(job)

    def status(self) -> RunnerStatus:
        if self._runner is None:
            error = self.health.error
            return RunnerStatus(
                state="loading" if error is None else "failed",
                progress=0,
                stats=self._past,
                error=None if error is None else error.message,
                rejected=self._rejected + self._admission.rejected,
            )
        now = self._runner.status()
        return replace(
            now,
            stats=all_told(self._past, now.stats),
            rejected=self._rejected + self._admission.rejected,
            preparing=self._admission.preparing,
            error=None if now.error is None else self._discreet_text(now.error),
        )

    async def serving(self, lost: Runner | None = None) -> Runner:
        """`Serving.serving`: for requests that hold a lease, so that the model is loaded again."""
        try:
            async with asyncio.timeout(self.served.settings.load_wait):
                while (runner := self._runner_in_service()) is None or runner is lost:
                    await self.leases.ready(self._clock())
                return runner
        except TimeoutError:
            message = f"{self.served.name} is still being reloaded, try again"
            raise AppError(Kind.LOADING, message, retry_after=_LOADING_AGAIN) from None

    def _runner_in_service(self) -> Runner | None:
        """None also while it was not noticed yet that a runner was lost."""
        runner = self._runner
        if runner is None or self.phase != "ready" or runner.status().state == "failed":
            return None
        return runner

    # what the pool asks for

    @property
    def bytes_held(self) -> int:
        """By its allocator, as last told."""
        return 0 if self._runner is None else self._runner.status().stats.memory

    @property
    def wanted(self) -> bool:
        return self.kept or self.leases.waiting_since is not None

    @property
    def open(self) -> bool:
        return self.phase == "ready" and not self.closed

    def tenant(self) -> Tenant:
        assert self.phase != "out"
        return Tenant(
            name=self.served.name,
            phase=self.phase,
            share=self.share or 0,
            busy_since=self.leases.held_since,
            used=self.used,
            # whoever waits for it is about to use it
            expires=self.expires() if self.leases.waiting_since is None else math.inf,
            wanted=self.wanted,
            pinned=self.served.pinned,
            dismissed=self.dismissed,
            closed=self.closed,
        )

    def expires(self) -> float:
        """When it may go, in case that it is idle then."""
        return self.used + self.keep_alive

    def set_keep_alive(self, seconds: float, *, admin: bool) -> None:
        """An admin's word replaces the operator's until the model is gone. Any other caller may
        have the model stay longer than these two say, since it leaves in any case when another one
        needs its room, but not shorter: that would unload it under all who use it."""
        if admin:
            self._least_keep_alive = seconds
        self.keep_alive = max(seconds, self._least_keep_alive)

    def reject(self) -> None:
        """Count a request that was refused because too many wait."""
        self._rejected += 1

    def grant(self) -> bool:
        """To all who wait; whether anybody did."""
        now = self._clock()
        granted = self.leases.grant(now)
        if granted:
            self.used = now
        return granted

    def forgive(self) -> None:
        """Try again at once, as if it had not broken lately."""
        self.health = replace(self.health, loads=0, not_before=self._clock())

    def refuse(self, error: AppError) -> None:
        """It cannot be loaded, and nobody tried."""
        error = self._discreet(error)
        self.health = after_failed_load(self.health, self._clock(), error, self._patience)
        self.leases.refuse(error)

    def trust(self) -> None:
        """Forget which prompts it broke with."""
        self._careful.trust()

    async def live(self, runner: Runner, files: ModelFiles, share: int | None) -> None:
        """Loads, serves until the runner breaks or this is cancelled, ends the runner."""
        self._runner, self.files, self.share, self.phase = runner, files, share, "loading"
        self._restarts += self._broke
        try:
            began = self._clock()
            await runner.start(files)
            self._ready(began)
            since = self._clock()
            loss = await runner.lost()
            self._died(loss, self._clock() - since)
        except Exception as error:  # whatever broke this model, the others go on
            self._failed(error)
        finally:
            self.phase = "leaving"
            try:
                await runner.stop()
            except Exception:
                log.exception("stopping the runner of %s failed", self.served.name)

    def gone(self) -> None:
        """To be said when `live` is over, also if it never began."""
        if self._runner is not None:
            self._past = of_the_past(self.status().stats)
        self.missed_until = 0.0 if self.dismissed else self.expires()
        # one that broke, or was asked to go, was not driven out; nor one that had not been here
        self._evictions += self.capacity is not None and not (
            self._broke or self.missed_until <= self._clock()
        )
        if not self._broke:
            self.keep_alive = self._least_keep_alive = self.served.keep_alive
        self._runner = self.capacity = self.share = None
        self._careful.reset()
        self.phase = "out"
        self.closed = self.dismissed = False
        self.leases.withdraw(self._clock())

    def state(self) -> ModelState:
        status, now = self.status(), self._clock()
        capacity = status.capacity
        idle = self.phase == "ready" and self.leases.held_since is None
        expires = self.expires() - now if idle and not self.served.pinned else math.inf
        return ModelState(
            name=self.served.name,
            phase=self._told_phase(status, now),
            progress=status.progress if self.phase in ("loading", "ready") else 0,
            stats=status.stats,
            context=None if capacity is None else capacity.context,
            parallel=None if capacity is None else capacity.parallel,
            leases=len(self.leases),
            preparing=status.preparing,
            compiling=status.compiling,
            rejected=status.rejected,
            pinned=self.served.pinned,
            share=self.share,
            expires=None if expires == math.inf else time.time() + expires,
            loads=self._loads,
            evictions=self._evictions,
            restarts=self._restarts,
            error=self._told_error(status),
            pid=status.pid,
            backend=None if capacity is None else capacity.backend,
        )

    # private

    def _told_phase(self, status: RunnerStatus, now: float) -> ModelPhase:
        if self.phase == "out":
            if self.health.refused(now, self._patience):
                return "refused"
            if not self.wanted:
                return "unloaded"
            return "failed" if now < self.health.not_before else "queued"
        if self.phase == "leaving" or (self.phase == "ready" and (self.closed or self.dismissed)):
            return "unloading"
        return "loading" if self.phase == "loading" else status.state

    def _told_error(self, status: RunnerStatus) -> str | None:
        if self.phase != "leaving":
            return status.error
        error = self.health.error
        return error.message if self._broke and error is not None else None

    def _loading(self) -> Loading:
        if self.phase == "loading":
            return Loading(progress=self.status().progress)
        return Loading(progress=0, waits=True)

    def _ready(self, began: float) -> None:
        now = self._clock()
        assert self._runner is not None
        self.capacity = self._runner.status().capacity
        self.phase = "ready"
        self._loads += 1
        self.health = after_load(self.health)
        self.used = now
        self._broke = False
        self.kept = self.kept or self.served.pinned
        context = self.capacity.context if self.capacity else 0
        log.info(
            "%s is ready after %.1f s (context %d tokens)", self.served.name, now - began, context
        )
        # also where it was asked to go meanwhile: these came before
        self.grant()
        self._changed()

    def _died(self, loss: RunnerLoss, lived: float) -> None:
        self._broke = True
        error = AppError(Kind.ENGINE, f"{self.served.name} failed: {loss.message}")
        log.error("%s", error.message)
        error = self._discreet(error)
        self.health = after_death(self.health, self._clock(), lived, error, self._patience)
        parallel = self.capacity.parallel if self.capacity else 1
        stats = self._runner.status().stats if self._runner else self._past
        self._careful.accuse(parallel, stats, cause=loss.cause)

    def _discreet(self, error: AppError) -> AppError:
        source = self.served.source
        folder = Path(source).expanduser() if source else None
        return discreet(error, self.files.path if self.files else folder, self.served.name)

    def _discreet_text(self, message: str) -> str:
        return self._discreet(AppError(Kind.ENGINE, message)).message

    @contextmanager
    def _discreetly(self) -> Generator[None]:
        """What the runner says goes to a client without paths; the log has them. What is wrong with
        a request is the client's own words, some of which look like paths."""
        try:
            yield
        except AppError as error:
            if error.kind not in (Kind.ENGINE, Kind.MODEL_FILES):
                raise
            cleaned = self._discreet(error)
            if cleaned.message != error.message:
                log.error("%s: %s", self.served.name, error.message)
            raise cleaned from error

    def _failed(self, error: Exception) -> None:
        """Whoever waits is told at once what is wrong with the model; a runner that crashed may
        get through the next time, and is waited for as long as it is tried."""
        self._broke = True
        name = self.served.name
        if not isinstance(error, AppError):
            log.error("%s could not be loaded", name, exc_info=error)
            error = AppError(Kind.MODEL_FILES, f"{name} could not be loaded: {error}")
        else:
            log.error("%s", error.message)
        error = self._discreet(error)
        self.health = after_failed_load(self.health, self._clock(), error, self._patience)
        if error.code != CRASHED or self.health.refused(self._clock(), self._patience):
            self.leases.refuse(error)
