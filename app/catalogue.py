"""Which models a request may name, and where their files are.

Knows: the models named at start, those that are installed, how long each stays. Must not know: what
is in memory, HTTP. Everything here runs on the event loop but for looks at the disk, which take
threads of their own.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from app import store
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.residents import Served
from app.core.settings import ModelSettings, Settings
from app.engine.describe import complete

log = logging.getLogger(__name__)

# seconds that a model stays which nobody named at start, as at Ollama
_STAYS = 300.0

# seconds between two looks at what is installed
_LOOK_AGAIN = 1.0


_Tasks = dict[str, asyncio.Task[ModelFiles]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model that can be asked for. files: as they were when it was last looked at."""

    served: Served
    files: ModelFiles


def named(model: ModelSettings | None, files: ModelFiles, settings: Settings) -> Entry:
    """One of those named at start; None is the built-in model."""
    model = model or ModelSettings(name=files.name)
    own = settings.of(model)
    name = model.alias or files.name
    return Entry(
        served=Served(
            name=name,
            source=model.name,
            settings=own,
            keep_alive=math.inf if own.keep_alive is None else own.keep_alive,
            pinned=model.pinned,
        ),
        files=replace(files, name=name),
    )


class Catalogue:
    """entries: the models named at start, in their order. With `settings.installed` all others that
    are on this machine stand behind them."""

    def __init__(self, entries: Sequence[Entry], settings: Settings) -> None:
        """Raises AppError(INVALID) for two models of one name."""
        self._settings = settings
        self._named: dict[str, Entry] = {entry.served.name: entry for entry in entries}
        self._installed: dict[str, Entry] = {}
        self._looked = -math.inf
        self._complaint: str | None = None
        self._unfit: Sequence[str] = ()
        self._look: asyncio.Task[None] | None = None
        self._reading: _Tasks = {}
        self._updating: _Tasks = {}
        if len(self._named) < len(entries):
            twice = sorted(e.served.name for e in entries if self._named[e.served.name] is not e)
            raise AppError(
                Kind.INVALID,
                f"two models are named {twice[0]!r}: give one of them another alias",
            )

    def entries(self) -> Iterator[Entry]:
        """Those named at start first."""
        yield from self._named.values()
        yield from self._installed.values()

    def find(self, name: str) -> Entry | None:
        """By the name that clients use. Ollama's clients write out the tag that a name without one
        stands for."""
        for spelled in (name, name.removesuffix(":latest")):
            entry = self._named.get(spelled) or self._installed.get(spelled)
            if entry is not None:
                return entry
        return None

    async def look_for(self, name: str) -> None:
        """See whether a model of that name was installed meanwhile; all that were, in fact."""
        if self.find(name) is None and self._settings.installed:
            await self.refresh()

    async def refresh(self) -> None:
        """Look at all that is installed, if nobody did just now. Who asks meanwhile waits for the
        same look."""
        if self._look is None or self._look.done():
            if time.monotonic() - self._looked < _LOOK_AGAIN:
                return
            self._look = asyncio.create_task(self._see())
        await asyncio.shield(self._look)

    async def update(self, served: Served) -> None:
        """Read the files of a model again, digests left out, as its next load will find them. What
        is wrong with them is the error of that load."""
        with suppress(AppError):
            await self._shared(self._updating, served, _found)

    async def files(self, served: Served) -> ModelFiles:
        """As they are on the disk now, their digests checked. Raises AppError. Who asks meanwhile
        waits for the same look: it may take minutes, which whoever leaves cannot end, and clients
        that come and go must not take all threads that there are."""
        try:
            return await self._shared(self._reading, served, _verified)
        except AppError as error:
            if error.kind is not Kind.MODEL_NOT_FOUND or served.name not in self._named:
                raise
            # it is listed, and the client's request is right
            message = f"the files of {served.name} no longer exist: {error.message}"
            raise AppError(Kind.MODEL_FILES, message) from error

    async def _shared(
        self, tasks: _Tasks, served: Served, read: Callable[[str | None], ModelFiles]
    ) -> ModelFiles:
        """One look for all who ask at the same time."""
        task = tasks.get(served.name)
        if task is None:
            work = self._read(served, read)
            task = tasks[served.name] = asyncio.create_task(work)
            task.add_done_callback(lambda done: _end(tasks, served.name, done))
        return await asyncio.shield(task)

    async def _read(self, served: Served, read: Callable[[str | None], ModelFiles]) -> ModelFiles:
        """Others compare entries and files by identity, so equal files change nothing."""
        files = replace(await asyncio.to_thread(read, served.source), name=served.name)
        for entries in (self._named, self._installed):
            entry = entries.get(served.name)
            if entry is not None and entry.served == served and entry.files != files:
                entries[served.name] = replace(entry, files=files)
        return files

    async def _see(self) -> None:
        try:
            found, unfit = await asyncio.to_thread(_readable, self._installed)
        except AppError as error:
            # what is known is served as before, and what nobody can find is simply not here
            self._complain(error.message)
            return
        self._complaint = None
        if unfit and unfit != self._unfit:
            log.info("%d installed models cannot be served: `mlxrunner list` shows why", len(unfit))
        self._unfit = unfit
        self._installed = {
            name: self._kept(name, files) for name, files in found if name not in self._named
        }
        self._looked = time.monotonic()

    def _complain(self, message: str) -> None:
        """Once, and not whenever a request names a model that is not here."""
        if message != self._complaint:
            log.warning("cannot scan the installed models: %s", message)
        self._complaint, self._looked = message, time.monotonic()

    def _kept(self, name: str, files: ModelFiles) -> Entry:
        """The same entry as long as the files are the same: others remember what they know of it
        by it."""
        entry, known = self._entry(name, files), self._installed.get(name)
        return known if known is not None and known.files == entry.files else entry

    def _entry(self, name: str, files: ModelFiles) -> Entry:
        keep_alive = self._settings.keep_alive
        return Entry(
            served=Served(
                name=name,
                source=name,
                settings=self._settings.of(ModelSettings(name=name)),
                keep_alive=_STAYS if keep_alive is None else keep_alive,
            ),
            files=replace(files, name=name),
        )


def _verified(source: str | None) -> ModelFiles:
    return complete(store.resolve(source))


def _found(source: str | None) -> ModelFiles:
    return complete(store.find(source))


def _end(tasks: _Tasks, name: str, task: asyncio.Task[ModelFiles]) -> None:
    del tasks[name]
    if not task.cancelled():
        task.exception()  # every request that waited for it may have left


def _readable(known: Iterable[str]) -> tuple[list[tuple[str, ModelFiles]], list[str]]:
    """Installed models that could be served, by their names, and the names of those that could
    not. known: names which are no news."""
    found: list[tuple[str, ModelFiles]] = []
    unfit: list[str] = []
    known = set(known)
    for entry in store.installed():
        try:
            found.append((entry.name, complete(entry.read())))
        except AppError as error:
            unfit.append(entry.name)
            log.debug("%s is installed and cannot be served: %s", entry.name, error.message)
    for name in sorted({name for name, _ in found} - known):
        log.debug("%s is installed and can be requested", name)
    return found, unfit
