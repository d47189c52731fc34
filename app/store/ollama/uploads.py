"""Uploads of blobs, and the deletion of unused uploads.

Knows: temporary files, digests, the age of an upload. Must not know: HTTP. All functions block, so
call them on a thread.

Each uploaded blob has an empty marker file. Only blobs with a marker are deleted, because Ollama
may be downloading other blobs.
"""

import hashlib
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from app.core.errors import AppError, ErrorKind
from app.store.ollama.manifest import store_folder
from app.store.ollama.writer import (
    TEMPORARY_PREFIX,
    check_disk_space,
    find_used_digests,
    get_blob_path,
    open_temporary,
    publish,
)

# the number of seconds after which an unused upload is deleted
MAX_UNUSED_SECONDS = 24 * 3600.0

_MARKER_FOLDER = ".mlxrunner-uploads"

# the number of bytes between two checks of the free disk space
_CHECK_INTERVAL = 64 << 20


class BlobUpload:
    """One upload. Always call `close`."""

    def __init__(self, sha256: str) -> None:
        """Raises AppError(TOO_LARGE) if the disk is full."""
        self._sha256 = sha256
        self._digest = hashlib.sha256()
        self._unchecked = _CHECK_INTERVAL
        self._stack = ExitStack()
        self._path = get_blob_path(sha256)
        self._file, self._temporary = self._stack.enter_context(open_temporary(self._path.parent))

    def write(self, data: bytes) -> None:
        """Appends data. Raises AppError(TOO_LARGE) if too little disk space would remain free."""
        self._unchecked += len(data)
        if self._unchecked >= _CHECK_INTERVAL:
            self._file.flush()
            check_disk_space(len(data))
            self._unchecked = 0
        self._digest.update(data)
        self._file.write(data)

    def commit(self) -> None:
        """Stores the blob. Raises AppError(INVALID) if the digest of the content does not match."""
        digest = self._digest.hexdigest()
        if digest != self._sha256:
            raise AppError(
                ErrorKind.INVALID,
                f"digest mismatch, expected sha256:{self._sha256}, got sha256:{digest}",
            )
        marker = _marker_path(self._sha256)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        publish(self._file, self._temporary, self._path)

    def close(self) -> None:
        self._stack.close()


def touch_upload(sha256: str) -> None:
    """Resets the age of an upload when a client requests it again."""
    with suppress(FileNotFoundError):
        path = _marker_path(sha256)
        path.stat()
        path.touch()


def delete_unused_uploads(now: float | None = None) -> int:
    """Deletes uploads that no model uses, and files of interrupted uploads, after a day. Returns
    the number of deleted files. now: the Unix time; None uses the current time."""
    oldest = (time.time() if now is None else now) - MAX_UNUSED_SECONDS
    markers = [path for path in _list(_marker_path("")) if path.stat().st_mtime < oldest]
    used = find_used_digests() if markers else set[str]()
    deleted = 0
    for marker in markers:
        if marker.name not in used:
            get_blob_path(marker.name).unlink(missing_ok=True)
            deleted += 1
        marker.unlink(missing_ok=True)
    for path in _list(store_folder() / "blobs"):
        if path.name.startswith(TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    deleted += 1
    return deleted


def _marker_path(sha256: str) -> Path:
    return store_folder() / _MARKER_FOLDER / sha256


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
