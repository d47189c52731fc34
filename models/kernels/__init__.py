"""Our own operations for the CPU, if the extension was built: `ops`.

Knows: whether the extension exists, was built for this MLX, is enabled (`MLXRUNNER_KERNELS=off`
disables it), supports the requested instruction set (`MLXRUNNER_ISA`), and whether the device is
the CPU. Must not know: layers, architectures. `_kernels.pyi` documents the operations,
CMakeLists.txt beside it how they are built.

MLX's own operations for a Linux CPU aim at correctness, not speed: one thread, one row at a time,
not vectorized. They are used if `ops` is None.
"""

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from models import cpu_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """A description for users. enabled: whether models on this process's default device use the
    kernels. why: why they do not, as one sentence. isa, threads: None if the extension was not
    built."""

    built: bool
    enabled: bool
    isa: str | None
    threads: int | None
    why: str | None


def ops(*arrays: mx.array) -> Any:
    """The extension, whose types are in `_kernels.pyi`, if it supports arrays like these; else
    None."""
    if _module is None or mx.default_device().type != mx.DeviceType.cpu:
        return None
    return _module if all(array.dtype == mx.float32 for array in arrays) else None


def trim_memory() -> None:
    """Return cached memory of freed arrays to the system. Called when many arrays were freed for
    good."""
    if _module is not None:
        _module.return_memory()


def describe() -> KernelInfo:
    if _module is None:
        return KernelInfo(built=_built, enabled=False, isa=None, threads=None, why=_why)
    on = ops() is not None
    return KernelInfo(
        built=True,
        enabled=on,
        isa=_module.isa(),
        threads=_module.threads(),
        why=None if on else "the device is not the CPU",
    )


def _load_extension() -> tuple[Any, bool, str | None]:
    """(the extension, whether it was built, the reason why it cannot be used)."""
    if os.environ.get("MLXRUNNER_KERNELS") == "off":
        return None, True, "MLXRUNNER_KERNELS is off"
    try:
        # not `from models.kernels`: while the package is being imported, that raises another error
        import models.kernels._kernels as found
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._kernels":
            raise
        return None, False, cpu_backend.read_not_built_reason(Path(__file__).parent)
    except ImportError as error:  # built for another Python, or another MLX
        return None, True, f"the kernels cannot be loaded; rebuild them with `make`: {error}"
    ours, theirs = found.built_for, importlib.metadata.version("mlx")
    if ours != theirs:
        return (
            None,
            True,
            f"the kernels were built for MLX {ours}, but MLX {theirs} is installed; run `make`",
        )
    try:
        found.isa()  # selects the instruction set: fail now rather than at the first operation
    except RuntimeError as error:
        return None, True, str(error)
    found.use_threads(cpu_backend.ACTIVE.threads)
    found.keep_memory()
    return found, True, None


_module, _built, _why = _load_extension()
