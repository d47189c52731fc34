"""Verifies files against digests known from their names or a listing.

Knows: SHA-256, git's SHA-1 of a file, the cache of verified files. Must not know: the contents of
the files.

hashlib releases the GIL, so several threads hash at the speed of the disk.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import orjson

from app.core.errors import AppError, ErrorKind
from app.core.units import format_bytes
from app.store.cache_folder import app_cache_folder, replace_file

log = logging.getLogger(__name__)

_THREADS = 4

# the total size above which a log message is written, because hashing takes a second or more
_LOG_FROM_BYTES = 1 << 30
_CHUNK = 1 << 20

# the number of bytes after which the progress of hashing is reported, about 10 ms
_REPORTED_CHUNK = 1 << 24


def sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Returns the SHA-256 of a file as 64 hexadecimal digits. on_bytes: called with the number of
    bytes of each part that was hashed. Raises OSError."""
    with path.open("rb") as file:
        if on_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_REPORTED_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
        return digest.hexdigest()


def git_sha1(path: Path) -> str:
    """Returns git's blob ID, which the hub uses for small files. It is the SHA-1 of the type, the
    size and the content. Raises OSError."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class DigestCache:
    """A cache of verified files, so that the server does not hash every model at each start.
    Verification detects disk and copy errors. It does not protect against attackers, who could also
    write to this cache.

    A file is identified by its digest, size, modification time and inode. A replaced or modified
    file is hashed again. If the cache is not writable, nothing is cached.
    """

    def __init__(self, cache_file: Path | None = None) -> None:
        self._path = cache_file or app_cache_folder() / "verified.json"

    def verify(self, files: Mapping[Path, str]) -> None:
        """Verifies files. files: the expected SHA-256 of each file. Raises AppError(MODEL_FILES)
        for the first file that differs or cannot be read."""
        recorded = self._read()
        try:
            marks = {path: _fingerprint(path) for path in files}
        except OSError as error:
            raise AppError(
                ErrorKind.MODEL_FILES, f"{error.filename} cannot be read: {error}"
            ) from error
        fresh = [path for path in files if recorded.get(files[path]) != marks[path]]
        if not fresh:
            return
        if (size := sum(marks[path][0] for path in fresh)) >= _LOG_FROM_BYTES:
            log.info("verifying the SHA-256 digests of %s (once per file)", format_bytes(size))
        digests = _hash_files(fresh)
        for path in fresh:
            if digests[path] != files[path]:
                raise AppError(
                    ErrorKind.MODEL_FILES,
                    f"{path} is damaged: its SHA-256 is {digests[path]}, not {files[path]}; "
                    "pull the model again",
                )
        self._write({**recorded, **{files[path]: marks[path] for path in fresh}})

    def _read(self) -> dict[str, list[int]]:
        try:
            parsed = orjson.loads(self._path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return {}
        return cast(dict[str, list[int]], parsed) if isinstance(parsed, dict) else {}

    def _write(self, verified: Mapping[str, Any]) -> None:
        """Writes the cache. Without it, files are verified again."""
        with contextlib.suppress(OSError):
            replace_file(self._path, orjson.dumps(verified))


def _fingerprint(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    paths = list(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            return dict(zip(paths, pool.map(sha256, paths), strict=True))
        except OSError as error:
            raise AppError(
                ErrorKind.MODEL_FILES, f"{error.filename} cannot be read: {error}"
            ) from error
