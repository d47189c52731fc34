"""What the model needs whose turn it is to be loaded.

Knows: how to read a model's files and how to ask what it needs. Must not know: who is evicted for
it. It is looked at once per turn, and while nothing comes or goes, so that what is free then is
free for it; what was found holds until its load begins or its turn is over.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.residents import Need, Served
from app.core.settings import Settings
from app.runners.resident import Resident

log = logging.getLogger(__name__)

ReadFiles = Callable[[Served], Awaitable[ModelFiles]]
# files, settings, bytes that models have which are loaded already
AskNeed = Callable[[ModelFiles, Settings, int], Awaitable[Need]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """total: bytes for all models; None, like need, where a model gets all there is."""

    files: ModelFiles
    need: Need | None
    total: int | None


class Survey:
    """total: bytes for all models; None is what the device can give. told: called when something
    was found out."""

    def __init__(
        self, files: ReadFiles, need: AskNeed | None, total: int | None, told: Callable[[], None]
    ) -> None:
        self._files = files
        self._need = need
        self._total = total
        self._told = told
        self._of: str | None = None
        self._found: Found | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def total(self) -> int | None:
        """As of what was found last."""
        return None if self._found is None else self._found.total

    def found_of(self, name: str) -> Found | None:
        return self._found if self._of == name else None

    def turn_to(self, resident: Resident | None, here: Sequence[Resident]) -> None:
        """It is this one's turn. here: those in memory."""
        name = None if resident is None else resident.served.name
        if name != self._of:
            self._end_turn()
        busy = self._task is not None or self._found is not None
        moving = any(one.phase != "ready" for one in here)
        if resident is not None and not busy and not moving:
            self._of = name
            self._task = asyncio.create_task(self._look(resident, here))

    def hand_over(self, name: str) -> ModelFiles:
        """Its load begins."""
        assert self._of == name
        assert self._found is not None
        files = self._found.files
        self._end_turn()
        return files

    async def stop(self) -> None:
        task = self._task
        self._end_turn()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _asked(self, resident: Resident, files: ModelFiles, held: int) -> Need | None:
        """Not again for the same files, where it is not the device that must be asked each time:
        laying out a model takes about as long as loading a small one."""
        if self._need is None:
            return None
        if self._total is not None and resident.need is not None and resident.files == files:
            return resident.need
        return await self._need(files, resident.served.settings, held)

    def _end_turn(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._of = self._found = self._task = None

    async def _look(self, resident: Resident, here: Sequence[Resident]) -> None:
        served = resident.served
        try:
            files = await self._files(served)
            need = await self._asked(resident, files, sum(one.bytes_held for one in here))
        except Exception as error:
            self._task = None
            self._end_turn()
            resident.refuse(_told(error, served))
        else:
            self._task = None
            resident.need = need
            if need is None:
                self._found = Found(files=files, need=None, total=None)
            elif self._total is not None:
                self._found = Found(files=files, need=need, total=self._total)
            elif all(one.phase == "ready" for one in here):
                self._found = Found(files=files, need=need, total=need.budget)
            else:  # somebody left meanwhile, and nobody knows whether that was free already
                self._end_turn()
        self._told()


def _told(error: Exception, served: Served) -> AppError:
    if isinstance(error, AppError):
        log.error("%s cannot be loaded: %s", served.name, error.message)
        return error
    log.error("the files of %s could not be read", served.name, exc_info=error)
    return AppError(Kind.MODEL_FILES, f"{served.name} could not be read: {error}")
