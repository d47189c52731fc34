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
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.model_state import ServedModel
from app.core.settings import ModelSettings, Settings
from app.engine.model_info import complete_config

log = logging.getLogger(__name__)

# seconds that a model stays which nobody named at start, as at Ollama
_DEFAULT_KEEP_ALIVE = 300.0

# seconds between two looks at what is installed
_RESCAN_INTERVAL = 1.0


_Tasks = dict[str, asyncio.Task[ModelFiles]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A model that can be asked for. files: as they were when it was last looked at."""

    served: ServedModel
    files: ModelFiles


def build_entry(
    model: ModelSettings | None, files: ModelFiles, settings: Settings
) -> RegisteredModel:
    """One of those named at start; None is the built-in model."""
    model = model or ModelSettings(name=files.name)
    own = settings.for_model(model)
    name = model.alias or files.name
    return RegisteredModel(
        served=ServedModel(
            name=name,
            source=model.name,
            settings=own,
            keep_alive=math.inf if own.keep_alive is None else own.keep_alive,
            pinned=model.pinned,
        ),
        files=replace(files, name=name),
    )


class ModelRegistry:
    """entries: the models named at start, in their order. With `settings.installed` all others that
    are on this machine stand behind them."""

    def __init__(self, entries: Sequence[RegisteredModel], settings: Settings) -> None:
        """Raises AppError(INVALID) for two models of one name."""
        self._settings = settings
        self._named: dict[str, RegisteredModel] = {entry.served.name: entry for entry in entries}
        self._installed: dict[str, RegisteredModel] = {}
        self._scanned_at = -math.inf
        self._last_error: str | None = None
        self._unservable: Sequence[str] = ()
        self._scan_task: asyncio.Task[None] | None = None
        self._verify_tasks: _Tasks = {}
        self._update_tasks: _Tasks = {}
        if len(self._named) < len(entries):
            twice = sorted(e.served.name for e in entries if self._named[e.served.name] is not e)
            raise AppError(
                ErrorKind.INVALID,
                f"two models are named {twice[0]!r}: give one of them another alias",
            )

    def entries(self) -> Iterator[RegisteredModel]:
        """Those named at start first."""
        yield from self._named.values()
        yield from self._installed.values()

    def find(self, name: str) -> RegisteredModel | None:
        """By the name that clients use. Ollama's clients write out the tag that a name without one
        stands for."""
        for spelled in (name, name.removesuffix(":latest")):
            entry = self._named.get(spelled) or self._installed.get(spelled)
            if entry is not None:
                return entry
        return None

    async def discover(self, name: str) -> None:
        """See whether a model of that name was installed meanwhile; all that were, in fact."""
        if self.find(name) is None and self._settings.installed:
            await self.rescan()

    async def rescan(self) -> None:
        """Look at all that is installed, if nobody did just now. Who asks meanwhile waits for the
        same look."""
        if self._scan_task is None or self._scan_task.done():
            if time.monotonic() - self._scanned_at < _RESCAN_INTERVAL:
                return
            self._scan_task = asyncio.create_task(self._scan())
        await asyncio.shield(self._scan_task)

    async def update(self, served: ServedModel) -> None:
        """Read the files of a model again, digests left out, as its next load will find them. What
        is wrong with them is the error of that load."""
        with suppress(AppError):
            await self._share_read(self._update_tasks, served, _find_files)

    async def load_verified_files(self, served: ServedModel) -> ModelFiles:
        """As they are on the disk now, their digests checked. Raises AppError. Who asks meanwhile
        waits for the same look: it may take minutes, which whoever leaves cannot end, and clients
        that come and go must not take all threads that there are."""
        try:
            return await self._share_read(self._verify_tasks, served, _resolve_verified)
        except AppError as error:
            if error.kind is not ErrorKind.MODEL_NOT_FOUND or served.name not in self._named:
                raise
            # it is listed, and the client's request is right
            message = f"the files of {served.name} no longer exist: {error.message}"
            raise AppError(ErrorKind.MODEL_FILES, message) from error

    async def _share_read(
        self, tasks: _Tasks, served: ServedModel, read: Callable[[str | None], ModelFiles]
    ) -> ModelFiles:
        """One look for all who ask at the same time."""
        task = tasks.get(served.name)
        if task is None:
            work = self._read(served, read)
            task = tasks[served.name] = asyncio.create_task(work)
            task.add_done_callback(lambda done: _forget_task(tasks, served.name, done))
        return await asyncio.shield(task)

    async def _read(
        self, served: ServedModel, read: Callable[[str | None], ModelFiles]
    ) -> ModelFiles:
        """Others compare entries and files by identity, so equal files change nothing."""
        files = replace(await asyncio.to_thread(read, served.source), name=served.name)
        for entries in (self._named, self._installed):
            entry = entries.get(served.name)
            if entry is not None and entry.served == served and entry.files != files:
                entries[served.name] = replace(entry, files=files)
        return files

    async def _scan(self) -> None:
        try:
            found, unfit = await asyncio.to_thread(_scan_installed, self._installed)
        except AppError as error:
            # what is known is served as before, and what nobody can find is simply not here
            self._log_scan_error(error.message)
            return
        self._last_error = None
        if unfit and unfit != self._unservable:
            log.info("%d installed models cannot be served: `mlxrunner list` shows why", len(unfit))
        self._unservable = unfit
        self._installed = {
            name: self._reuse_entry(name, files) for name, files in found if name not in self._named
        }
        self._scanned_at = time.monotonic()

    def _log_scan_error(self, message: str) -> None:
        """Once, and not whenever a request names a model that is not here."""
        if message != self._last_error:
            log.warning("cannot scan the installed models: %s", message)
        self._last_error, self._scanned_at = message, time.monotonic()

    def _reuse_entry(self, name: str, files: ModelFiles) -> RegisteredModel:
        """The same entry as long as the files are the same: others remember what they know of it
        by it."""
        entry, known = self._build_entry(name, files), self._installed.get(name)
        return known if known is not None and known.files == entry.files else entry

    def _build_entry(self, name: str, files: ModelFiles) -> RegisteredModel:
        keep_alive = self._settings.keep_alive
        return RegisteredModel(
            served=ServedModel(
                name=name,
                source=name,
                settings=self._settings.for_model(ModelSettings(name=name)),
                keep_alive=_DEFAULT_KEEP_ALIVE if keep_alive is None else keep_alive,
            ),
            files=replace(files, name=name),
        )


def _resolve_verified(source: str | None) -> ModelFiles:
    return complete_config(store.resolve(source))


def _find_files(source: str | None) -> ModelFiles:
    return complete_config(store.find(source))


def _forget_task(tasks: _Tasks, name: str, task: asyncio.Task[ModelFiles]) -> None:
    del tasks[name]
    if not task.cancelled():
        task.exception()  # every request that waited for it may have left


def _scan_installed(known: Iterable[str]) -> tuple[list[tuple[str, ModelFiles]], list[str]]:
    """Installed models that could be served, by their names, and the names of those that could
    not. known: names which are no news."""
    found: list[tuple[str, ModelFiles]] = []
    unfit: list[str] = []
    known = set(known)
    for entry in store.list_installed():
        try:
            found.append((entry.name, complete_config(entry.read())))
        except AppError as error:
            unfit.append(entry.name)
            log.debug("%s is installed and cannot be served: %s", entry.name, error.message)
    for name in sorted({name for name, _ in found} - known):
        log.debug("%s is installed and can be requested", name)
    return found, unfit
