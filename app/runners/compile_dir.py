"""A folder for code that MLX compiles while it runs, where nobody else can put any.

On Linux MLX's CPU back-end compiles what `mx.compile` fuses with the machine's own compiler, and
loads it from $TMPDIR/mlx/<version>/cpu, under names that can be foretold (MLX 0.32:
mlx/backend/cpu/compiled.cpp). What lies there already is loaded as it is. In a /tmp that everybody
may write to, another user of the machine could have put it there.

Knows: folders, who may write to them. Must not know: MLX's arrays, processes. To be called before
the first array is evaluated.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def prepare_compile_dir(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to be set for this process: TMPDIR, where it leads to a folder that others can
    write to; and where there is no other one, MLX_DISABLE_COMPILE."""
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
        "no private directory for compiled code: MLX compilation is off, some operations are slower"
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
    """Whether it belongs to us and nobody else may write to it. A link could lead elsewhere
    tomorrow."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    mine = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _allows_executables(folder: Path) -> bool:
    """Whether it can be written to, and what is written there can be run."""
    try:
        flags = os.statvfs(folder).f_flag
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and not flags & getattr(os, "ST_NOEXEC", 0)
