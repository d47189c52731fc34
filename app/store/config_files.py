"""The small files of a model: JSON objects and text.

Knows: what may lie at a path instead of the file that belongs there. Must not know: which files a
model has, what they say.

A folder of the Hugging Face cache is made of links into its blobs, so links are as good as files.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from app.core.errors import AppError, ErrorKind

# configs have some kilobytes, the largest chat templates a hundred
_MAX_BYTES = 16 << 20


def is_regular_file(path: Path) -> bool:
    """Raises AppError(MODEL_FILES) for what is there and cannot be read: a link that leads nowhere
    or in a circle, a folder, a pipe (which would be waited for)."""
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise unreadable_error(path, "it is a link to a missing file") from error
        return False
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        raise unreadable_error(path, _format_reason(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise unreadable_error(path, "it is not a regular file")
    return True


def read_json_object(path: Path, *, max_bytes: int = _MAX_BYTES) -> Mapping[str, Any] | None:
    """The JSON object in a file, or None when there is no such file. max_bytes: bytes.

    Raises AppError(MODEL_FILES), one line that names the file.
    """
    if not is_regular_file(path):
        return None
    content = _read(path, max_bytes=max_bytes)
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        found = _parse_with_infinity(content)
        if found is None:
            raise unreadable_error(path, str(error)) from error
    if not isinstance(found, dict):
        raise AppError(ErrorKind.MODEL_FILES, f"{path} is not a JSON object")
    return cast(Mapping[str, Any], found)


def read_text(path: Path, *, max_bytes: int = _MAX_BYTES) -> str | None:
    """The text in a file, or None when there is no such file. Raises as `read_json_object` does."""
    if not is_regular_file(path):
        return None
    try:
        return _read(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise unreadable_error(path, str(error)) from error


def _parse_with_infinity(content: bytes) -> Any:
    """Python writes Infinity, which is not JSON, and configs hold it (Nemotron-H's
    time_step_limit). None where that is not what is wrong; NaN is no setting of anything."""
    try:
        found = json.loads(content, parse_constant=_parse_infinity)
        orjson.dumps(found)  # which refuses all else that JSON does not have
    except (ValueError, TypeError, RecursionError):
        return None
    return found


def _parse_infinity(word: str) -> float:
    if word == "NaN":
        raise ValueError(word)
    return float(word)


def unreadable_error(path: Path, why: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{path} cannot be read: {why}")


def _read(path: Path, *, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise unreadable_error(path, _format_reason(error)) from error
    if len(content) > max_bytes:
        raise unreadable_error(
            path, f"it is larger than {max_bytes >> 20} MiB, the limit for such files"
        )
    return content


def _format_reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
