"""The cache folder of this program, and the tokenizer.json files in it that are built from other
formats.

Knows: paths, how a file is replaced. Must not know: the formats that files are built from.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from app.core.errors import AppError, ErrorKind


def app_cache_folder() -> Path:
    """Returns the cache folder of this program. Users may delete this folder at any time."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "mlxrunner"
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / usual / "mlxrunner"


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file of the cache folder atomically, because another process may be reading it.
    Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:  # the disk may be full
            os.unlink(file.name)
            raise


def cache_tokenizer(
    kind: str, digest: str, source: Path, build: Callable[[], Mapping[str, Any]]
) -> Path:
    """Returns the path of a tokenizer.json. It is built if the cache does not have it yet. kind:
    the subfolder. digest: the digest of everything that the result depends on. source: the file
    that it is built from. Raises AppError(MODEL_FILES) if it cannot be written, and the errors of
    `build`."""
    path = app_cache_folder() / kind / digest[:32] / "tokenizer.json"
    if path.is_file():
        return path
    content = orjson.dumps(build())
    try:
        replace_file(path, content)
    except OSError as error:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"the tokenizer of {source} cannot be written to {path}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a writable folder",
        ) from error
    return path
