"""`mlxrunner doctor`: reports the compute backend of this machine and problems that slow it down.

Knows: the wording of the findings, remedies. Must not know: the detection of problems in other
packages.
"""

import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from app import store
from app.commands.device_report import (
    DeviceDescription,
    describe_device,
    find_device_problems,
    render_device_lines,
)
from app.config.options import BUILD_VARIABLE
from app.config.precedence import resolve_config
from app.core.distributions import inspect_mlx_library
from app.core.errors import AppError
from app.core.settings import ActivationPrecision
from app.core.units import format_memory, pluralize
from app.engine.device import (
    detect_backend,
    device_budget,
    measure_gigaflops,
    read_device_info,
)
from app.runners.compile_dir import prepare_compile_dir
from models import cpu_backend, kernels

# minimum memory in bytes; with less, almost no model can be served
_MIN_MEMORY = 256 << 20

_AUTO_ACTIVATIONS = "16-bit (float32 models: 24-bit)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings of `mlxrunner doctor`.

    library: the distribution whose libmlx.so MLX uses; None on macOS. gigaflops: the throughput of
    a matrix product in MLX, in GFLOP/s. blas: the BLAS library; None for the one that MLX ships,
    and blas_why then contains the reason. called: whether MLX called `blas`; None if calls are not
    counted. kernels: the CPU kernels in use; None if MLX's own operations are used, and kernels_why
    then contains the reason. tiles_why: the reason why the kernels do not use tiles (Intel AMX);
    None if they do, or if there are no kernels. activations: the precision of activations in 4- and
    8-bit layers, from the environment and the configuration file. memory: the number of
    bytes that may be used. scratch: the folder for MLX's compiled code; None if there is none.
    models: the number of models by source. stores: the error message of the model stores. gpu:
    macOS or NVIDIA's driver, and the GPU.
    """

    python: str
    mlx: str
    library: str | None
    device: str
    cpu: str
    threads: int
    gigaflops: float
    blas: str | None
    blas_why: str | None
    called: bool | None
    kernels: str | None
    kernels_why: str | None
    tiles_why: str | None
    activations: ActivationPrecision
    memory: int
    scratch: str | None
    models: Mapping[str, int]
    stores: str | None
    gpu: DeviceDescription


def diagnose(*, as_json: bool) -> int:
    """Prints the findings and returns the exit status: 1 if a problem was found."""
    found = _examine()
    lost = list(find_problems(found, os.environ))
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "lost": lost}, indent=2))
        return 1 if lost else 0
    for label, value in render_lines(found):
        print(f"{label:<10} {value}")
    for loss in lost or ["no problems found"]:
        print(f"\n{loss}")
    return 1 if lost else 0


def render_lines(found: Findings) -> Iterator[tuple[str, str]]:
    """Yields the lines of the report as (label, value)."""
    yield "Python", f"{found.python}, {platform.system()} {platform.machine()}"
    library = f", libmlx.so of {found.library}" if found.library else ""
    yield "MLX", f"{found.mlx}, on the {found.device.upper()}{library}"
    yield "processor", f"{found.cpu}, {pluralize(found.threads, 'thread')}"
    blas = found.blas or f"MLX's own: {found.blas_why}"
    if found.device == "cpu":
        yield "BLAS", f"{blas}; matmul at {found.gigaflops:.3g} GFLOP/s"
        yield "kernels", _describe_kernels(found)
        if found.kernels is not None:
            yield "tiles", "on" if found.tiles_why is None else f"off: {found.tiles_why}"
    else:
        yield "matmul", f"{found.gigaflops:.3g} GFLOP/s"
    yield "KV cache", _describe_kv(found)
    yield from render_device_lines(found.gpu)
    yield "memory", f"{format_memory(found.memory)} available"
    yield "scratch", found.scratch or "none"
    counts = (f"{count} {source}" for source, count in found.models.items())
    yield "models", found.stores or ", ".join(counts)


def _describe_kv(found: Findings) -> str:
    if found.device != "cpu":
        return "in the type of the activations"
    if found.kernels is None:
        return "rounded to the type of the checkpoint, but stored as float32; see --kv"
    return "in the type of the checkpoint, which the kernels read directly; see --kv"


def _describe_kernels(found: Findings) -> str:
    if found.kernels is None:
        return f"none: {found.kernels_why}"
    bits = f"{found.activations}-bit" if found.activations != "auto" else _AUTO_ACTIVATIONS
    return f"{found.kernels}; {bits} activations in 4- and 8-bit layers"


def find_problems(found: Findings, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields one message per problem, each with a remedy. A feature that the user has disabled is
    not a problem."""
    if found.device == "cpu" and found.blas_why == cpu_backend.USES_CUDA:
        yield "MLX was installed for CUDA but found no GPU: check nvidia-smi"
    elif found.device == "cpu" and sys.platform == "linux":
        yield from _find_cpu_problems(found, environ)
    yield from find_device_problems(found.gpu)
    if found.memory < _MIN_MEMORY:
        yield (
            f"only {format_memory(found.memory)} of memory is available: stop other programs, or "
            "raise the memory limits"
        )
    if found.scratch is None:
        yield (
            "no private folder allows executable files, so MLX cannot compile fused operations: "
            "set TMPDIR to such a folder"
        )
    if found.stores:
        yield f"models could not be listed: {found.stores}"


def _find_cpu_problems(found: Findings, environ: Mapping[str, str]) -> Iterator[str]:
    why = found.blas_why or ""
    if why == cpu_backend.NOT_FOUND or why.startswith(cpu_backend.NOT_BUILT):
        yield (
            f"MLX uses the reference BLAS, many times slower than an optimized one: {why}. "
            "Install OpenBLAS from the system's packages (libopenblas0 on Debian and Ubuntu, "
            "openblas on Fedora)"
        )
    if found.called is False:
        yield f"{found.blas} is loaded, but MLX does not call it: check LD_PRELOAD"
    if found.tiles_why is not None and found.tiles_why.startswith(kernels.TILE_TEST_FAILED):
        yield (
            "the processor's AMX tiles computed a wrong result, so prompts are slower without "
            f"them: {found.tiles_why}. Report this with the output of `mlxrunner doctor --json`"
        )
    # kernels that the build was configured to omit also count as disabled
    off = environ.get("MLXRUNNER_KERNELS") == "off" or BUILD_VARIABLE in (found.kernels_why or "")
    if found.kernels is None and not off:
        yield f"the CPU kernels are not in use, so decoding is slower: {found.kernels_why}"


def _examine() -> Findings:
    """Raises AppError(INVALID) for invalid settings."""
    settings = resolve_config({}, None, os.environ).settings
    using, info = detect_backend(), kernels.describe()
    reached = measure_gigaflops()
    products = cpu_backend.count_blas_calls()
    models, stores = _count_models()
    return Findings(
        python=platform.python_version(),
        mlx=version("mlx"),
        library=inspect_mlx_library().loaded,
        device=using.device,
        cpu=_read_cpu_name(),
        threads=cpu_backend.ACTIVE.threads,
        gigaflops=round(reached, 1),
        blas=using.blas,
        blas_why=cpu_backend.ACTIVE.why,
        called=None if products is None else products > 0,
        kernels=using.kernels,
        kernels_why=info.why,
        tiles_why=info.tile_fault or info.why_no_tiles,
        activations=settings.activations,
        memory=device_budget(),
        scratch=_find_compile_dir(),
        models=models,
        stores=stores,
        gpu=describe_device(read_device_info()),
    )


def _read_cpu_name() -> str:
    """Returns the CPU's model name. /proc/cpuinfo has no model name on most arm64 machines."""
    try:
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        pairs = []
    names = [value.strip() for key, _, value in pairs if key.strip() == "model name"]
    return names[0] if names else platform.processor() or platform.machine()


def _find_compile_dir() -> str | None:
    """Returns the folder in which a model process would compile code, or None if there is none."""
    found = prepare_compile_dir()
    if "MLX_DISABLE_COMPILE" in found:
        return None
    return found.get("TMPDIR") or os.environ.get("TMPDIR") or tempfile.gettempdir()


def _count_models() -> tuple[Mapping[str, int], str | None]:
    """Returns the number of models by source, including broken ones, and an error message or
    None."""
    try:
        found = Counter(entry.source for entry in store.list_installed())
    except AppError as error:
        return {}, error.message
    return {source: found[source] for source in ("built in", "hub", "ollama")}, None
