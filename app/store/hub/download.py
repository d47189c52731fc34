"""A model from the hub to the cache: the one module that moves more than a few kilobytes.

Knows: huggingface_hub, and where its cache keeps blobs. Must not know: what a model is made of.

huggingface_hub lays out the cache, and fetches the small files. Two things it does not do for the
large ones, so they are fetched here, with its own request: it begins a file anew when a download
was interrupted, and it compares sizes, never contents. A blob gets its name, which is its SHA-256,
only when it has that digest; the revision gets its name when all of it is here. Until then a
revision that was there before goes on being the one that is served.
"""

import contextlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO, cast

# their stubs leave types open that we do not use
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

# large files at once: enough to fill a line, few enough that an interruption leaves few halves
_DOWNLOAD_THREADS = 4

# bytes of disk that a download leaves alone
_RESERVED_BYTES = 1 << 30


def download(offer: DownloadPlan, out: TextIO | None = None) -> Path:
    """Download what is missing, check all of it, and return the folder. out: where progress is
    told. Raises AppError; what has come by then stays, and the next try asks for the rest."""
    storage = repo_folder(offer.name.repo_id)
    large = [file for file in offer.files if file.sha256 is not None and _fits_http(file)]
    with translate_hub_errors(offer.name):
        _check_disk_space(offer)
        total = sum(file.size for file in large)
        here = sum(count_downloaded_bytes(storage, offer.commit, file) for file in large)
        meter = DownloadProgress(total, here, out)
        try:
            _download_files(offer, storage, large, meter)
        finally:
            meter.close()
        with disable_progress_bars():
            places = [_place_in_snapshot(offer, file) for file in offer.files]
        for file, place in zip(offer.files, places, strict=True):
            if file not in large:
                _verify_file(offer.name, place, file)
        _update_ref(storage, offer)
    return storage / "snapshots" / offer.commit


def _download_files(
    offer: DownloadPlan, storage: Path, files: Sequence[RemoteFile], progress: DownloadProgress
) -> None:
    """The threads are daemons, which no exit waits for: one that listens to a silent hub hears of
    an end only when its patience is over, a minute after Ctrl-C."""
    waiting: SimpleQueue[RemoteFile] = SimpleQueue()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    for file in files:
        waiting.put(file)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                file = waiting.get_nowait()
                try:
                    _download_blob(offer, storage, file, progress)
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
    except BaseException:  # Ctrl-C too: the threads end at their next bytes
        progress.stop()
        raise


def _download_blob(
    offer: DownloadPlan, storage: Path, file: RemoteFile, progress: DownloadProgress
) -> None:
    """One large file to its place among the blobs. A half that is there already is gone on with:
    also one that an older huggingface_hub left, which named it so."""
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
        began = _download_partial(offer, file, partial, progress)
        whole = digests.sha256(partial) == file.sha256
        if not whole and began:  # what was here before may have been the damaged part
            progress.add(-file.size)
            partial.unlink()
            _download_partial(offer, file, partial, progress)
            whole = digests.sha256(partial) == file.sha256
        if not whole:
            partial.unlink()
            raise model_error(
                offer.name,
                f"{file.path} is corrupt: its SHA-256 does not match the hub's; try again",
            )
        partial.replace(blob)


def _download_partial(
    offer: DownloadPlan, file: RemoteFile, partial: Path, progress: DownloadProgress
) -> int:
    """Returns how many bytes were there before."""
    if partial.is_file() and partial.stat().st_size > file.size:
        partial.unlink()
    with partial.open("ab") as out:
        began = out.tell()
        http_get(
            hf_hub_url(offer.name.repo_id, file.path, revision=offer.commit),
            out,
            resume_size=began,
            headers={**build_hf_headers(), "Accept-Encoding": "identity"},
            expected_size=file.size,
            tqdm_class=cast(Any, ProgressBarAdapter(progress)),
        )
    return began


def _place_in_snapshot(offer: DownloadPlan, file: RemoteFile) -> Path:
    """In the snapshot: a small file, or a link to a blob that is there already."""
    # not snapshot_download, which waits for the listing of the repository without an end
    place = hf_hub_download(
        offer.name.repo_id, file.path, revision=offer.commit, cache_dir=cache_folder()
    )
    return Path(place)


def _fits_http(file: RemoteFile) -> bool:
    """Above this size the hub answers its own protocol only, which huggingface_hub speaks."""
    return file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE


def _check_disk_space(offer: DownloadPlan) -> None:
    if not offer.missing_bytes:
        return
    folder = cache_folder()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if offer.missing_bytes + _RESERVED_BYTES > free:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{offer.name} needs {format_bytes(offer.missing_bytes)} more on the disk of "
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


def _update_ref(storage: Path, offer: DownloadPlan) -> None:
    """From now on the revision is this commit. A reader sees the old one or the new one."""
    revision = offer.name.revision or constants.DEFAULT_REVISION
    if revision == offer.commit:
        return
    ref = storage / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    beside = storage / f"{offer.commit}.ref"
    beside.write_text(offer.commit, encoding="ascii")
    beside.replace(ref)
