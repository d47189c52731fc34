"""The LoRA adapters that an administrator loads and unloads while the server runs.

Knows: the registry, which stores the adapters of each model, the pool, the requests that use an
adapter. Must not know: HTTP, tensors. All code runs on the event loop, except disk access, which
uses threads.

The engine gets an adapter before requests can select it, and keeps it until the last request that
has selected it ends. A model that is loaded again reads the adapters of the registry.
"""

import asyncio
import logging
import os.path
from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.jobs import EngineCall, LoadAdapter, UnloadAdapter
from app.core.models import ModelPhase
from app.core.settings import AdapterSettings, is_adapter_name
from app.runners.pool import ModelPool
from app.serving.registry import ModelRegistry, RegisteredModel

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20

# More bytes than these would not stay in the page cache.
_MAX_READ_BYTES = 1 << 32

# The phases in which an engine has adapters, or will have them.
_LOADED: frozenset[ModelPhase] = frozenset({"loading", "ready", "stalled"})


class AdapterService:
    """Loads and unloads adapters, one at a time. A change that has begun is completed, even if the
    client disconnects."""

    def __init__(self, registry: ModelRegistry, pool: ModelPool) -> None:
        self._registry = registry
        self._pool = pool
        self._changing = asyncio.Lock()
        self._last_version = 0
        self._num_users: Counter[tuple[str, str]] = Counter()  # by the model's name and the key
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def use(self, model: str, adapter: AdapterSettings) -> Generator[None]:
        """Keeps an adapter loaded while the context is active. Raises AppError(MODEL_NOT_FOUND) if
        it was unloaded after the request was resolved."""
        entry = self._registry.find_own(model)
        if entry is None or adapter not in entry.adapters:
            raise _not_found_error(adapter.name, "model")
        user = (model, adapter.key)
        self._num_users[user] += 1
        try:
            yield
        finally:
            self._num_users[user] -= 1
            if not self._num_users[user]:
                del self._num_users[user]
                if adapter not in self._list_all(model):  # it is retired, or a reload removed it
                    self._start_task(self._remove_retired(model))

    async def load(self, model: str, name: str, path: str, *, in_place: bool) -> None:
        """Loads an adapter, and the model if necessary. in_place: whether it may replace the one
        with this name, which running requests continue to use. Raises AppError: INVALID if the name
        is taken or the adapter cannot be used, MODEL_NOT_FOUND for a path that does not exist, and
        the errors of a load of the model. Then nothing has changed."""
        if not is_adapter_name(name):
            raise AppError(
                ErrorKind.INVALID,
                "lora_name must have 1 to 64 letters, digits, '.', '_' and '-'",
                param="lora_name",
            )
        if not path or "\0" in path:
            raise AppError(
                ErrorKind.INVALID,
                "lora_path must be the path of a folder or of a GGUF file",
                param="lora_path",
            )
        await asyncio.shield(self._start_task(self._load(model, name, path, in_place=in_place)))

    async def unload(self, model: str, name: str) -> None:
        """Unloads an adapter once the requests that use it have ended; new requests no longer find
        it. Raises AppError(MODEL_NOT_FOUND)."""
        await asyncio.shield(self._start_task(self._unload(model, name)))

    async def _load(self, model: str, name: str, path: str, *, in_place: bool) -> None:
        async with self._changing:
            entry = self._find_entry(model)
            if entry.find_adapter(name) is not None and not in_place:
                raise AppError(
                    ErrorKind.INVALID,
                    f"{model} already has an adapter {name}: unload it first, or set load_inplace "
                    "to true to replace it",
                    param="lora_name",
                )
            found = await asyncio.to_thread(_read_files, path)
            self._last_version += 1
            adapter = AdapterSettings(name=name, path=found, version=self._last_version)
            await self._call(entry, LoadAdapter(key=adapter.key, path=adapter.path))
            known = [
                replace(one, retired=True) if one.name == name else one
                for one in self._list_all(model)
            ]
            self._set_adapters(model, [*known, adapter])
        log.info("the adapter %s of %s was loaded from %s", name, model, adapter.path)
        await self._remove_retired(model)

    async def _unload(self, model: str, name: str) -> None:
        async with self._changing:
            adapter = self._find_entry(model).find_adapter(name)
            if adapter is None:
                raise _not_found_error(name, "lora_name")
            self._set_adapters(
                model,
                [
                    replace(one, retired=True) if one == adapter else one
                    for one in self._list_all(model)
                ],
            )
        log.info("the adapter %s of %s was unloaded", name, model)
        await self._remove_retired(model)

    async def _remove_retired(self, model: str) -> None:
        """Removes the retired adapters of a model that no request uses."""
        async with self._changing:
            known = self._list_all(model)
            unused = [one for one in known if one.retired and not self._num_users[model, one.key]]
            if not unused:
                return
            # First, so that a model that is loaded again does not read them.
            self._set_adapters(model, [one for one in known if one not in unused])
            entry = self._find_entry(model)
            if self._pool.model_state(entry.served).phase not in _LOADED:
                return
            for adapter in unused:
                # A model that has failed no longer has adapters.
                with suppress(AppError):
                    await self._call(entry, UnloadAdapter(key=adapter.key))

    async def _call(self, entry: RegisteredModel, call: EngineCall[None]) -> None:
        """Calls the engine of a model, which is loaded if necessary."""
        async with self._pool.lease(entry.served) as lease:
            await lease.wait()
            try:
                await self._pool.get_handle(entry.served).call(call)
            except AppError as error:
                if error.kind is not ErrorKind.MODEL_FILES:
                    raise
                raise AppError(ErrorKind.INVALID, error.message, param="lora_path") from error

    def _find_entry(self, model: str) -> RegisteredModel:
        entry = self._registry.find_own(model)
        if entry is None:  # it was removed after the request was resolved
            raise AppError(ErrorKind.MODEL_NOT_FOUND, f"{model} is no longer served")
        return entry

    def _list_all(self, model: str) -> Sequence[AdapterSettings]:
        entry = self._registry.find_own(model)
        return () if entry is None else entry.served.settings.adapters

    def _set_adapters(self, model: str, adapters: Sequence[AdapterSettings]) -> None:
        self._find_entry(model)
        self._pool.apply(self._registry.set_adapters(model, adapters).served)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because the client may have disconnected


def _not_found_error(name: str, param: str) -> AppError:
    return AppError(
        ErrorKind.MODEL_NOT_FOUND,
        f"there is no adapter {name}: GET /v1/models lists the models and their adapters",
        param=param,
    )


def _read_files(given: str) -> str:
    """Reads the files of an adapter once, so that the engine finds them in the page cache and does
    not wait for the disk. Returns the path, with `~` expanded. Raises AppError(MODEL_NOT_FOUND) if
    it does not exist."""
    path = Path(os.path.expanduser(given))
    if not path.exists():
        raise AppError(
            ErrorKind.MODEL_NOT_FOUND,
            f"{path} does not exist: give the path of a folder or of a GGUF file on the server",
            param="lora_path",
        )
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            left = _MAX_READ_BYTES
            while left > 0 and (data := opened.read(_READ_BYTES)):
                left -= len(data)
    return str(path)
