"""Downloads models from the hub to the cache. This is the only module that transfers large files.

Knows: huggingface_hub, the location of blobs in its cache. Must not know: the contents of a model.

huggingface_hub creates the cache layout and downloads the small files. This module downloads the
large files with huggingface_hub's HTTP client, for two reasons: huggingface_hub restarts
interrupted downloads from the beginning, and it verifies only the size of a file, not its content.
The name of a blob is its SHA-256. A file gets this name only after its digest was verified. The ref
is updated when the revision is complete; until then, an earlier revision can still be served.
"""

import contextlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO, cast

# the type stubs of these functions leave unused types unknown
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
from app.store.hub.progress import (
    DownloadProgress,
    FileProgress,
    ProgressBarAdapter,
    ProgressListener,
)
from app.store.model_names import HubName

# The number of large files that are downloaded in parallel. This is sufficient to saturate the
# bandwidth, and an interruption leaves only a few partial files.
_DOWNLOAD_THREADS = 4

# the minimum free disk space in bytes that a download leaves
_RESERVED_BYTES = 1 << 30


def download(
    plan: DownloadPlan, out: TextIO | None = None, listener: FileProgress | None = None
) -> Path:
    """Downloads the missing files, verifies all files, and returns the folder. out: the stream for
    the progress display; None means stderr. listener: counts the bytes instead of the display, and
    may stop the download. Raises AppError. Data that was already received is kept, and the next
    attempt continues from it."""
    storage = repo_folder(plan.name.repo_id)
    large = [file for file in plan.files if file.sha256 is not None and _fits_http(file)]
    with translate_hub_errors(plan.name):
        _check_disk_space(plan)
        downloaded = [count_downloaded_bytes(storage, plan.commit, file) for file in large]
        progress: ProgressListener
        if listener is None:
            progress = DownloadProgress(sum(file.size for file in large), sum(downloaded), out)
        else:
            listener.begin(
                {
                    file.sha256: (file.size, done)
                    for file, done in zip(large, downloaded, strict=True)
                    if file.sha256 is not None
                }
            )
            progress = listener
        try:
            _download_files(plan, storage, large, progress)
        finally:
            progress.close()
        with disable_progress_bars():
            paths = [_place_in_snapshot(plan, file) for file in plan.files]
        for file, path in zip(plan.files, paths, strict=True):
            if file not in large:
                _verify_file(plan.name, path, file)
        _update_ref(storage, plan)
    return storage / "snapshots" / plan.commit


def _download_files(
    plan: DownloadPlan, storage: Path, files: Sequence[RemoteFile], progress: ProgressListener
) -> None:
    """Downloads files on several threads. They are daemon threads, so the process can exit without
    waiting for them. A thread that waits for an unresponsive hub ends only at its timeout, up to a
    minute after Ctrl-C."""
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
    except BaseException:  # also on Ctrl-C; each thread ends when it next receives data
        progress.stop()
        raise


def _download_blob(
    plan: DownloadPlan, storage: Path, file: RemoteFile, progress: ProgressListener
) -> None:
    """Downloads one large file to the blobs. Resumes a partial file, which may come from an older
    version of huggingface_hub that used the same name."""
    assert file.sha256 is not None
    blob = storage / "blobs" / file.sha256
    partial = blob.with_name(f"{file.sha256}.incomplete")
    lock = cache_folder() / ".locks" / storage.name / f"{file.sha256}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.is_file():
            if digests.sha256(blob, progress.add_verified) == file.sha256:
                return
            progress.restart(file.size, file.sha256)
            blob.unlink()
        began = _download_partial(plan, file, partial, progress)
        valid = digests.sha256(partial, progress.add_verified) == file.sha256
        if not valid and began:  # the earlier part of the file may be damaged
            progress.restart(file.size, file.sha256)
            partial.unlink()
            _download_partial(plan, file, partial, progress)
            valid = digests.sha256(partial, progress.add_verified) == file.sha256
        if not valid:
            partial.unlink()
            raise model_error(
                plan.name,
                f"{file.path} is corrupt: its SHA-256 does not match the hub's; try again",
            )
        partial.replace(blob)


def _download_partial(
    plan: DownloadPlan, file: RemoteFile, partial: Path, progress: ProgressListener
) -> int:
    """Downloads the rest of a file. Returns the number of bytes that were already present."""
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
            tqdm_class=cast(Any, ProgressBarAdapter(progress, file.sha256 or "")),
        )
    return began


def _place_in_snapshot(plan: DownloadPlan, file: RemoteFile) -> Path:
    """Places a file in the snapshot, either as a small file or as a link to an existing blob."""
    # snapshot_download is not used, because it waits for the repository's listing without a timeout
    path = hf_hub_download(
        plan.name.repo_id, file.path, revision=plan.commit, cache_dir=cache_folder()
    )
    return Path(path)


def _fits_http(file: RemoteFile) -> bool:
    """Returns whether the file can be downloaded with plain HTTP. For larger files, the hub
    supports only its own protocol, which huggingface_hub implements."""
    return file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE


def count_available_bytes() -> int:
    """Returns the number of bytes that downloads may use; negative if too few bytes are free."""
    return shutil.disk_usage(_find_disk()).free - _RESERVED_BYTES


def _find_disk() -> Path:
    """Returns a folder on the disk of the cache, which may not exist yet."""
    folder = cache_folder()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _check_disk_space(plan: DownloadPlan) -> None:
    if not plan.missing_bytes:
        return
    folder = _find_disk()
    free = shutil.disk_usage(folder).free
    if plan.missing_bytes + _RESERVED_BYTES > free:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{plan.name} needs {format_bytes(plan.missing_bytes)} more on the disk of {folder}, "
            f"of which {format_bytes(free)} are free, and {format_bytes(_RESERVED_BYTES)} must "
            "remain free: free some space, or set HF_HOME to a folder on another disk",
        )


def _verify_file(name: HubName, path: Path, file: RemoteFile) -> None:
    digest, expected = (
        (digests.git_sha1(path), file.git_sha1)
        if file.sha256 is None
        else (digests.sha256(path), file.sha256)
    )
    if digest != expected:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise model_error(
            name, f"{file.path} is corrupt: its digest does not match the hub's; try again"
        )


def _update_ref(storage: Path, plan: DownloadPlan) -> None:
    """Points the revision to this commit, atomically for concurrent readers."""
    revision = plan.name.revision or constants.DEFAULT_REVISION
    if revision == plan.commit:
        return
    ref = storage / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    beside = storage / f"{plan.commit}.ref"
    beside.write_text(plan.commit, encoding="ascii")
    beside.replace(ref)
