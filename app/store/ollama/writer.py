"""Writes blobs and manifests to Ollama's store, in its format, and keeps track of uploaded blobs.

Knows: the layout on disk, atomic writes, digests, the age of an upload. Must not know: the layers
of a model, HTTP. All functions block, so call them on a thread.

A file is written under a temporary name, synced and renamed, so that a crash leaves no incomplete
file under its final name. Each uploaded blob has an empty marker file. Only blobs with a marker are
deleted if they are unused, because Ollama may be downloading other blobs.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.thread_pools import CancelToken
from app.core.units import format_bytes
from app.store.config_files import read_json_object
from app.store.model_names import OllamaName
from app.store.ollama.manifest import get_blob_path, get_manifest_path, store_folder

# the minimum free disk space in bytes after a write
RESERVED_BYTES = 1 << 30

TEMPORARY_PREFIX = ".mlxrunner-"

_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_CHUNK = 1 << 20

# the number of seconds after which an unused upload is deleted
MAX_UNUSED_SECONDS = 24 * 3600.0

_MARKER_FOLDER = ".mlxrunner-uploads"

# the number of bytes between two checks of the free disk space
_CHECK_INTERVAL = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobReference:
    """A blob in a manifest. sha256: 64 hexadecimal digits. name: the name of a tensor or file; ""
    for none."""

    media_type: str
    sha256: str
    size: int
    name: str = ""

    def render(self) -> Mapping[str, Any]:
        base = {"mediaType": self.media_type, "digest": f"sha256:{self.sha256}", "size": self.size}
        return {**base, "name": self.name} if self.name else base


def parse_digest(text: str) -> str:
    """Returns the 64 digits of a digest. Raises AppError(INVALID)."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        shown = mark_client_text(repr(text[:100]))
        raise AppError(
            ErrorKind.INVALID,
            f"invalid digest format: {shown} is not sha256: and 64 hexadecimal digits",
        )
    return match[1]


def check_disk_space(nbytes: int) -> None:
    """Raises AppError(TOO_LARGE) if less than RESERVED_BYTES would be free after writing."""
    folder = store_folder()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if nbytes + RESERVED_BYTES > free:
        raise AppError(
            ErrorKind.TOO_LARGE,
            f"the disk of Ollama's store has {format_bytes(free)} free, and {format_bytes(nbytes)} "
            f"more would leave less than {format_bytes(RESERVED_BYTES)}: free some space, or set "
            "OLLAMA_MODELS to a folder on another disk",
            code="disk_full",
        )


def write_blob(content: bytes, media_type: str, name: str = "") -> BlobReference:
    """Stores a small blob."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = get_blob_path(sha256)
    if not path.is_file():
        check_disk_space(len(content))
        with open_temporary(path.parent) as (file, temporary):
            file.write(content)
            publish(file, temporary, path)
    return BlobReference(media_type=media_type, sha256=sha256, size=len(content), name=name)


def write_json_blob(value: object, media_type: str, name: str = "") -> BlobReference:
    return write_blob(orjson.dumps(value), media_type, name)


def add_blob(source: Path, media_type: str, name: str, token: CancelToken) -> BlobReference:
    """Stores a copy of a file. A blob in the hub's cache never changes, so it is hard-linked
    without using space. Raises WorkCancelled soon after `token` is cancelled."""
    source = source.resolve()
    sha256 = _hash_file(source, token)
    size = source.stat().st_size
    path = get_blob_path(sha256)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.name != sha256 or not _link(source, path):
            check_disk_space(size)
            _copy(source, path, token)
    return BlobReference(media_type=media_type, sha256=sha256, size=size, name=name)


def write_manifest(
    name: OllamaName, layers: Sequence[BlobReference], config: Mapping[str, Any]
) -> None:
    """Writes the manifest of a model and its config blob. Replaces an earlier manifest."""
    digests = [f"sha256:{layer.sha256}" for layer in layers]
    described = {**config, "rootfs": {"type": "layers", "diff_ids": digests}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST_TYPE,
        "config": write_json_blob(described, _CONFIG_TYPE).render(),
        "layers": [layer.render() for layer in layers],
    }
    write_manifest_file(name, orjson.dumps(manifest))


def write_manifest_file(name: OllamaName, content: bytes) -> None:
    """Writes a manifest unchanged. Raises AppError(INVALID) if its path is used by a folder or file
    of another model."""
    path = get_manifest_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_temporary(path.parent) as (file, temporary):
            file.write(content)
            publish(file, temporary, path)
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise AppError(
            ErrorKind.INVALID, f"{name} cannot be stored: it conflicts with another name"
        ) from error


def delete_manifest(name: OllamaName) -> None:
    """Deletes a model, and its blobs if no other model uses them. Other unused blobs are kept,
    because another program may be downloading them. Raises FileNotFoundError."""
    path = get_manifest_path(name)
    own = set(_list_digests(path))
    path.unlink()
    for folder in list(path.parents)[:3]:  # of the model, the namespace and the host
        with contextlib.suppress(OSError):
            folder.rmdir()
    for sha256 in own - find_used_digests():
        get_blob_path(sha256).unlink(missing_ok=True)


def find_used_digests() -> set[str]:
    """Returns the digests of all blobs that are listed in a manifest."""
    manifests = (store_folder() / "manifests").glob("*/*/*/*")
    return {sha256 for path in manifests if path.is_file() for sha256 in _list_digests(path)}


@contextlib.contextmanager
def open_temporary(folder: Path) -> Generator[tuple[Any, Path]]:
    """Opens a temporary file, and deletes it on exit unless `publish` has renamed it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX, delete=False) as file:
        temporary = Path(file.name)
        try:
            yield file, temporary
        finally:
            temporary.unlink(missing_ok=True)


def publish(file: Any, temporary: Path, path: Path) -> None:
    """Syncs a written file to disk and renames it."""
    file.flush()
    os.fchmod(file.fileno(), 0o644)
    os.fsync(file.fileno())
    os.replace(temporary, path)


def _list_digests(path: Path) -> Iterable[str]:
    """Yields the digests in a manifest. Yields none if the manifest cannot be read."""
    try:
        manifest = read_json_object(path) or {}
    except AppError:
        return
    entries: Any = [manifest.get("config"), *(manifest.get("layers") or ())]
    for entry in entries:
        match entry:
            case {"digest": str(digest)} if (match := _DIGEST.fullmatch(digest)) is not None:
                yield match[1]
            case _:
                continue


def _hash_file(path: Path, token: CancelToken) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            token.check()
            digest.update(chunk)
    return digest.hexdigest()


def _link(source: Path, path: Path) -> bool:
    try:
        os.link(source, path)
    except FileExistsError:
        return True
    except OSError:  # another disk, or one without links
        return False
    return True


def _copy(source: Path, path: Path, token: CancelToken) -> None:
    with source.open("rb") as original, open_temporary(path.parent) as (file, temporary):
        while chunk := original.read(_CHUNK):
            token.check()
            file.write(chunk)
        publish(file, temporary, path)


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
