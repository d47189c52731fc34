"""Downloads of models from the hub to the cache: the only module that transfers large files.

Knows: huggingface_hub, the location of blobs in its cache. Must not know: the contents of a model.

huggingface_hub creates the cache layout and fetches the small files. Large files are fetched here,
with its HTTP client, because huggingface_hub restarts interrupted files from the beginning and only
compares sizes, not contents. A blob gets its name, which is its SHA-256, only when it has that
digest; the ref is updated when the revision is complete. Until then an earlier revision continues
to be served.
"""

import contextlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO, cast

# their stubs leave unused types unknown
from huggingface_hub import (
    constants,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    hf_hub_url,
)
from huggingface_hub.file_download import http_get  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    disable_progress_bars,
)

from app.core.errors import AppError, ErrorKind
from app.core.units import format_bytes
from app.store import digests
from app.store.hub.cache import cache_folder, repo_folder
from app.store.hub.download_plan import DownloadPlan, RemoteFile, count_downloaded_bytes
from app.store.hub.errors import model_error, translate_hub_errors
from app.store.hub.progress import DownloadProgress, ProgressBarAdapter
from app.store.model_names import HubName

# parallel large files: enough to use the bandwidth, few enough that an interruption leaves few
# partial files
_DOWNLOAD_THREADS = 4

# bytes of disk space that a download leaves free
_RESERVED_BYTES = 1 << 30


def download(plan: DownloadPlan, out: TextIO | None = None) -> Path:
    """Downloads what is missing, verifies everything, and returns the folder. out: where progress
    is written; None is stderr. Raises AppError; data received before stays, and the next attempt
    continues from it."""
    storage = repo_folder(plan.name.repo_id)
    large = [file for file in plan.files if file.sha256 is not None and _fits_http(file)]
    with translate_hub_errors(plan.name):
        _check_disk_space(plan)
        total = sum(file.size for file in large)
        here = sum(count_downloaded_bytes(storage, plan.commit, file) for file in large)
        progress = DownloadProgress(total, here, out)
        try:
            _download_files(plan, storage, large, progress)
        finally:
            progress.close()
        with disable_progress_bars():
            places = [_place_in_snapshot(plan, file) for file in plan.files]
        for file, place in zip(plan.files, places, strict=True):
            if file not in large:
                _verify_file(plan.name, place, file)
        _update_ref(storage, plan)
    return storage / "snapshots" / plan.commit


def _download_files(
    plan: DownloadPlan, storage: Path, files: Sequence[RemoteFile], progress: DownloadProgress
) -> None:
    """Downloads files on threads. The threads are daemons, which no exit waits for: a thread
    waiting for an unresponsive hub only ends after its timeout, a minute after Ctrl-C."""
    waiting: SimpleQueue[RemoteFile] = SimpleQueue()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    for file in files:
        waiting.put(file)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                file = waiting.get_nowait()
                try:
                    _download_blob(plan, storage, file, progress)
                except BaseException as error:
                    ended.put(error)
                    return
                ended.put(None)

    for _ in range(min(_DOWNLOAD_THREADS, len(files))):
        threading.Thread(target=work, name="download", daemon=True).start()
    try:
        for _ in files:
            if (error := ended.get()) is not None:
                raise error
    except BaseException:  # Ctrl-C too: the threads end when they next receive data
        progress.stop()
        raise


def _download_blob(
    plan: DownloadPlan, storage: Path, file: RemoteFile, progress: DownloadProgress
) -> None:
    """Downloads one large file to the blobs. Continues a partial file, including one left by an
    older huggingface_hub, which used the same name."""
    assert file.sha256 is not None
    blob = storage / "blobs" / file.sha256
    partial = blob.with_name(f"{file.sha256}.incomplete")
    lock = cache_folder() / ".locks" / storage.name / f"{file.sha256}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.is_file():
            if digests.sha256(blob) == file.sha256:
                return
            progress.add(-file.size)
            blob.unlink()
        began = _download_partial(plan, file, partial, progress)
        whole = digests.sha256(partial) == file.sha256
        if not whole and began:  # the earlier part may be damaged
            progress.add(-file.size)
            partial.unlink()
            _download_partial(plan, file, partial, progress)
            whole = digests.sha256(partial) == file.sha256
        if not whole:
            partial.unlink()
            raise model_error(
                plan.name,
                f"{file.path} is corrupt: its SHA-256 does not match the hub's; try again",
            )
        partial.replace(blob)


def _download_partial(
    plan: DownloadPlan, file: RemoteFile, partial: Path, progress: DownloadProgress
) -> int:
    """Downloads the rest of a file. Returns the number of bytes that existed before."""
    if partial.is_file() and partial.stat().st_size > file.size:
        partial.unlink()
    with partial.open("ab") as out:
        began = out.tell()
        http_get(
            hf_hub_url(plan.name.repo_id, file.path, revision=plan.commit),
            out,
            resume_size=began,
            headers={**build_hf_headers(), "Accept-Encoding": "identity"},
            expected_size=file.size,
            tqdm_class=cast(Any, ProgressBarAdapter(progress)),
        )
    return began


def _place_in_snapshot(plan: DownloadPlan, file: RemoteFile) -> Path:
    """Places a file in the snapshot: a small file, or a link to an existing blob."""
    # not snapshot_download, which waits for the repository's listing without a timeout
    place = hf_hub_download(
        plan.name.repo_id, file.path, revision=plan.commit, cache_dir=cache_folder()
    )
    return Path(place)


def _fits_http(file: RemoteFile) -> bool:
    """Returns whether plain HTTP suffices. Above this size the hub only supports its own protocol,
    which huggingface_hub implements."""
    return file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE


def _check_disk_space(plan: DownloadPlan) -> None:
    if not plan.missing_bytes:
        return
    folder = cache_folder()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if plan.missing_bytes + _RESERVED_BYTES > free:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{plan.name} needs {format_bytes(plan.missing_bytes)} more on the disk of "
            f"{folder}, which has "
            f"{format_bytes(free)} free: free some space, or set HF_HOME to a folder on "
            "another disk",
        )


def _verify_file(name: HubName, path: Path, file: RemoteFile) -> None:
    found, wanted = (
        (digests.git_sha1(path), file.git_sha1)
        if file.sha256 is None
        else (digests.sha256(path), file.sha256)
    )
    if found != wanted:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise model_error(
            name, f"{file.path} is corrupt: its digest does not match the hub's; try again"
        )


def _update_ref(storage: Path, plan: DownloadPlan) -> None:
    """Points the revision to this commit, atomically for readers."""
    revision = plan.name.revision or constants.DEFAULT_REVISION
    if revision == plan.commit:
        return
    ref = storage / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    beside = storage / f"{plan.commit}.ref"
    beside.write_text(plan.commit, encoding="ascii")
    beside.replace(ref)
