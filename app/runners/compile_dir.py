"""Prepares a private directory for code that MLX compiles at run time.

Knows: directories, their permissions. Must not know: MLX's arrays, processes. Call it before the
first array is evaluated.

On Linux, MLX's CPU backend compiles operations fused by `mx.compile` with the system compiler. It
loads the compiled code from $TMPDIR/mlx/<version>/cpu, under predictable names (MLX 0.32:
mlx/backend/cpu/compiled.cpp). If a file already exists, MLX loads it without any check. In a
world-writable /tmp, another user could have created the file.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def prepare_compile_dir(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables to set: none if the temporary directory is private,
    otherwise TMPDIR, or MLX_DISABLE_COMPILE if there is no private directory."""
    common = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    if _is_private(common) and _allows_executables(common):
        return {}
    for folder in _candidates(environ, common):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _is_private(folder) and _allows_executables(folder):
            return {"TMPDIR": str(folder)}
    log.warning(
        "there is no private directory for compiled code: MLX compilation is disabled, so some "
        "operations are slower"
    )
    return {"MLX_DISABLE_COMPILE": "1"}


def _candidates(environ: Mapping[str, str], common: Path) -> Iterator[Path]:
    cache = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        yield Path(cache) / "mlxrunner" / "scratch"
    elif home := environ.get("HOME"):
        yield Path(home) / ".cache" / "mlxrunner" / "scratch"
    yield common / f"mlxrunner-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Returns whether the directory belongs to this user and is not writable by other users.
    Symbolic links are rejected, because the target could change."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_own = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
    return is_own and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _allows_executables(folder: Path) -> bool:
    """Returns whether the directory is writable and not mounted with noexec."""
    try:
        flags = os.statvfs(folder).f_flag
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and not flags & getattr(os, "ST_NOEXEC", 0)
