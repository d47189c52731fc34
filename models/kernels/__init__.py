"""Our own operations for the CPU, where they were built: `ops`.

Knows: whether the extension is there, was built for this MLX, is wanted (`MLXRUNNER_KERNELS=off`),
has the instruction set that was asked for (`MLXRUNNER_ISA`), and whether the device is the CPU.
Must not know: layers, architectures. What the operations promise is told in `_kernels.pyi`; how
they are built, in CMakeLists.txt beside it.

MLX's own operations for a Linux CPU are written to be right, not fast: one thread, one row at a
time, nothing vectorised. Where `ops` is None they do all the work.
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
    """For people. enabled: whether models on this process' default device are served by the
    kernels. why: where they are not, one sentence that says so. isa, threads: None where nothing
    was built."""

    built: bool
    enabled: bool
    isa: str | None
    threads: int | None
    why: str | None


def ops(*arrays: mx.array) -> Any:
    """The extension, whose types are in `_kernels.pyi`, where arrays like these are computed by it;
    else None."""
    if _module is None or mx.default_device().type != mx.DeviceType.cpu:
        return None
    return _module if all(array.dtype == mx.float32 for array in arrays) else None


def trim_memory() -> None:
    """When many arrays are gone for good: what is kept of theirs goes back to the system."""
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
    """(the extension, whether it was built, what is wrong)."""
    if os.environ.get("MLXRUNNER_KERNELS") == "off":
        return None, True, "MLXRUNNER_KERNELS is off"
    try:
        # not `from models.kernels`: of a package that is being imported that is another error
        import models.kernels._kernels as found
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._kernels":
            raise
        return None, False, cpu_backend.read_not_built_reason(Path(__file__).parent)
    except ImportError as error:  # made for another Python, or another MLX
        return None, True, f"the kernels cannot be loaded; rebuild them with `make`: {error}"
    ours, theirs = found.built_for, importlib.metadata.version("mlx")
    if ours != theirs:
        return (
            None,
            True,
            f"the kernels were built for MLX {ours}, but MLX {theirs} is installed; run `make`",
        )
    try:
        found.isa()  # chosen now: the first work there is would be an odd place to be refused
    except RuntimeError as error:
        return None, True, str(error)
    found.use_threads(cpu_backend.ACTIVE.threads)
    found.keep_memory()
    return found, True, None


_module, _built, _why = _load_extension()
