"""Selects the BLAS and the number of threads for MLX on a CPU, before `mlx.core` is imported for
the first time.

Knows: wheels, shared libraries, environment variables. Must not know: arrays, models.

On Linux, MLX's CPU wheel contains the reference BLAS, which is fifty times slower than an optimized
BLAS. Global symbols that were loaded before libmlx.so take precedence over its own. A small shim
library provides such symbols and forwards calls to a fast BLAS (kernels/src/blas_shim.c). If the
shim was not built, the fast BLAS itself provides the symbols. On macOS and with CUDA, MLX does not
need another BLAS. `MLXRUNNER_BLAS` is "stock" for MLX's own BLAS, or "openblas", "mkl" or the path
of a library. `MLXRUNNER_THREADS` is the number of threads.
"""

import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import extension_build

THREADS_VARIABLE = "MLXRUNNER_THREADS"

# the maximum number of threads of our own operations (kernels/src/thread_pool.hpp)
MAX_THREADS = 256

_TOPOLOGY = Path("/sys/devices/system/cpu")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class ThreadsError(OSError):
    """MLXRUNNER_THREADS is not a valid number of threads. This is an OSError, because callers
    already report OSErrors of the backend."""


def get_num_threads(
    environ: Mapping[str, str],
    *,
    allowed_cpus: Iterable[int] | None = None,
    topology: Path = _TOPOLOGY,
    proc_cgroup: Path = _PROC_CGROUP,
    cgroup_root: Path = _CGROUP_ROOT,
) -> int:
    """Returns the number of threads, from 1 to MAX_THREADS. This is MLXRUNNER_THREADS, if set,
    otherwise the number of cores, limited by the CPU quotas of this process's cgroups.

    allowed_cpus: the CPUs that the process may use; None asks the system. proc_cgroup: the file
    that lists the cgroups of the process. Raises ThreadsError.
    """
    if value := environ.get(THREADS_VARIABLE, "").strip():
        if not (value.isascii() and value.isdecimal() and int(value) > 0):
            raise ThreadsError(f"{THREADS_VARIABLE}: {value!r} is not a number of threads")
        if int(value) > MAX_THREADS:
            raise ThreadsError(
                f"{THREADS_VARIABLE}: {value} threads exceed the maximum of {MAX_THREADS}"
            )
        return int(value)
    cpus = _allowed_cpus() if allowed_cpus is None else frozenset(allowed_cpus)
    limits = [_count_cores(cpus, topology), *_cpu_quotas(proc_cgroup, cgroup_root)]
    return max(1, int(min(MAX_THREADS, *limits)))


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _count_cores(cpus: frozenset[int], topology: Path) -> int:
    """Returns the number of distinct cores. A CPU without topology information is counted as a
    core."""
    cores = {
        "".join(_read_lines(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        or f"cpu{cpu}"
        for cpu in cpus
    }
    return len(cores)


def _cpu_quotas(proc_cgroup: Path, cgroup_root: Path) -> Iterator[float]:
    """Yields the quota of each cgroup that has one, in CPUs."""
    for folder in _cgroup_folders(proc_cgroup, cgroup_root):
        # cgroup v2 uses one file, and v1 uses two; "max" and -1 mean no limit
        fields = " ".join(_read_lines(folder / "cpu.max")).split() or [
            "".join(_read_lines(folder / "cpu.cfs_quota_us")).strip(),
            "".join(_read_lines(folder / "cpu.cfs_period_us")).strip(),
        ]
        if len(fields) == 2 and all(part.isdecimal() and int(part) > 0 for part in fields):
            yield int(fields[0]) / int(fields[1])


def _cgroup_folders(proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """Yields the folders of this process's cgroups and of their ancestors. In a container with its
    own cgroup namespace, the outermost folder is the container's cgroup."""
    tops = {"": cgroup_root, "cpu": cgroup_root / "cpu", "cpu,cpuacct": cgroup_root / "cpu,cpuacct"}
    yield from tops.values()
    for line in _read_lines(proc_cgroup):
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = tops.get(kinds, cgroup_root / kinds)
        folder = top / path.strip("/")
        while folder != top and folder.is_relative_to(top):
            yield folder
            folder = folder.parent


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


BLAS_VARIABLE = "MLXRUNNER_BLAS"

_SHIM_LIBRARY = Path(__file__).with_name("kernels") / "libmlxrunner_blas.so"

# library names in Linux distributions; the multi-threaded variant comes first
_OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
_MKL_NAMES = ("libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so")

# the symbol prefix of scipy-openblas32 from PyPI
_SCIPY_PREFIX = "scipy_"

# The base-2 logarithm of the number of cycles that an idle OpenBLAS thread spins before it sleeps,
# which is a tenth of a millisecond. With the default of 26, an idle thread occupies a core that
# other threads need.
_OPENBLAS_THREAD_TIMEOUT = "18"


# values of `CpuBackend.why` for a machine without a fast BLAS; NOT_BUILT is only the beginning
NOT_FOUND = "no OpenBLAS or MKL was found"
NOT_BUILT = "OpenBLAS is installed, but the BLAS shim that MLX calls it through was not built"
USES_CUDA = "MLX uses CUDA"


class CpuBackendError(OSError):
    """The requested BLAS cannot be used. This is an OSError, because callers already report
    OSErrors of the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBackend:
    """The selected backend. threads: the number of threads of the BLAS and of our kernels. blas:
    the library that computes MLX's matrix products on the CPU; None for the BLAS that MLX was built
    with. path: the path of this library. why: the reason why MLX's own BLAS was not replaced, as a
    sentence."""

    threads: int
    blas: str | None = None
    path: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlasCandidate:
    path: str
    prefix: str = ""


def select_blas(environ: MutableMapping[str, str], *, shim: Path = _SHIM_LIBRARY) -> CpuBackend:
    """Loads a fast BLAS, and sets the environment variables of these libraries in `environ`. Raises
    CpuBackendError if the requested BLAS cannot be loaded. Raises ThreadsError for an invalid
    number of threads."""
    threads = get_num_threads(environ)
    requested = environ.get(BLAS_VARIABLE, "").strip()
    if why := _unsupported_reason():
        return CpuBackend(threads=threads, why=why)
    everything = ctypes.CDLL(None)
    if hasattr(everything, "cblas_sgemm"):  # LD_PRELOAD: symbols loaded first are found first
        return CpuBackend(
            threads=threads, blas=_describe_library(everything, "", "a preloaded library")
        )
    if requested == "stock":
        return CpuBackend(threads=threads, why=f"{BLAS_VARIABLE} is stock")
    if "mlx.core" in sys.modules:
        return CpuBackend(threads=threads, why="mlx.core was already imported before models")
    environ.update(_blas_variables(environ, threads))
    refusals: list[str] = []
    for candidate in _blas_candidates(requested):
        try:
            blas = _load_library(candidate, shim)
        except OSError as error:
            refusals.append(str(error))
        else:
            return CpuBackend(threads=threads, blas=blas, path=candidate.path)
    if requested:
        reason = "; ".join(dict.fromkeys(refusals)) or "it is not installed"
        raise CpuBackendError(f"{BLAS_VARIABLE}: {requested} cannot be used: {reason}")
    if _find_scipy_openblas() and not shim.is_file():
        return CpuBackend(threads=threads, why=f"{NOT_BUILT}: {read_not_built_reason(shim.parent)}")
    return CpuBackend(threads=threads, why=NOT_FOUND)


def read_not_built_reason(folder: Path) -> str:
    """Returns the reason why the extension in models/kernels was not compiled, and a solution, from
    a file written by the build (kernels/CMakeLists.txt)."""
    try:
        line = (folder / "not_built.txt").read_text("utf-8").strip()
    except OSError:
        return "install a C++20 compiler (g++), and then reinstall mlxrunner (with make or pip)"
    reason, _, rest = line.removeprefix("mlxrunner: ").partition(": models run on a CPU")
    _, semicolon, advice = rest.partition("; ")
    return f"{reason}{semicolon}{advice}"


def count_blas_calls(shim: Path = _SHIM_LIBRARY) -> int | None:
    """Returns the number of matrix products computed through our library so far. Returns None if
    MLX does not call it."""
    if not hasattr(ctypes.CDLL(None), "mlxrunner_blas_calls"):
        return None
    counted = ctypes.CDLL(str(shim)).mlxrunner_blas_calls
    counted.restype = ctypes.c_ulong
    return int(counted())


def _unsupported_reason() -> str | None:
    """Returns the reason why no other BLAS is needed or supported on this platform, as a sentence,
    or None if a BLAS can be selected."""
    if sys.platform != "linux":
        return "MLX needs no other BLAS on this platform"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"no BLAS is selected on {platform.machine()}"
    spec = importlib.util.find_spec("mlx")
    folders = [Path(folder).parent for folder in (spec and spec.submodule_search_locations) or ()]
    if any(list(folder.glob("mlx_cuda*.dist-info")) for folder in folders):
        return USES_CUDA
    if not any(list(folder.glob("mlx_cpu-*.dist-info")) for folder in folders):
        return "MLX was not installed from its CPU wheel (mlx-cpu)"
    return None


def _blas_variables(environ: Mapping[str, str], threads: int) -> Mapping[str, str]:
    """Returns the environment variables that the libraries read when they are loaded, except
    variables that are already set."""
    variables = {"OPENBLAS_THREAD_TIMEOUT": _OPENBLAS_THREAD_TIMEOUT, "KMP_BLOCKTIME": "0"}
    if not any(environ.get(name) for name in ("OMP_NUM_THREADS", "GOTO_NUM_THREADS")):
        variables["OPENBLAS_NUM_THREADS"] = str(threads)
    if not environ.get("OMP_NUM_THREADS"):
        variables["MKL_NUM_THREADS"] = str(threads)
    return {name: value for name, value in variables.items() if not environ.get(name)}


def _blas_candidates(requested: str) -> Iterator[_BlasCandidate]:
    """Yields the libraries to try, in order of preference."""
    if requested not in ("", "openblas", "mkl"):
        yield _BlasCandidate(path=requested)
        yield _BlasCandidate(path=requested, prefix=_SCIPY_PREFIX)
        return
    if requested != "mkl":
        if path := _find_scipy_openblas():
            yield _BlasCandidate(path=path, prefix=_SCIPY_PREFIX)
        yield from (_BlasCandidate(path=name) for name in _OPENBLAS_NAMES)
    if requested != "openblas":
        # pip installs MKL into the lib folder of sys.prefix
        yield from (_BlasCandidate(path=str(Path(sys.prefix, "lib", name))) for name in _MKL_NAMES)
        yield from (_BlasCandidate(path=name) for name in _MKL_NAMES)


def _find_scipy_openblas() -> str | None:
    """Returns the path of the library in scipy-openblas32, without importing the package."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location, "lib", "libscipy_openblas.so")
        if path.is_file():
            return str(path)
    return None


def _load_library(candidate: _BlasCandidate, shim: Path) -> str:
    """Loads a library so that MLX finds its symbols, and returns its name. If OSError is raised, no
    symbols were made global."""
    path, prefix = candidate.path, candidate.prefix
    library = ctypes.CDLL(path)
    if not hasattr(library, f"{prefix}cblas_sgemm"):
        raise OSError(f"{path} has no CBLAS functions")
    if "USE64BITINT" in _openblas_config(library, prefix):
        raise OSError(f"{path} uses 64-bit integers, but MLX requires 32-bit integers")
    if shim.is_file():
        ours: Any = ctypes.CDLL(str(shim))
        why = ctypes.create_string_buffer(512)
        opened = ours.mlxrunner_blas_open
        opened.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        if opened(os.fsencode(path), prefix.encode(), why, len(why)):
            raise OSError(why.value.decode(errors="replace"))
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    elif prefix:
        raise OSError(f"{path} requires the BLAS shim, which was not built")
    else:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return _describe_library(library, prefix, Path(path).name)


def _describe_library(library: ctypes.CDLL, prefix: str, default: str) -> str:
    """Returns the library's self-reported name and selected kernels."""
    if config := _openblas_config(library, prefix):
        core = _call_string_function(library, f"{prefix}openblas_get_corename")
        return " ".join([*config.split()[:2], *([f"({core})"] if core else [])])
    return "MKL" if hasattr(library, "mkl_get_max_threads") else default


def _openblas_config(library: ctypes.CDLL, prefix: str) -> str:
    return _call_string_function(library, f"{prefix}openblas_get_config")


def _call_string_function(library: ctypes.CDLL, name: str) -> str:
    """Returns the result of a function without arguments, or "" if the function does not exist."""
    if not hasattr(library, name):
        return ""
    function = library[name]
    function.restype = ctypes.c_char_p
    return (function() or b"").decode(errors="replace")


# Selected during the import, because importers of `models` import MLX next. A shim that the server
# did not find at its start is not used.
_MAY_USE_SHIM = extension_build.may_use(os.environ, current=extension_build.IDENTITY)
ACTIVE = select_blas(os.environ, shim=_SHIM_LIBRARY if _MAY_USE_SHIM else Path(os.devnull, "none"))
