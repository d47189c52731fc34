"""Who is in memory, in fact: the one owner of all residents, on the event loop.

Knows: the policy (`app.runners.residency`), how to make a runner and how to ask what a model needs.
Must not know: HTTP, text, what a runner is. One task supervises: it asks for a plan whenever
something changed and starts what the plan says. Loading, watching and ending a runner is a task of
its own per model (`Resident.live`), so that none of them holds up the others.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.ports import Runner
from app.core.residents import ModelState, Served
from app.core.settings import Settings
from app.runners.lease import Lease, again, busy, stopping
from app.runners.residency import plan
from app.runners.resident import Resident
from app.runners.restarts import Patience
from app.runners.survey import AskNeed, Survey
from app.runners.tenancy import Applicant, Evict, Forgo, Limits, Load, Refuse

log = logging.getLogger(__name__)

# seconds until the next plan where making one failed, which is a mistake of ours
_AFTER_A_MISTAKE = 1.0


class Pool:
    """make: a runner with these settings, whose `memory` is its share. files: reads and checks a
    model's files. need: what a model asks for, measured while nothing is being loaded; None for a
    server with one model, which then gets all that the settings give. total: bytes for all models;
    None is what the device can give. max_loaded: models at once. on_unloaded: told of a model whose
    runner is gone."""

    on_unloaded: Callable[[Served], None]

    def __init__(
        self,
        make: Callable[[Settings], Runner],
        files: Callable[[Served], Awaitable[ModelFiles]],
        need: AskNeed | None = None,
        *,
        total: int | None = None,
        max_loaded: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.on_unloaded = lambda _: None
        self._make = make
        self._max_loaded = max_loaded
        self._patience = patience or Patience()
        self._clock = time.monotonic
        self._residents: dict[str, Resident] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._left = asyncio.Event()
        self._survey = Survey(files, need, total, self._changed.set)
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False

    # for whoever serves requests

    def resident(self, served: Served) -> Resident:
        """The model's stable handle: the same one at every call."""
        resident = self._residents.get(served.name)
        if resident is None:
            resident = Resident(
                served, clock=self._clock, patience=self._patience, changed=self._changed.set
            )
            self._residents[served.name] = resident
        resident.served = served
        return resident

    @asynccontextmanager
    async def lease(self, served: Served) -> AsyncGenerator[Lease]:
        """Entering waits for nothing."""
        resident, now = self.resident(served), self._clock()
        waiting = resident.leases.waiting
        lease = resident.leases.enter(now)
        if self._stopping:
            lease.refuse(stopping())
        elif resident.open:
            resident.grant()
        elif lease.ready:
            pass  # a place was kept for it, though nobody else is let in
        elif (error := resident.health.error) and resident.health.refused(now, self._patience):
            lease.refuse(again(error, math.ceil(resident.health.not_before - now)))
        elif waiting >= max(1, served.settings.max_queue):  # one always may, or it is never loaded
            resident.reject()
            lease.refuse(busy(served.name, waiting))
        else:
            self._changed.set()
        try:
            yield lease
        except AppError as error:
            resident.leases.expect(lease, error, self._clock())
            raise
        finally:
            if lease.ready:
                resident.used = self._clock()
            resident.leases.leave(lease)
            self._left.set()
            self._changed.set()

    def set_keep_alive(self, served: Served, seconds: float, *, admin: bool) -> None:
        """How long the model stays without requests from now on, as a request says that was
        accepted. admin: whether its caller may manage models: see `Resident.set_keep_alive`."""
        self.resident(served).set_keep_alive(seconds, admin=admin)
        self._changed.set()

    def state(self, served: Served) -> ModelState:
        resident = self._residents.get(served.name)
        if resident is None:
            return ModelState(name=served.name, phase="unloaded", pinned=served.pinned)
        return resident.state()

    def context(self, served: Served) -> int | None:
        """Positions of one sequence; None while the model is not loaded. May be asked on any
        thread: requests are read on others than the event loop's."""
        resident = self._residents.get(served.name)
        capacity = None if resident is None else resident.capacity
        return None if capacity is None else capacity.context

    def files(self, served: Served) -> ModelFiles | None:
        """Those that the model was loaded from; None while it is not loaded. On any thread."""
        resident = self._residents.get(served.name)
        return None if resident is None or resident.capacity is None else resident.files

    def preload(self, served: Served) -> None:
        """Load it where there is room, and start it again when it breaks, though nobody asks for
        it: until it is unloaded, its time is over or others need its room. Forgets a refusal."""
        resident = self.resident(served)
        resident.kept = True
        resident.forgive()
        self._changed.set()

    async def unload(self, served: Served) -> None:
        """Returns when it is out of memory; the requests that are here are answered first, and new
        ones load it again. Forgets which prompts it broke with. Raises AppError(INVALID) for a
        pinned one."""
        if served.pinned:
            raise AppError(
                Kind.INVALID,
                f"{served.name} is pinned and cannot be unloaded: serve it without `pinned` first",
                param="model",
            )
        resident = self.resident(served)
        resident.kept = False
        resident.leases.expect_nobody()
        resident.trust()
        life = self._lives.get(served.name)
        if life is not None:
            resident.dismissed = True
            if resident.phase == "loading" and not len(resident.leases):
                self._end(served.name)
            self._changed.set()
            await asyncio.wait({life})

    # its life

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self, drain: float = 0.0) -> None:
        """Refuses whoever comes from now on or waits for a model, lets the others end for `drain`
        seconds, and ends all runners at once. May be called again."""
        self._stopping = True
        for resident in self._residents.values():
            resident.leases.refuse(stopping())
        with suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while any(r.leases.held_since is not None for r in self._residents.values()):
                    self._left.clear()
                    await self._left.wait()
        lives = list(self._lives.values())
        for name in self._lives:
            self._end(name)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._survey.stop()
        await asyncio.gather(*lives, return_exceptions=True)

    async def _supervise(self) -> None:
        while True:
            self._changed.clear()
            try:
                wake = self._turn(self._clock())
            except Exception:
                log.exception("planning which models to load failed")
                wake = self._clock() + _AFTER_A_MISTAKE
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wake is None else wake - self._clock()):
                    await self._changed.wait()

    def _turn(self, now: float) -> float | None:
        """Do what there is to do; when there will be more, if nothing happens before."""
        queue = self._queue(now)
        here = [self._residents[name] for name in self._lives]
        head = next((resident for resident in queue if resident.phase == "out"), None)
        self._survey.turn_to(head, here)
        tenants = [resident.tenant() for resident in here]
        applicants = [self._applicant(resident) for resident in queue]
        decided = plan(now, applicants, tenants, self._limits(now, head))
        for action in decided.actions:
            resident = self._residents[action.name]
            match action:
                case Load():
                    self._load(resident, action.share)
                case Evict():
                    # those who keep models here did not mean that others cannot be
                    resident.kept = False
                    self._end(action.name)
                case Refuse():
                    log.warning("%s", action.why)
                    resident.refuse(AppError(Kind.MODEL_FILES, action.why))
                case Forgo():
                    log.warning("not preloading %s: %s", action.name, action.why)
                    resident.kept = False
        news = bool(decided.actions)
        for name in self._lives:
            resident = self._residents[name]
            resident.closed = name in decided.closed
            news |= resident.open and resident.grant()
        if news:
            self._changed.set()
        later = [wake for r in self._residents.values() for wake in self._later(r, now)]
        return min([*later, *([] if decided.wake is None else [decided.wake])], default=None)

    def _queue(self, now: float) -> list[Resident]:
        """Models that are waited for and may be tried now, in the order in which they came."""
        queue: list[tuple[float, Resident]] = []
        for resident in self._residents.values():
            resident.leases.give_up_those_who_are_late(now)
            since = resident.leases.waiting_since
            if resident.phase == "out" and (resident.health.not_before > now or self._stopping):
                continue
            if since is not None:
                queue.append((since, resident))
            elif resident.kept and resident.phase == "out":
                queue.append((now, resident))
        queue.sort(key=lambda item: (item[0], not item[1].served.pinned))
        return [resident for _, resident in queue]

    def _later(self, resident: Resident, now: float) -> Iterator[float]:
        if resident.phase == "out" and resident.wanted and resident.health.not_before > now:
            yield resident.health.not_before
        if resident.leases.expected_until is not None:
            yield resident.leases.expected_until

    def _applicant(self, resident: Resident) -> Applicant:
        served, since = resident.served, resident.leases.waiting_since
        found = self._survey.found_of(served.name)
        return Applicant(
            name=served.name,
            since=self._clock() if since is None else since,
            measured=found is not None,
            need=None if found is None else found.need,
            most=next((model.memory for model in served.settings.models), None),
            evicts=since is not None or served.pinned,
        )

    def _limits(self, now: float, head: Resident | None) -> Limits:
        gone = [
            resident
            for resident in self._residents.values()
            if resident.phase == "out" and resident.missed_until > now and resident is not head
        ]
        gone.sort(key=lambda resident: resident.used, reverse=True)
        return Limits(
            total=self._survey.total,
            loaded=self._max_loaded,
            returning=[resident.need.least for resident in gone if resident.need is not None],
        )

    # what the plan says

    def _load(self, resident: Resident, share: int | None) -> None:
        served = resident.served
        files = self._survey.hand_over(served.name)
        settings = served.settings
        runner = self._make(settings if share is None else replace(settings, memory=share))
        resident.phase = "loading"
        life = asyncio.create_task(resident.live(runner, files, share))
        self._lives[served.name] = life
        life.add_done_callback(lambda _: self._gone(resident))
        log.info("loading %s", served.name)

    def _end(self, name: str) -> None:
        """Unless it is on its way out already: whoever cleans up must not be interrupted."""
        resident = self._residents[name]
        if resident.phase != "leaving":
            log.info("unloading %s", name)
            resident.phase = "leaving"
            self._lives[name].cancel()

    def _gone(self, resident: Resident) -> None:
        del self._lives[resident.served.name]
        resident.gone()
        self.on_unloaded(resident.served)
        self._changed.set()
