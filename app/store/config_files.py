"""Reads a model's small files, which contain JSON objects or text.

Knows: file types. Must not know: the files of a model, their meaning.

Folders in the Hugging Face cache contain links to blobs, so links are treated like files.
"""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import orjson

from app.core.errors import AppError, ErrorKind

# The maximum size of a file. Config files take a few kilobytes, and the largest chat templates a
# hundred.
_MAX_BYTES = 16 << 20


# the start of a pointer of Git LFS, a small file in place of a large one
# (github.com/git-lfs/git-lfs, docs/spec.md)
_LFS_POINTER = b"version https://git-lfs"


def check_no_lfs_pointer(path: Path, start: bytes) -> None:
    """Raises AppError(MODEL_FILES) if the start of a file shows that it is a Git LFS pointer."""
    if start.startswith(_LFS_POINTER):
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"{path} is a Git LFS pointer and not the file itself: run `git lfs pull` in its "
            "folder, or download the model with `mlxrunner pull`",
        )


def is_regular_file(path: Path) -> bool:
    """Returns whether the path is a regular file. Raises AppError(MODEL_FILES) if the path exists
    but is not a readable file. Examples are a broken or circular link, a folder, or a pipe (reading
    it would block)."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise unreadable_error(path, "it is a link to a missing file") from error
        return False
    except (OSError, ValueError) as error:  # ValueError: the name contains a null byte
        raise unreadable_error(path, _format_reason(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise unreadable_error(path, "it is not a regular file")
    return True


def read_json_object(path: Path, *, max_bytes: int = _MAX_BYTES) -> Mapping[str, Any] | None:
    """Reads the JSON object in a file. Returns None if the file does not exist. max_bytes: the
    maximum size of the file in bytes.

    Raises AppError(MODEL_FILES) with a message of one line that names the file.
    """
    if not is_regular_file(path):
        return None
    content = _read(path, max_bytes=max_bytes)
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        parsed = _parse_with_infinity(content)
        if parsed is None:
            raise unreadable_error(path, str(error)) from error
    if not isinstance(parsed, dict):
        raise AppError(ErrorKind.MODEL_FILES, f"{path} is not a JSON object")
    return cast(Mapping[str, Any], parsed)


def read_json_array(path: Path) -> Sequence[Any] | None:
    """Reads the JSON array in a file. Returns None if the file does not exist. Raises the same
    errors as `read_json_object`."""
    if not is_regular_file(path):
        return None
    try:
        parsed = orjson.loads(_read(path, max_bytes=_MAX_BYTES))
    except orjson.JSONDecodeError as error:
        raise unreadable_error(path, str(error)) from error
    if not isinstance(parsed, list):
        raise AppError(ErrorKind.MODEL_FILES, f"{path} is not a JSON array")
    return cast("list[Any]", parsed)


def read_text(path: Path, *, max_bytes: int = _MAX_BYTES) -> str | None:
    """Reads the text in a file, without a byte order mark. Returns None if the file does not exist.
    Raises the same errors as `read_json_object`."""
    if not is_regular_file(path):
        return None
    try:
        return _read(path, max_bytes=max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable_error(path, str(error)) from error


def as_object(value: Any) -> Mapping[str, Any]:
    """Returns a value in a JSON file, or an empty object if it is something else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _parse_with_infinity(content: bytes) -> Any:
    """Parses JSON with Infinity, which Python writes although it is not valid JSON, and which some
    configs contain (for example, Nemotron-H's time_step_limit). Returns None if the JSON is invalid
    for another reason. NaN is rejected, because no setting uses it."""
    try:
        parsed = json.loads(content, parse_constant=_parse_infinity)
        orjson.dumps(parsed)  # rejects all other values that JSON does not have
    except (ValueError, TypeError, RecursionError):
        return None
    return parsed


def _parse_infinity(word: str) -> float:
    if word == "NaN":
        raise ValueError(word)
    return float(word)


def model_files_error(message: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, message)


def unreadable_error(path: Path, why: str) -> AppError:
    return model_files_error(f"{path} cannot be read: {why}")


def _read(path: Path, *, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise unreadable_error(path, _format_reason(error)) from error
    check_no_lfs_pointer(path, content)
    if len(content) > max_bytes:
        raise unreadable_error(
            path, f"it is larger than {max_bytes >> 20} MiB, the maximum for this kind of file"
        )
    return content


def _format_reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
