"""mlxrunner's own CPU operations, if the extension was built: `ops`.

Knows: whether the extension exists, was built for this MLX, is enabled (`MLXRUNNER_KERNELS=off`
disables it) and supports the requested instruction set (`MLXRUNNER_ISA`), and whether the device is
the CPU. Must not know: layers, architectures. `_kernels.pyi` documents the operations.
CMakeLists.txt in this folder builds them.

MLX's own operations for Linux CPUs are optimized for correctness rather than speed: they use one
thread, process one row at a time, and are not vectorized. They are used if `ops` returns None.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from models import cpu_backend, extension_build

# the beginning of the reasons of KernelInfo if tiles computed a wrong result at the start
TILE_TEST_FAILED = "the known-answer test failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """The state of the kernels, for users. enabled: whether models on this process's default device
    use the kernels. why: the reason why models do not use them, as one sentence. isa, threads: the
    instruction set and the number of threads; None if the extension was not built. why_no_tiles,
    why_no_bf16_tiles: the reason why products with 4- and 8-bit matrices, and those with bfloat16
    matrices, do not use tiles; None if they do, or if the extension was not built.
    """

    built: bool
    enabled: bool
    isa: str | None
    threads: int | None
    why: str | None
    why_no_tiles: str | None = None
    why_no_bf16_tiles: str | None = None

    @property
    def tile_fault(self) -> str | None:
        """The reason why tiles are not used, if it is that they computed a wrong result."""
        reasons = (self.why_no_tiles, self.why_no_bf16_tiles)
        return next((why for why in reasons if why and why.startswith(TILE_TEST_FAILED)), None)


def ops(*arrays: mx.array) -> Any:
    """Returns the extension if it supports arrays like these, otherwise None. `_kernels.pyi`
    declares its types."""
    if _module is None or mx.default_device().type != mx.DeviceType.cpu:
        return None
    return _module if all(array.dtype == mx.float32 for array in arrays) else None


def trim_memory() -> None:
    """Returns cached memory of freed arrays to the system. Call this when many arrays were freed
    permanently."""
    if _module is not None:
        _module.trim_memory()


def describe() -> KernelInfo:
    if _module is None:
        return KernelInfo(built=_built, enabled=False, isa=None, threads=None, why=_why)
    on = ops() is not None
    return KernelInfo(
        built=True,
        enabled=on,
        isa=_module.isa(),
        threads=_module.num_threads(),
        why=None if on else "the device is not the CPU",
        why_no_tiles=_module.why_no_tiles() or None,
        why_no_bf16_tiles=_module.why_no_bf16_tiles() or None,
    )


# The version of the interface of src/module.cpp. It is increased when an operation is added or
# changes, so that operations that were compiled before are not used.
_INTERFACE = 12


def _load_extension() -> tuple[Any, bool, str | None]:
    """Returns the extension, whether it was built, and the reason why it cannot be used."""
    if os.environ.get("MLXRUNNER_KERNELS") == "off":
        return None, True, "MLXRUNNER_KERNELS is off"
    if not extension_build.may_use(os.environ, current=extension_build.IDENTITY):
        return None, False, extension_build.BUILT_LATER
    try:
        # `from models.kernels` would raise a different error while the package is being imported
        import models.kernels._kernels as found
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._kernels":
            raise
        return None, False, cpu_backend.read_not_built_reason(Path(__file__).parent)
    except ImportError as error:  # built for a different Python or MLX
        return None, True, f"the kernels cannot be loaded; rebuild them with `make`: {error}"
    # importing importlib.metadata takes as long as mlx.core; the stubs lack the attribute
    ours, theirs = found.built_for, mx.__version__  # pyright: ignore[reportAttributeAccessIssue]
    if ours != theirs:
        return (
            None,
            True,
            f"the kernels were built for MLX {ours}, but MLX {theirs} is installed; rebuild them "
            "with `make`",
        )
    if getattr(found, "interface", None) != _INTERFACE:
        return (
            None,
            True,
            "the kernels belong to a different version of mlxrunner; rebuild them with `make`",
        )
    try:
        found.isa()  # selects the instruction set; fail now rather than at the first operation
    except RuntimeError as error:
        return None, True, str(error)
    found.set_num_threads(cpu_backend.ACTIVE.threads)
    found.retain_freed_memory()
    return found, True, None


_module, _built, _why = _load_extension()
