"""Reading of a model's small files: JSON objects and text.

Knows: what may be at a path instead of the expected file. Must not know: which files a model has,
their meaning.

A folder of the Hugging Face cache consists of links to its blobs, so links are treated like files.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from app.core.errors import AppError, ErrorKind

# configs have a few kilobytes, the largest chat templates a hundred
_MAX_BYTES = 16 << 20


def is_regular_file(path: Path) -> bool:
    """Returns whether the path is a regular file. Raises AppError(MODEL_FILES) if it exists but
    cannot be read: a broken or circular link, a folder, a pipe (which would block)."""
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise unreadable_error(path, "it is a link to a missing file") from error
        return False
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise unreadable_error(path, _format_reason(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise unreadable_error(path, "it is not a regular file")
    return True


def read_json_object(path: Path, *, max_bytes: int = _MAX_BYTES) -> Mapping[str, Any] | None:
    """Reads the JSON object in a file; None if the file does not exist. max_bytes: largest size in
    bytes.

    Raises AppError(MODEL_FILES) with a message of one line that names the file.
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
    """Reads the text in a file; None if the file does not exist. Raises as `read_json_object`
    does."""
    if not is_regular_file(path):
        return None
    try:
        return _read(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise unreadable_error(path, str(error)) from error


def _parse_with_infinity(content: bytes) -> Any:
    """Parses JSON with Infinity, which Python writes although JSON lacks it, and which occurs in
    configs (Nemotron-H's time_step_limit). Returns None if that is not the error; NaN is rejected,
    because no setting uses it."""
    try:
        found = json.loads(content, parse_constant=_parse_infinity)
        orjson.dumps(found)  # rejects everything else that is not JSON
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
