"""The registry of the models that requests may use, with their files.

Knows: the models specified at startup, the installed models, their defaults. Must not know: the
state of loaded models, HTTP. All code runs on the event loop, except disk access, which uses
threads.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app import store
from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.model_files import ModelDefaults, ModelFiles
from app.core.models import ServedModel
from app.core.settings import AdapterSettings, ModelSettings, Settings
from app.core.units import pluralize
from app.engine.model_info import complete_config
from app.store.library_names import find_equivalent
from app.store.model_names import USUAL_QUANTIZATION, parse_hub_name, parse_ollama_name

log = logging.getLogger(__name__)

# the keep-alive in seconds of models that were not specified at startup, as in Ollama
_DEFAULT_KEEP_ALIVE = 300.0

# the minimum number of seconds between two scans of the installed models
_RESCAN_INTERVAL = 1.0


_Tasks = dict[str, asyncio.Task[ModelFiles]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A model that requests may use. files: the most recently read files."""

    served: ServedModel
    files: ModelFiles

    @property
    def adapters(self) -> Sequence[AdapterSettings]:
        """The adapters that requests may select."""
        return [adapter for adapter in self.served.settings.adapters if not adapter.retired]

    def find_adapter(self, name: str) -> AdapterSettings | None:
        return next((one for one in self.adapters if one.name == name), None)


def build_entry(
    model: ModelSettings | None, files: ModelFiles, settings: Settings
) -> RegisteredModel:
    """Builds the entry of a model specified at startup. model: the model; None means the built-in
    model."""
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
            aliases=model.aliases,
            folder=store.find_model_folder(model.name),
        ),
        files=replace(files, name=name),
    )


class ModelRegistry:
    """The models that requests may use. entries: the models specified at startup, in order. With
    `settings.installed`, all other models installed on this machine are also available."""

    def __init__(self, entries: Sequence[RegisteredModel], settings: Settings) -> None:
        """Raises AppError(INVALID) for two models with the same name."""
        self._installed: dict[str, RegisteredModel] = {}
        self._scanned_at = -math.inf
        self._last_error: str | None = None
        self._unservable: Sequence[str] = ()
        self._scan_task: asyncio.Task[None] | None = None
        self._verify_tasks: _Tasks = {}
        self._update_tasks: _Tasks = {}
        self._adapters: dict[str, tuple[AdapterSettings, ...]] = {}  # by model, where changed
        self._startup_models: Mapping[str, ServedModel] = {}
        self._set_startup_models(entries, settings, _index_defaults(settings))

    def _set_startup_models(
        self,
        entries: Sequence[RegisteredModel],
        settings: Settings,
        defaults: dict[str, ModelDefaults],
    ) -> None:
        """Raises AppError(INVALID) for two models with the same name, and then changes nothing."""
        before, after = self._startup_models, _index_by_name(entries, defaults)
        self._startup_models = after
        # If a reload changes or removes a model's adapters, the reload takes precedence.
        self._adapters = {
            name: adapters
            for name, adapters in self._adapters.items()
            if _find_adapters(before.get(name)) == _find_adapters(after.get(name))
        }
        self._settings, self._defaults = settings, defaults
        self._named = {entry.served.name: self._with_defaults(entry) for entry in entries}
        self._aliases = self._collect_aliases()

    def entries(self) -> Iterator[RegisteredModel]:
        """Returns all entries. Models specified at startup come first."""
        yield from self._named.values()
        yield from self._installed.values()

    def replace_named(self, entries: Sequence[RegisteredModel], settings: Settings) -> None:
        """Replaces the models specified at startup, and the settings of the installed models.
        Raises AppError(INVALID) for two models with the same name, and then changes nothing."""
        before, defaults = self._defaults, _index_defaults(settings)
        if defaults == _index_defaults(self._settings):
            defaults = before  # some may have changed without a configuration file
        self._set_startup_models(entries, settings, defaults)
        # the next scan finds a model again whose defaults have changed
        self._installed = {
            name: self._build_entry(name, entry.files)
            for name, entry in self._installed.items()
            if name not in self._named and self._defaults.get(name) == before.get(name)
        }
        self._scanned_at = -math.inf  # a model that is no longer named may be installed

    def named(self) -> Mapping[str, RegisteredModel]:
        """Returns the models specified at startup by name."""
        return self._named

    def find(self, name: str) -> RegisteredModel | None:
        """Finds a model by the name used by clients, which may be the name of Ollama's library for
        the MLX version of a model, or that of a repository whose GGUF files are installed."""
        entry = self.find_own(name)
        if entry is None and (equivalent := find_equivalent(name)) is not None:
            entry = self.find_own(str(equivalent))
        return entry or self._find_quantization(name.removesuffix(":latest"))

    def _find_quantization(self, name: str) -> RegisteredModel | None:
        """Finds the usual or the only GGUF file of a repository."""
        hub_name = parse_hub_name(name)
        if hub_name is None or hub_name.quantization is not None:
            return None
        found = [
            entry
            for key, entry in self._installed.items()
            if (own := parse_hub_name(key)) is not None
            and own.quantization is not None
            and replace(own, quantization=None) == hub_name
        ]
        usual = replace(hub_name, quantization=USUAL_QUANTIZATION)
        return found[0] if len(found) == 1 else self._installed.get(str(usual))

    def find_own(self, name: str) -> RegisteredModel | None:
        """Finds a model by its own name. Ollama's clients may append the default tag ":latest"."""
        for given in (name, name.removesuffix(":latest")):
            # the model of an alias may have been deleted
            for spelled in (self._aliases.get(given, given), given):
                entry = self._named.get(spelled) or self._installed.get(spelled)
                if entry is not None:
                    return entry
        return None

    def get_defaults(self, name: str) -> ModelDefaults:
        return self._defaults.get(name) or ModelDefaults(name=name)

    def check_aliases(self, defaults: ModelDefaults) -> None:
        """Raises AppError(INVALID) for an alias that is already a name of this or another model."""
        known = self.get_defaults(defaults.name).aliases
        for alias in defaults.aliases:
            if alias in known:
                continue
            entry = self.find_own(alias)
            # an alias of a model that is not installed at the moment is also taken
            owner = self._aliases.get(alias) if entry is None else entry.served.name
            if owner is not None:
                message = f"{mark_client_text(repr(alias))} is already a name of {owner}"
                raise AppError(
                    ErrorKind.INVALID, f"{message}: choose another one", param="defaults.aliases"
                )

    async def set_defaults(
        self, defaults: ModelDefaults, save: Callable[[ModelDefaults], None] | None
    ) -> RegisteredModel:
        """Changes the defaults of a known model and returns its entry. save: stores them; runs on a
        thread. Raises AppError, before anything is changed, if the files of the model can no longer
        be read, and the errors of `save`."""
        name = defaults.name
        source = (self._named.get(name) or self._installed[name]).served.source
        # without the old defaults
        found = replace(await asyncio.to_thread(_find_files, source), name=name)
        if save is not None:
            await asyncio.to_thread(save, defaults)
        self._defaults = {key: one for key, one in self._defaults.items() if key != name}
        if not defaults.is_empty:
            self._defaults[name] = defaults
        if save is not None:
            # as a reload will read them
            self._settings = replace(self._settings, defaults=tuple(self._defaults.values()))
        self._aliases = self._collect_aliases()
        served = self._startup_models.get(name) or self._build_served(name)
        entry = self._with_defaults(RegisteredModel(served=served, files=found))
        entries = self._named if name in self._named else self._installed
        entries[name] = entry
        return entry

    def set_adapters(self, name: str, adapters: Sequence[AdapterSettings]) -> RegisteredModel:
        """Replaces the adapters of a known model and returns its entry."""
        self._adapters[name] = tuple(adapters)
        entries = self._named if name in self._named else self._installed
        entry = entries[name] = self._with_adapters(entries[name])
        return entry

    async def discover(self, name: str) -> None:
        """Scans the installed models if no model with that name is known yet."""
        if self.find(name) is None and self._settings.installed:
            await self.rescan()

    async def rescan(self) -> None:
        """Scans the installed models, at most once per `_RESCAN_INTERVAL`. Concurrent calls wait
        for the same scan."""
        if self._scan_task is None or self._scan_task.done():
            if time.monotonic() - self._scanned_at < _RESCAN_INTERVAL:
                return
            self._scan_task = asyncio.create_task(self._scan())
        await asyncio.shield(self._scan_task)

    @property
    def serves_installed(self) -> bool:
        """Whether models that are installed while the server runs can be requested."""
        return self._settings.installed

    def is_named(self, name: str) -> bool:
        """Returns whether a model was specified at startup. Any spelling of its name is accepted,
        such as library/name:latest."""
        parsed = parse_ollama_name(name)
        for spelled in (name, name if parsed is None else str(parsed)):
            entry = self.find_own(spelled)
            if entry is not None and entry.served.name in self._named:
                return True
        return False

    def named_paths(self) -> Sequence[Path]:
        """Returns the paths of the models specified at startup."""
        return [entry.files.path for entry in self._named.values()]

    async def refresh(self) -> None:
        """Scans the installed models after this server changed them."""
        if self._scan_task is not None:
            await asyncio.shield(self._scan_task)
        self._scanned_at = -math.inf
        await self.discover("")

    async def update(self, served: ServedModel) -> None:
        """Reads the files of a model again, without verifying digests. Errors are ignored, since
        the next load reports them."""
        with suppress(AppError):
            await self._share_read(self._update_tasks, served, _find_files)

    async def load_verified_files(self, served: ServedModel) -> ModelFiles:
        """Reads the current files of a model and verifies their digests. Raises AppError if this
        fails.

        Concurrent calls share one read. A read may take minutes and cannot be cancelled, and
        repeated requests from clients that disconnect must not occupy all threads.
        """
        try:
            return await self._share_read(self._verify_tasks, served, _resolve_verified)
        except AppError as error:
            if error.kind is not ErrorKind.MODEL_NOT_FOUND or served.name not in self._named:
                raise
            # the model is listed, so this is not a client error
            message = f"the files of {served.name} no longer exist: {error.message}"
            raise AppError(ErrorKind.MODEL_FILES, message) from error

    async def _share_read(
        self, tasks: _Tasks, served: ServedModel, read: Callable[[str | None], ModelFiles]
    ) -> ModelFiles:
        """Shares one read between all concurrent calls."""
        task = tasks.get(served.name)
        if task is None:
            work = self._read(served, read)
            task = tasks[served.name] = asyncio.create_task(work)
            task.add_done_callback(lambda done: _forget_task(tasks, served.name, done))
        return await asyncio.shield(task)

    async def _read(
        self, served: ServedModel, read: Callable[[str | None], ModelFiles]
    ) -> ModelFiles:
        """Reads the files on a thread. If the files are unchanged, the entry is not replaced,
        because other code compares entries and files by identity."""
        found = replace(await asyncio.to_thread(read, served.source), name=served.name)
        files = self.get_defaults(served.name).apply(found)
        for entries in (self._named, self._installed):
            entry = entries.get(served.name)
            if entry is not None and entry.served == served and entry.files != files:
                entries[served.name] = replace(entry, files=files)
        return files

    async def _scan(self) -> None:
        try:
            found, unfit = await asyncio.to_thread(_scan_installed, self._installed)
        except AppError as error:
            # known models are still served; all other models are reported as missing
            self._log_scan_error(error.message)
            return
        self._last_error = None
        if unfit and unfit != self._unservable:
            models = pluralize(len(unfit), "installed model")
            log.info("cannot serve %s: `mlxrunner show NAME` shows the reason", models)
        self._unservable = unfit
        self._installed = {
            name: self._reuse_entry(name, files) for name, files in found if name not in self._named
        }
        self._scanned_at = time.monotonic()

    def _log_scan_error(self, message: str) -> None:
        """Logs the error once, rather than for every request for a missing model."""
        if message != self._last_error:
            log.warning("cannot scan the installed models: %s", message)
        self._last_error, self._scanned_at = message, time.monotonic()

    def _reuse_entry(self, name: str, files: ModelFiles) -> RegisteredModel:
        """Returns the existing entry if the files are unchanged, because other code caches data by
        identity."""
        entry, known = self._build_entry(name, files), self._installed.get(name)
        return known if known is not None and known.files == entry.files else entry

    def _build_entry(self, name: str, files: ModelFiles) -> RegisteredModel:
        entry = RegisteredModel(served=self._build_served(name), files=replace(files, name=name))
        return self._with_defaults(entry)

    def _build_served(self, name: str) -> ServedModel:
        """Returns an installed model without its defaults."""
        keep_alive = self._settings.keep_alive
        # the adapters were trained on a model that was specified at startup
        model = ModelSettings(name=name, adapters=())
        return ServedModel(
            name=name,
            source=name,
            settings=self._settings.for_model(model),
            keep_alive=_DEFAULT_KEEP_ALIVE if keep_alive is None else keep_alive,
        )

    def _collect_aliases(self) -> Mapping[str, str]:
        """Returns the names of the models by alias."""
        served = self._startup_models.values()
        return {
            **{alias: one.name for one in self._defaults.values() for alias in one.aliases},
            **{alias: one.name for one in served for alias in one.aliases},
        }

    def _with_defaults(self, entry: RegisteredModel) -> RegisteredModel:
        """Also applies the adapters that were changed."""
        entry, defaults = self._with_adapters(entry), self._defaults.get(entry.served.name)
        if defaults is None:
            return entry
        return RegisteredModel(
            served=_apply_to_served(defaults, entry.served), files=defaults.apply(entry.files)
        )

    def _with_adapters(self, entry: RegisteredModel) -> RegisteredModel:
        adapters = self._adapters.get(entry.served.name)
        if adapters is None:
            return entry
        settings = replace(entry.served.settings, adapters=adapters)
        return replace(entry, served=replace(entry.served, settings=settings))


def _find_adapters(served: ServedModel | None) -> tuple[AdapterSettings, ...] | None:
    return None if served is None else served.settings.adapters


def _apply_to_served(defaults: ModelDefaults, served: ServedModel) -> ServedModel:
    context, keep_alive = defaults.context, defaults.keep_alive
    return replace(
        served,
        settings=served.settings if context is None else replace(served.settings, context=context),
        keep_alive=served.keep_alive if keep_alive is None else keep_alive,
        aliases=(*served.aliases, *defaults.aliases),
    )


def _index_defaults(settings: Settings) -> dict[str, ModelDefaults]:
    return {defaults.name: defaults for defaults in settings.defaults}


def _index_by_name(
    entries: Sequence[RegisteredModel], defaults: Mapping[str, ModelDefaults]
) -> Mapping[str, ServedModel]:
    """Returns the models by name. Raises AppError(INVALID) if a name or an alias is given twice."""
    names = [name for e in entries for name in (e.served.name, *e.served.aliases)]
    names += [alias for one in defaults.values() for alias in one.aliases]
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise AppError(
            ErrorKind.INVALID,
            f"two models are named {min(duplicates)!r}: give one of them another alias",
        )
    return {entry.served.name: entry.served for entry in entries}


def _resolve_verified(source: str | None) -> ModelFiles:
    return complete_config(store.resolve(source))


def _find_files(source: str | None) -> ModelFiles:
    return complete_config(store.find(source))


def _forget_task(tasks: _Tasks, name: str, task: asyncio.Task[ModelFiles]) -> None:
    del tasks[name]
    if not task.cancelled():
        task.exception()  # marks it as retrieved, because all waiting requests may be cancelled


def _scan_installed(known: Iterable[str]) -> tuple[list[tuple[str, ModelFiles]], list[str]]:
    """Returns the installed models that can be served, as (name, files), and the names of installed
    models that cannot be served. known: names that should not be logged again."""
    found: list[tuple[str, ModelFiles]] = []
    unfit: list[str] = []
    known = set(known)
    for entry in store.list_installed():
        try:
            found.append((entry.name, complete_config(entry.read())))
        except AppError as error:
            unfit.append(entry.name)
            log.debug("%s is installed but cannot be served: %s", entry.name, error.message)
    for name in sorted({name for name, _ in found} - known):
        log.debug("%s is installed and can be requested", name)
    return found, unfit
