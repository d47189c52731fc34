"""Installs, creates and deletes models while the server runs.

Knows: the stores, the registry of models. Must not know: HTTP, which models are loaded. All code
runs on the event loop, except disk and network access, which uses threads.

One download and one upload can run at a time. If a caller stops waiting, the work on the thread
ends at its next check. The next download or upload can start only then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from app import store
from app.core.errors import AppError, ErrorKind, mark_client_text, redact_paths
from app.core.model_files import ModelFiles, read_generation_defaults
from app.core.models import (
    DownloadPreview,
    LayerProgress,
    LibraryStep,
    MemoryRequirement,
    ModelRecipe,
)
from app.core.ports import BlobWriter
from app.core.thread_pools import CancelToken, WorkCancelled
from app.engine.model_info import check_config, complete_config
from app.serving.registry import ModelRegistry, RegisteredModel
from app.store.hub.progress import FileProgress
from app.store.installed import check_not_of_other_program
from app.store.library_names import resolve_hub_name
from app.store.model_names import HubName, OllamaName, parse_hub_name, parse_ollama_name
from app.store.ollama import manifest, writer
from app.store.ollama.create import create_model

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    # the hub's library is imported only for a download
    from app.store.hub.download_plan import DownloadPlan

Result = TypeVar("Result")

# estimates the memory of a model with its settings, and the memory for all models (device_budget)
EstimateMemory = Callable[[ModelFiles], Awaitable[MemoryRequirement]]

# the interval in seconds between two progress reports of a download
_PROGRESS_INTERVAL = 0.2

# clients check for this text
_MISSING_MODEL = "pull model manifest: file does not exist"

# the interval in seconds at which unused uploads are deleted
_SWEEP_INTERVAL = 3600.0


class InstalledModels:
    """Implements `app.core.ports.ModelLibrary`."""

    def __init__(self, registry: ModelRegistry, estimate: EstimateMemory | None = None) -> None:
        """estimate: estimates the memory of a model; None for a server that installs none."""
        self._registry = registry
        self._estimate = estimate
        self._download: asyncio.Task[None] | None = None
        self._upload: asyncio.Lock = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._previewing = asyncio.Lock()

    @asynccontextmanager
    async def sweep_uploads(self) -> AsyncGenerator[None]:
        """Deletes unused uploads periodically until the context exits."""
        if not self._registry.serves_installed:  # so no uploads are accepted
            yield
            return
        task = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def preview(self, name: str) -> DownloadPreview:
        self._check_serves_installed()
        assert self._estimate is not None
        hub_name = _resolve_hub_name(name)
        # an estimate takes a process
        async with self._previewing:
            with TemporaryDirectory(prefix="mlxrunner-preview-") as folder:
                plan, files = await asyncio.to_thread(_read_headers, hub_name, Path(folder))
                try:
                    need = await self._estimate(files)
                except AppError as error:
                    redacted = redact_paths(error, files.path, files.name)
                    raise AppError(ErrorKind.INVALID, redacted.marked_message) from error
        return await asyncio.to_thread(_build_preview, plan, files, need)

    async def pull(self, name: str) -> AsyncGenerator[LibraryStep]:
        self._check_serves_installed()
        yield LibraryStep(status="pulling manifest")
        await self._registry.discover(name)
        entry = self._registry.find_own(name)
        if entry is not None and (parse_hub_name(name) is None or _is_in_ollama_store(entry)):
            # a model of Ollama's store is used as it is
            yield LibraryStep(status="success")
            return
        async for step in self._download_steps(_resolve_hub_name(name)):
            yield step
        yield LibraryStep(status="writing manifest")
        await self._registry.refresh()
        yield LibraryStep(status="success")

    async def create(self, recipe: ModelRecipe) -> AsyncGenerator[LibraryStep]:
        self._check_serves_installed()
        name = self._parse_new_name(recipe.name)
        yield LibraryStep(status="reading model metadata")
        token = CancelToken()
        async with self._writing:
            work = asyncio.create_task(
                asyncio.to_thread(_create, name, recipe, self._find_base(recipe.base), token)
            )
            try:
                await asyncio.shield(work)
            except WorkCancelled as error:
                raise AssertionError("a creation that is awaited was cancelled") from error
            finally:
                token.cancel()
                with suppress(Exception):
                    await asyncio.shield(work)
        yield LibraryStep(status="writing manifest")
        await self._registry.refresh()
        yield LibraryStep(status="success")

    async def copy(self, source: str, destination: str) -> None:
        self._check_serves_installed()
        recipe = ModelRecipe(name=destination, base=source)
        async for _ in self.create(recipe):
            pass

    async def delete(self, name: str) -> None:
        if self._registry.is_named(name):
            raise _named_error(name)
        async with self._writing:
            await asyncio.to_thread(_delete, name, self._registry.named_paths())
        await self._registry.refresh()

    async def has_blob(self, digest: str) -> bool:
        sha256 = writer.parse_digest(digest)

        def find() -> bool:
            writer.touch_upload(sha256)
            return writer.get_blob_path(sha256).is_file()

        return await asyncio.to_thread(find)

    @asynccontextmanager
    async def upload_blob(self, digest: str) -> AsyncGenerator[BlobWriter]:
        sha256 = writer.parse_digest(digest)
        if self._upload.locked():
            message = "another upload is running: try again when it has finished"
            raise AppError(ErrorKind.BUSY, message, code="upload_running", retry_after=10)
        async with self._upload:
            await asyncio.to_thread(writer.delete_unused_uploads)
            upload = _UploadOnThread(await asyncio.to_thread(writer.BlobUpload, sha256))
            try:
                yield upload
            finally:
                await upload.close()

    async def _sweep(self) -> None:
        while True:
            try:
                if count := await asyncio.to_thread(writer.delete_unused_uploads):
                    log.info("deleted %d uploaded files that no model uses", count)
            except OSError as error:
                log.warning("unused uploads cannot be deleted: %s", error)
            await asyncio.sleep(_SWEEP_INTERVAL)

    def _check_serves_installed(self) -> None:
        if not self._registry.serves_installed:
            raise AppError(
                ErrorKind.INVALID,
                "this server serves only the models that were named when it was started: start it "
                "with --installed to install and create models",
            )

    def _parse_new_name(self, text: str) -> OllamaName:
        name = parse_ollama_name(text)
        if name is None:
            raise AppError(ErrorKind.INVALID, f"invalid model name: {_quote(text)}")
        taken = self._registry.find_own(str(name))
        if taken is not None and taken.files.path != manifest.get_manifest_path(name):
            message = f"{_quote(text)} is the name of a model elsewhere: choose another name"
            raise AppError(ErrorKind.INVALID, message)
        return name

    def _find_base(self, name: str | None) -> ModelFiles | None:
        if name is None:
            return None
        entry = self._registry.find(name)
        if entry is None:
            raise AppError(ErrorKind.MODEL_NOT_FOUND, f"model {_quote(name)} not found")
        return entry.files

    async def _download_steps(self, name: HubName) -> AsyncGenerator[LibraryStep]:
        """Downloads a model on a thread. Closing the generator stops the download."""
        if self._download is not None and not self._download.done():
            message = "another download is running: try again when it has finished"
            raise AppError(ErrorKind.BUSY, message, code="download_running", retry_after=10)
        progress = FileProgress()
        work = asyncio.create_task(asyncio.to_thread(_download, name, progress))
        self._download = work
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            is_verifying = False
            while not work.done():
                await asyncio.wait({work}, timeout=_PROGRESS_INTERVAL)
                if is_verifying:
                    continue
                for sha256, total, completed in progress.snapshot():
                    yield _layer_step(sha256, total, completed)
                if is_verifying := progress.is_received():
                    yield LibraryStep(status="verifying sha256 digest")
            work.result()
            if not is_verifying:
                for sha256, total, _ in progress.snapshot():
                    yield _layer_step(sha256, total, total)
                yield LibraryStep(status="verifying sha256 digest")
        finally:
            progress.stop()


class _UploadOnThread:
    """Runs the steps of an upload on a thread, one after another. Implements
    `app.core.ports.BlobWriter`."""

    def __init__(self, upload: writer.BlobUpload) -> None:
        self._upload = upload
        self._step: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        await self._run(partial(self._upload.write, data))

    async def commit(self) -> None:
        await self._run(self._upload.commit)

    async def close(self) -> None:
        if self._step is not None:  # a cancelled step is still running
            await asyncio.gather(self._step, return_exceptions=True)
        await asyncio.to_thread(self._upload.close)

    async def _run(self, work: Callable[[], None]) -> None:
        self._step = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.shield(self._step)


def _is_in_ollama_store(entry: RegisteredModel) -> bool:
    name = parse_ollama_name(entry.served.source or "")
    return name is not None and entry.files.path == manifest.get_manifest_path(name)


def _layer_step(sha256: str, total: int, completed: int) -> LibraryStep:
    return LibraryStep(
        layer=LayerProgress(digest=f"sha256:{sha256}", total=total, completed=completed)
    )


def _resolve_hub_name(name: str) -> HubName:
    """Returns the repository as `mlxrunner pull` does. The text that clients check for comes first
    in the error."""
    try:
        return resolve_hub_name(name)
    except AppError as error:
        raise AppError(error.kind, f"{_MISSING_MODEL}: {error.marked_message}") from error


def _read_headers(name: HubName, folder: Path) -> tuple["DownloadPlan", ModelFiles]:
    """Plans a download and reads the headers of the weights. Runs on a thread."""
    from app.store.hub.weight_headers import write_weight_headers

    plan = _plan_download(name)
    return plan, complete_config(write_weight_headers(plan, folder))


def _build_preview(
    plan: "DownloadPlan", files: ModelFiles, need: MemoryRequirement
) -> DownloadPreview:
    """Runs on a thread."""
    from app.store.hub.download import count_available_bytes

    return DownloadPreview(
        name=str(plan.name),
        commit=plan.commit,
        size=plan.total_bytes,
        missing=plan.missing_bytes,
        context_length=files.context_length,
        memory_needed=need.min_bytes,
        memory_available=need.device_budget,
        disk_available=count_available_bytes(),
    )


def _download(name: HubName, progress: FileProgress) -> None:
    """Downloads a model. Runs on a thread."""
    from app.store.hub.download import download
    from app.store.hub.weight_headers import read_gguf_config

    plan = _plan_download(name)
    if plan.is_gguf:
        _check_config(name, read_gguf_config(plan))
    download(plan, listener=progress)


def _plan_download(name: HubName) -> "DownloadPlan":
    """Plans the download of a model. Raises AppError(INVALID) for a config that is not supported,
    which is not known yet for a GGUF file."""
    from app.store.hub.download_plan import plan_download

    try:
        plan = plan_download(name)
    except AppError as error:
        if error.kind is not ErrorKind.MODEL_NOT_FOUND:
            raise
        message = f"{_MISSING_MODEL}: {error.marked_message}"
        raise AppError(error.kind, message) from error
    if not plan.is_gguf:
        _check_config(name, plan.config)
    return plan


def _check_config(name: HubName, config: Mapping[str, Any]) -> None:
    try:
        check_config(str(name), config)
    except AppError as error:
        raise AppError(ErrorKind.INVALID, error.marked_message) from error


def _create(
    name: OllamaName, recipe: ModelRecipe, base: ModelFiles | None, token: CancelToken
) -> None:
    """Creates a model, and deletes it again if it cannot be served. Runs on a thread."""
    path = manifest.get_manifest_path(name)
    before = path.read_bytes() if path.is_file() else None
    try:
        create_model(name, recipe, base, token)
        read_generation_defaults(complete_config(store.find(_full_name(name))))
    except AppError as error:
        _restore(name, path, before)
        raise AppError(
            ErrorKind.INVALID if error.kind is ErrorKind.MODEL_FILES else error.kind,
            redact_paths(error, path, str(name)).marked_message,
        ) from error


def _full_name(name: OllamaName) -> str:
    """Returns the full name, which cannot be the name of a folder or of a repository on the hub."""
    return f"{name.host}/{name.namespace}/{name.model}:{name.tag}"


def _restore(name: OllamaName, path: Path, before: bytes | None) -> None:
    if before is not None:
        writer.write_manifest_file(name, before)
    elif path.is_file():
        writer.delete_manifest(name)


def _delete(text: str, protected: Sequence[Path]) -> None:
    """Deletes a model in Ollama's store or a repository in the hub's cache. Raises
    AppError(INVALID) if one of the paths `protected` belongs to it. Runs on a thread."""
    from app.store.hub.cache import delete_repository, repo_folder

    ollama, hub = parse_ollama_name(text), parse_hub_name(text)
    if ollama is not None and (path := manifest.get_manifest_path(ollama)).is_file():
        _check_unprotected(text, path, protected)
        writer.delete_manifest(ollama)
        return
    try:
        if hub is not None:
            _check_unprotected(text, repo_folder(hub.repo_id), protected)
            delete_repository(hub)
            return
    except FileNotFoundError:
        pass
    try:
        check_not_of_other_program(text)
    except AppError as error:
        raise redact_paths(error, None, text) from error
    raise AppError(ErrorKind.MODEL_NOT_FOUND, f"model '{_quote(text)}' not found")


def _check_unprotected(name: str, target: Path, protected: Sequence[Path]) -> None:
    """Raises AppError(INVALID) if one of the paths `protected` is `target` or in it."""
    if any(_is_in(one, target) for one in protected):
        raise _named_error(name)


def _is_in(path: Path, ancestor: Path) -> bool:
    """Returns whether `path` is `ancestor` or in it. Compares the files, because a file may have
    several paths, for example if the file system ignores case."""
    resolved = path.resolve()
    for one in (resolved, *resolved.parents):
        with suppress(OSError):  # one of them does not exist
            if one.samefile(ancestor):
                return True
    return False


def _named_error(name: str) -> AppError:
    message = f"{_quote(name)} was named when the server was started: it cannot be deleted"
    return AppError(ErrorKind.INVALID, message)


def _quote(name: str) -> str:
    return mark_client_text(name[:200])
