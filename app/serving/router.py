"""The model router: resolves the model of a request, waits until it is loaded, and forwards the
request.

Knows: the registry, the pool, the creation of a `Generation`. Must not know: HTTP, tensors, model
eviction.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.core.distributions import get_own_version, get_version
from app.core.errors import AppError, ErrorKind, redact_paths
from app.core.events import Event
from app.core.images import Image, RemoteImage
from app.core.jobs import EngineStats, Ledger, PrefixSnapshot
from app.core.model_files import (
    GenerationDefaults,
    ModelDefaults,
    ModelFiles,
    read_generation_defaults,
)
from app.core.models import ModelDetails, ModelPhase, ModelState, ServedModel, TensorDetails
from app.core.ports import ModelCard, ModelLibrary, ResolvedModel, RunnerState, RunnerStatus
from app.core.request_lifecycle import RequestLimits
from app.core.requests import Embeddings, EmbedRequest, GenerateRequest
from app.core.sampling_params import limit_logprobs
from app.core.settings import (
    MAX_DEFAULT_PARALLEL,
    AdapterSettings,
    Settings,
    needs_new_process,
)
from app.core.thread_pools import ThreadPools
from app.images.decoder import ImageDecoder
from app.images.fetch import ImageFetcher
from app.images.input import read_image
from app.images.processor import load_image_processor
from app.runners.pool import ModelLease, ModelPool
from app.serving.adapters import AdapterService
from app.serving.generation import Generation
from app.serving.image_input import fetch_images, limit_images, reject_all_images
from app.serving.model_describer import ModelDescriber
from app.serving.registry import ModelRegistry, RegisteredModel

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# the interval in seconds between two progress events while a request waits for its model, and the
# Retry-After value if the model did not load in time
_PROGRESS_INTERVAL, _LOADING_RETRY_AFTER = 1.0, 10

# Maps the phases of models to the state of the server, worst state first. Other phases count as
# ready, because a model that is not loaded or was evicted is loaded on the next request.
_STATES_BY_SEVERITY: Sequence[tuple[RunnerState, frozenset[ModelPhase]]] = (
    ("failed", frozenset({"failed", "refused"})),
    ("stalled", frozenset({"stalled"})),
    ("loading", frozenset({"loading", "queued"})),
)


# settings that may affect the output
_ENGINE_SETTINGS = (
    "quantize",
    "kv",
    "activations",
    "kv_layout",
    "experimental_metal",
    "parallel",
    "context",
    "context_shift",
    "memory",
    "cache",
    "multi_user",
    "exact",
    "prefill_chunk",
    "vision",
    "image_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolvedModel:
    """adapter: the model's adapter that the request selects."""

    entry: RegisteredModel
    card: ModelCard
    adapter: AdapterSettings | None = None


def _read_defaults(files: ModelFiles) -> GenerationDefaults:
    """Returns the model's own options. A file with an error is reported by the load."""
    try:
        return read_generation_defaults(files)
    except AppError:
        return GenerationDefaults()


def _entry_of(model: ResolvedModel) -> RegisteredModel:
    assert isinstance(model, _ResolvedModel), "another router resolved the model"
    return model.entry


def _adapter_of(model: ResolvedModel) -> AdapterSettings | None:
    assert isinstance(model, _ResolvedModel), "another router resolved the model"
    return model.adapter


def _list_choices(entry: RegisteredModel) -> Sequence[AdapterSettings | None]:
    """Returns the model's adapters, after None for the model without one."""
    return [None, *entry.adapters]


def _join_name(entry: RegisteredModel, adapter: AdapterSettings | None) -> str:
    """Returns the name by which requests select a model with an adapter."""
    return entry.served.name if adapter is None else f"{entry.served.name}:{adapter.name}"


class ModelRouter:
    """Implements `Generate` and `Models`.

    preload: the names of the models loaded at startup, which determine the server's health.
    load_wait: the maximum number of seconds that an embedding request waits for its model.
    limits: end waits for anything but a generation, which is limited by its caller; None for no
    limits.
    check_tokenizer: raises AppError if the tokenizer must not be used in this process. library: the
    models on disk. save_defaults: writes the defaults of a model to the configuration file; None
    without a file. can_reload: whether models can be loaded again. image_decoder: decodes the
    images of requests; None for a server without images. image_hosts: the names of the hosts from
    which images may be fetched.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        pool: ModelPool,
        preload: Sequence[str],
        workers: ThreadPools,
        *,
        load_wait: float,
        check_tokenizer: Callable[[ModelFiles], Awaitable[None]],
        library: ModelLibrary,
        limits: RequestLimits | None = None,
        save_defaults: Callable[[ModelDefaults], None] | None = None,
        can_reload: bool = True,
        image_decoder: ImageDecoder | None = None,
        image_hosts: Sequence[str] = (),
    ) -> None:
        self._registry = registry
        self.library = library
        self._limits = limits or RequestLimits(Settings())
        self._describer = ModelDescriber(workers)
        self._pool = pool
        self._adapters = AdapterService(registry, pool)
        self._preload_names = preload
        self._save_defaults = save_defaults
        self._can_reload = can_reload
        self._changing_defaults = asyncio.Lock()
        self._workers = workers
        self._load_wait = load_wait
        self._image_decoder = image_decoder
        self._image_fetcher = ImageFetcher(image_hosts)
        self._check_tokenizer = check_tokenizer
        self._generations: dict[str, asyncio.Task[Generation]] = {}
        # by model and by the key of the adapter, with the files of the model
        self._fingerprints: dict[str, tuple[ModelFiles, dict[str, str]]] = {}
        pool.on_unloaded = self._drop_generation

    async def preload_models(self) -> None:
        """Loads the models to preload. A single model is awaited; raises AppError if it cannot be
        loaded. Several models are loaded only while memory is free, without evictions."""
        for name in self._preload_names:
            self._pool.preload(self._find_entry(name).served)
        if len(self._preload_names) == 1:
            await self.load(await self.resolve(self._preload_names[0]))

    def replace_models(
        self,
        entries: Sequence[RegisteredModel],
        preload: Sequence[str],
        settings: Settings,
        *,
        reload_all: bool,
    ) -> None:
        """Replaces the models specified at startup, without an effect on running requests. A
        removed model is unloaded when it is idle. A model whose settings need a new process is
        unloaded after its running requests, and later requests wait for the new one; with
        `reload_all`, this applies to every model. Raises AppError(INVALID) for two models with the
        same name, and then changes nothing."""
        before = dict(self._registry.named())
        self._registry.replace_named(entries, settings)
        for name, old in before.items():
            if self._registry.find_own(name) is None:
                self._pool.retire(old.served)
                self._fingerprints.pop(name, None)
        for entry in self._registry.entries():
            name, old = entry.served.name, before.get(entry.served.name)
            self._fingerprints.pop(name, None)
            is_replaced = old is not None and _is_replaced(old.served, entry.served)
            if not (is_replaced or reload_all):
                self._pool.apply(entry.served)
                self._apply_to_generation(entry.served)
            else:
                self._pool.reload(entry.served)
        added = [name for name in preload if name not in self._preload_names]
        self._preload_names = preload
        for name in added:
            self._pool.preload(self._find_entry(name).served)

    def _apply_to_generation(self, served: ServedModel) -> None:
        def apply(created: asyncio.Task[Generation]) -> None:
            if not created.cancelled() and created.exception() is None:
                created.result().apply(served.settings)

        if (task := self._generations.get(served.name)) is not None:
            task.add_done_callback(apply)

    async def resolve(self, name: str | None) -> ResolvedModel:
        if name is None:
            entry = next(self._registry.entries(), None)
            if entry is None:
                message = "no model is available yet: try again in a moment"
                raise AppError(ErrorKind.LOADING, message)
            name = entry.served.name
        if (selected := self._find_adapter(name)) is not None:
            entry, adapter = selected
            return _ResolvedModel(
                entry=entry, card=self._build_card(entry, adapter), adapter=adapter
            )
        await self._registry.discover(name)
        entry = self._find_entry(name)
        if self._pool.model_state(entry.served).phase == "unloaded":
            # the card is built before the load, but must match the files that will be loaded
            await self._registry.update(entry.served)
            entry = self._find_entry(name)
        return _ResolvedModel(entry=entry, card=self._build_card(entry))

    async def rescan(self) -> None:
        await self._registry.discover("")

    @asynccontextmanager
    async def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
        entry, adapter = _entry_of(model), _adapter_of(model)
        if adapter is not None:
            request = replace(request, adapter=adapter.key)
        request = await self._fit_images(entry, request)
        async with self._lease(entry, adapter) as lease:
            if lease.is_waiting:
                async with aclosing(self._stream_after_load(entry, lease, request)) as events:
                    yield events
                return
            await lease.wait()  # raises immediately if the lease was rejected
            generation = await self._get_generation(entry)
            async with generation.open(request) as events:
                self._apply_keep_alive(entry, request)
                yield events

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        entry = _entry_of(model)
        if _adapter_of(model):
            message = f"embeddings of an adapter are not supported: request {entry.served.name}"
            raise AppError(ErrorKind.INVALID, message, param="model")
        if entry.files.adapter_path is not None:
            message = f"{entry.served.name} contains an adapter, and has no embeddings with it"
            raise AppError(ErrorKind.INVALID, message, param="model")
        async with self._lease(entry) as lease:
            try:
                async with asyncio.timeout(self._load_wait):
                    await lease.wait()
            except TimeoutError:
                message = (
                    f"the model is still loading ({lease.loading_event().progress} %): try again"
                )
                raise AppError(
                    ErrorKind.LOADING, message, retry_after=_LOADING_RETRY_AFTER
                ) from None
            generation = await self._get_generation(entry)
            embeddings = await generation.embed(request)
            self._apply_keep_alive(entry, request)
            return embeddings

    async def tokenize(
        self, model: ResolvedModel, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        return await self._with_generation(
            model,
            lambda generation: generation.tokenize(text, add_special_tokens=add_special_tokens),
        )

    async def tokenize_chat(self, model: ResolvedModel, request: GenerateRequest) -> Sequence[int]:
        request = await self._fit_images(_entry_of(model), request)
        return await self._with_generation(
            model, lambda generation: generation.tokenize_chat(request)
        )

    async def render_chat(self, model: ResolvedModel, request: GenerateRequest) -> str:
        request = await self._fit_images(_entry_of(model), request)
        return await self._with_generation(
            model, lambda generation: generation.render_chat(request)
        )

    async def _fit_images(
        self, entry: RegisteredModel, request: GenerateRequest
    ) -> GenerateRequest:
        """Omits images that the model cannot process. Raises AppError(INVALID) if they belong to
        the user's new question."""
        if not request.images:
            return request
        if self._has_vision(entry):
            return await fetch_images(limit_images(request), self._fetch_image)
        instead: list[str] = []
        if any(placed.required for placed in request.images):
            entries = self._registry.entries()
            instead = [one.served.name for one in entries if self._has_vision(one)]
        return reject_all_images(request, entry.served.name, instead)

    async def get_token_bytes(self, model: ResolvedModel, ids: Sequence[int]) -> Sequence[bytes]:
        return await self._with_generation(
            model, lambda generation: generation.get_token_bytes(ids)
        )

    async def get_tokenizer_info(self, model: ResolvedModel) -> Mapping[str, Any]:
        return await self._with_generation(
            model, lambda generation: generation.get_tokenizer_info()
        )

    async def detokenize(self, model: ResolvedModel, ids: Sequence[int]) -> str:
        return await self._with_generation(model, lambda generation: generation.detokenize(ids))

    def list_models(self) -> Sequence[ModelCard]:
        """Also returns each model with each of its adapters."""
        return [
            self._build_card(entry, adapter)
            for entry in self._registry.entries()
            for adapter in _list_choices(entry)
        ]

    def list_model_states(self) -> Sequence[ModelState]:
        return [self._pool.model_state(entry.served) for entry in self._registry.entries()]

    def model_state(self, model: ResolvedModel) -> ModelState:
        return self._pool.model_state(_entry_of(model).served)

    def get_prefix_snapshot(self, name: str) -> PrefixSnapshot | None:
        entry = self._registry.find(name)
        return None if entry is None else self._pool.get_prefix_snapshot(entry.served)

    def status(self) -> RunnerStatus:
        states = self.list_model_states()
        kept = [state for state in states if state.name in self._preload_names]
        phases: set[ModelPhase] = {
            # unloading with an error means that the model has failed; its phase becomes "failed"
            # later
            "failed" if state.phase == "unloading" and state.error is not None else state.phase
            for state in kept
        }
        bad: list[RunnerState] = [
            state for state, matching in _STATES_BY_SEVERITY if phases & matching
        ]
        loading = [state.progress for state in kept if state.phase in ("loading", "queued")]
        errors = [
            state.error if state.name in state.error else f"{state.name}: {state.error}"
            for state in kept
            if state.error is not None
        ]
        first = self._pool.get_handle(next(self._registry.entries()).served).status()
        return RunnerStatus(
            state=bad[0] if bad else "ready",
            progress=min(loading, default=100),
            stats=sum_engine_stats([state.stats for state in states]),
            error="; ".join(errors) or None,
            capacity=first.capacity,
            rejected=sum(state.rejected for state in states),
            preparing=sum(state.preparing for state in states),
            compiling=sum(state.compiling for state in states),
        )

    async def describe(self, model: ResolvedModel) -> ModelDetails:
        return await self._limits.wait(lambda: self._describe(_entry_of(model)))

    async def list_details(self) -> Sequence[ModelDetails]:
        return await self._limits.wait(self._list_details)

    async def _list_details(self) -> Sequence[ModelDetails]:
        await self.rescan()
        entries = list(self._registry.entries())
        self._describer.forget_others([entry.served.name for entry in entries])
        results = await asyncio.gather(*map(self._describe, entries), return_exceptions=True)
        for entry, details in zip(entries, results, strict=True):
            if isinstance(details, AppError):
                log.info("%s cannot be described: %s", entry.served.name, details.message)
            elif isinstance(details, BaseException):
                raise details
        pairs = zip(entries, results, strict=True)
        return [
            replace(details, name=_join_name(entry, adapter), parent=entry.served.name)
            if adapter
            else details
            for entry, details in pairs
            if isinstance(details, ModelDetails)
            for adapter in _list_choices(entry)
        ]

    async def _describe(self, entry: RegisteredModel) -> ModelDetails:
        facts = await self._describer.describe(entry.files, key=entry.served.name)
        capabilities = facts.capabilities - {"vision"}
        if self._has_vision(entry):
            capabilities |= {"vision"}
        return replace(
            facts,
            capabilities=capabilities,
            name=entry.served.name,
            context_length=self._context_length(entry),
            keep_alive=entry.served.keep_alive,
        )

    def _context_length(self, entry: RegisteredModel) -> int:
        """Returns the maximum number of positions in a sequence, which a loaded model may limit."""
        capacity = self._pool.capacity(entry.served)
        if capacity is not None:
            return capacity.context_length
        return entry.files.resolve_context_length(entry.served.settings.context)

    async def _fetch_image(self, image: RemoteImage) -> Image:
        data = await self._image_fetcher.read_url(image.url, image.param)
        read = partial(read_image, data, param=image.param, detail=image.detail)
        return await self._workers.run(read, size=len(data))

    def _has_vision(self, entry: RegisteredModel) -> bool:
        """Returns whether requests for a model may have images. A loaded model reports whether it
        has a vision tower; for others, the config is used."""
        settings = entry.served.settings
        if self._image_decoder is None or not settings.vision:
            return False
        capacity = self._pool.capacity(entry.served)
        if capacity is not None:
            return capacity.vision
        try:
            return load_image_processor(entry.files, max_tokens=settings.image_tokens) is not None
        except AppError:  # reported by the load
            return False

    async def list_tensors(self, model: ResolvedModel) -> Sequence[TensorDetails]:
        files = _entry_of(model).files
        return await self._limits.wait(lambda: self._describer.list_tensors(files))

    async def load(
        self, model: ResolvedModel, keep_alive: float | None = None, *, admin: bool = True
    ) -> ModelState:
        entry = _entry_of(model)
        await self._limits.wait(lambda: self._load(entry, keep_alive, admin=admin))
        return self._pool.model_state(entry.served)

    async def _load(self, entry: RegisteredModel, keep_alive: float | None, *, admin: bool) -> None:
        if admin:
            # also load a model that is refused after failures, because the cause may have been
            # fixed
            self._pool.get_handle(entry.served).reset_backoff()
        async with self._lease(entry) as lease:
            await asyncio.gather(lease.wait(), self._get_generation(entry))
            if keep_alive is not None:
                self._pool.set_keep_alive(entry.served, keep_alive, admin=admin)

    async def unload(self, model: ResolvedModel) -> ModelState:
        entry = _entry_of(model)
        await self._limits.wait(lambda: self._pool.unload(entry.served))
        return self._pool.model_state(entry.served)

    async def load_adapter(
        self, model: ResolvedModel, name: str, path: str, *, in_place: bool = False
    ) -> None:
        served = _entry_of(model).served
        await self._limits.wait(
            lambda: self._adapters.load(served.name, name, path, in_place=in_place)
        )

    async def unload_adapter(self, model: ResolvedModel, name: str) -> None:
        served = _entry_of(model).served
        await self._limits.wait(lambda: self._adapters.unload(served.name, name))

    def get_defaults(self, model: ResolvedModel) -> ModelDefaults:
        return self._registry.get_defaults(_entry_of(model).served.name)

    async def set_defaults(self, model: ResolvedModel, defaults: ModelDefaults) -> bool:
        name = _entry_of(model).served.name
        assert defaults.name == name
        async with self._changing_defaults:
            before = self._find_entry(name).served
            if not self._can_reload and defaults.context != self.get_defaults(model).context:
                message = "the context of a distributed model cannot change while it is loaded"
                raise AppError(ErrorKind.INVALID, message, param="context")
            self._registry.check_aliases(defaults)
            entry = await self._registry.set_defaults(defaults, self._save_defaults)
            after = entry.served
            # running requests keep their own one
            self._drop_generation(after)
            if after.settings.context != before.settings.context:
                self._fingerprints.pop(name, None)
                self._pool.reload(after)
            if after.keep_alive != before.keep_alive:
                self._pool.set_keep_alive(after, after.keep_alive, admin=True)
        log.info("the defaults of %s were changed", name)
        return self._save_defaults is not None

    def _find_entry(self, model: str) -> RegisteredModel:
        entry = self._registry.find(model)
        if entry is None:
            raise AppError(
                ErrorKind.MODEL_NOT_FOUND,
                f"the model {model[:200]!r} does not exist: GET /v1/models lists the "
                "available models",
                param="model",
            )
        return entry

    def _find_adapter(self, name: str) -> tuple[RegisteredModel, AdapterSettings] | None:
        """Finds a model and its adapter by MODEL:ADAPTER, or by the adapter's name alone, as in
        vLLM, unless a model has that name."""
        name = name.removesuffix(":latest")
        model, _, last = name.rpartition(":")
        entry = self._registry.find_own(model) if model else None
        if entry is not None and (adapter := entry.find_adapter(last)) is not None:
            return entry, adapter
        if self._registry.find_own(name) is not None:
            return None
        pairs = ((entry, entry.find_adapter(name)) for entry in self._registry.entries())
        return next(((entry, found) for entry, found in pairs if found is not None), None)

    def _build_card(
        self, entry: RegisteredModel, adapter: AdapterSettings | None = None
    ) -> ModelCard:
        settings, files = entry.served.settings, entry.files
        capacity = self._pool.capacity(entry.served)
        parallel = settings.parallel if capacity is None else capacity.parallel
        return ModelCard(
            id=_join_name(entry, adapter),
            created=files.created,
            context_length=self._context_length(entry),
            system_fingerprint=self._get_fingerprint(entry, adapter),
            parent=entry.served.name if adapter else None,
            aliases=() if adapter else entry.served.aliases,
            own_name=None if adapter else _own_name(entry.served),
            folder=entry.served.folder,
            vision=self._has_vision(entry),
            defaults=_read_defaults(files),
            logprobs_limit=limit_logprobs(
                settings.max_logprobs,
                vocab_size=files.sampleable_vocab_size,
                parallel=parallel or MAX_DEFAULT_PARALLEL,
            ),
        )

    def _get_fingerprint(self, entry: RegisteredModel, adapter: AdapterSettings | None) -> str:
        """Returns the fingerprint of the model's files. It is cached, since computing it takes a
        millisecond."""
        name, key = entry.served.name, "" if adapter is None else adapter.key
        current = self._pool.loaded_files(entry.served) or entry.files
        known: dict[str, str] = {}
        if name in self._fingerprints and self._fingerprints[name][0] is current:
            known = self._fingerprints[name][1]
        if key not in known:
            keys = {"", *(one.key for one in entry.adapters)}
            known = {key: value for key, value in known.items() if key in keys}
            known[key] = compute_fingerprint(current, entry.served.settings, adapter)
            self._fingerprints[name] = (current, known)
        return known[key]

    @asynccontextmanager
    async def _lease(
        self, entry: RegisteredModel, adapter: AdapterSettings | None = None
    ) -> AsyncGenerator[ModelLease]:
        # the settings may have changed since the request was resolved
        name = entry.served.name
        current = self._registry.find_own(name) or entry
        try:
            with self._adapters.use(name, adapter) if adapter else nullcontext():
                async with self._pool.lease(current.served) as lease:
                    yield lease
        finally:
            self._drop_if_unloaded(entry)

    def _apply_keep_alive(
        self, entry: RegisteredModel, request: GenerateRequest | EmbedRequest
    ) -> None:
        """Applies the keep-alive of an accepted request."""
        if request.keep_alive is not None:
            self._pool.set_keep_alive(entry.served, request.keep_alive, admin=request.admin)

    async def _stream_after_load(
        self, entry: RegisteredModel, lease: ModelLease, request: GenerateRequest
    ) -> AsyncGenerator[Sequence[Event]]:
        """Yields `ModelLoading` periodically until the model is loaded, then the request's own
        events."""
        # load the tokenizer and the templates while the weights are loaded
        loaded = asyncio.gather(lease.wait(), self._get_generation(entry))
        try:
            while not loaded.done():
                yield [lease.loading_event()]
                await asyncio.wait({loaded}, timeout=_PROGRESS_INTERVAL)
            loaded.result()
        finally:
            loaded.cancel()
            await asyncio.gather(loaded, return_exceptions=True)
        # get it again, because the previous one may belong to a runner that was stopping
        generation = await self._get_generation(entry)
        async with generation.open(request) as events:
            self._apply_keep_alive(entry, request)
            async for batch in events:
                yield batch

    async def _with_generation(
        self, model: ResolvedModel, use: Callable[[Generation], Awaitable[Result]]
    ) -> Result:
        """Calls `use` with the model's `Generation`, without loading the weights."""
        entry = _entry_of(model)

        async def call() -> Result:
            return await use(await self._get_generation(entry))

        try:
            return await self._limits.wait(call, self._limits.compute_deadline())
        finally:
            self._drop_if_unloaded(entry)

    async def _get_generation(self, entry: RegisteredModel) -> Generation:
        """Returns the `Generation` of a model. It is created once, and kept while the model is
        loaded. Raises AppError if the tokenizer or the templates are invalid."""
        name = entry.served.name
        task = self._generations.get(name)
        if task is None:
            task = self._generations[name] = asyncio.create_task(
                self._create_generation(entry.served)
            )
            task.add_done_callback(lambda made: self._drop_if_failed(name, made))
        # other requests may wait for the same task
        return await asyncio.shield(task)

    def _drop_if_failed(self, name: str, task: asyncio.Task[Generation]) -> None:
        """Drops a failed task, so that the next request tries again."""
        failed = task.cancelled() or task.exception() is not None
        if failed and self._generations.get(name) is task:
            del self._generations[name]

    async def _create_generation(self, served: ServedModel) -> Generation:
        engine = self._pool.get_handle(served)
        try:
            files = await self._registry.load_verified_files(served)
            await self._check_tokenizer(files)
            make = partial(
                Generation, files, engine, served.settings, self._workers, self._image_decoder
            )
            return await asyncio.to_thread(make)
        except AppError as error:
            log.error("%s: %s", served.name, error.message)
            entry = self._registry.find(served.name)
            raise redact_paths(error, entry.files.path if entry else None, served.name) from error

    def _drop_if_unloaded(self, entry: RegisteredModel) -> None:
        """Drops the `Generation` of a model that was never loaded and has no requests. The pool
        does not report such models as unloaded."""
        state = self._pool.model_state(entry.served)
        if not state.leases and state.phase in ("unloaded", "refused"):
            self._drop_generation(entry.served)

    def _drop_generation(self, served: ServedModel) -> None:
        """Drops the `Generation` of a model to free the memory of its tokenizer. Running requests
        continue to use it."""
        self._generations.pop(served.name, None)


def _is_replaced(before: ServedModel, after: ServedModel) -> bool:
    """Returns whether the loaded model can no longer be used after a reload."""
    return before.source != after.source or needs_new_process(before.settings, after.settings)


def sum_engine_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the sum of the statistics of several engines."""
    misses: dict[str, int] = {}
    for one in stats:
        for reason, count in one.prefix_miss_counts:
            misses[reason] = misses.get(reason, 0) + count
    neutral = EngineStats()
    plain = {
        name: sum(getattr(one, name) for one in stats)
        for name in EngineStats.__struct_fields__
        if isinstance(getattr(neutral, name), int)
    }
    ledger = {
        name: sum(getattr(one.ledger, name) for one in stats) for name in Ledger.__struct_fields__
    }
    hits = [one.prefix_hit_counts for one in (neutral, *stats)]
    return EngineStats(
        **plain,
        ledger=Ledger(**ledger),
        prefix_hit_counts=tuple(map(sum, zip(*hits, strict=True))),
        prefix_miss_counts=tuple(misses.items()),  # pyright: ignore[reportArgumentType]  # the reasons are the same
    )


def compute_fingerprint(
    files: ModelFiles, settings: Settings, adapter: AdapterSettings | None = None
) -> str:
    """Returns the system fingerprint. It changes whenever the output for a given seed may change:
    with the model and its weights, the adapter of the request, the versions of mlxrunner and MLX,
    and the engine's settings."""
    parts = (
        get_own_version(),
        get_version("mlx"),
        files.name,
        str(files.weight_bytes),
        files.weights_digest,
        repr(sorted((name, str(value)) for name, value in files.config.items())),
        repr([getattr(settings, name) for name in _ENGINE_SETTINGS]),
        repr(adapter and _read_versions(Path(adapter.path))),
        repr(files.adapter_path and _read_versions(files.adapter_path)),
    )
    return f"fp_{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"


def _read_versions(adapter: Path) -> list[tuple[str, int, int]]:
    """Returns the name, the size and the modification time of each file of an adapter, which is a
    folder or a file. One that cannot be read is reported by the load."""
    with suppress(OSError):
        paths = sorted(adapter.iterdir()) if adapter.is_dir() else [adapter]
        found = [(path.name, path.stat()) for path in paths]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
    return []


def _own_name(served: ServedModel) -> str:
    """Returns the name of a model without its alias."""
    if served.folder is not None:
        return served.folder.name
    return served.name if served.source is None else served.source
