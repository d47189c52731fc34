"""Which BLAS MLX computes with on a CPU, settled before `mlx.core` is first imported.

Knows: wheels, shared libraries, environment variables. Must not know: arrays, models.

On Linux, MLX's wheel for the CPU brings the reference BLAS, which is fifty times slower than the
machine. Names that are global in the process before libmlx.so is loaded are taken instead: those of
our own little library, which hands on to a good BLAS (kernels/src/blas_shim.c), or where that was
not built, those of the good BLAS itself. On macOS and with CUDA, MLX has what it needs.
`MLXRUNNER_BLAS` is "stock" for the one that MLX brought, "openblas", "mkl" or the path of a library
for that one.

How many threads compute at once.
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

THREADS_VARIABLE = "MLXRUNNER_THREADS"

# the most that our own operations are shared among (kernels/src/pool.hpp)
MAX_THREADS = 256

_TOPOLOGY = Path("/sys/devices/system/cpu")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class ThreadsError(OSError):
    """MLXRUNNER_THREADS is not a number of threads. An OSError: the machine was asked for what it
    does not have, and whoever reports those reports this one too."""


def get_num_threads(
    environ: Mapping[str, str],
    *,
    allowed_cpus: Iterable[int] | None = None,
    topology: Path = _TOPOLOGY,
    proc_cgroup: Path = _PROC_CGROUP,
    cgroup_root: Path = _CGROUP_ROOT,
) -> int:
    """From one to MOST: MLXRUNNER_THREADS, else the cores, or what the cgroups around this process
    give of them. allowed_cpus: the CPUs that it may run on. proc_cgroup: which groups it is in.
    Raises ThreadsError."""
    if said := environ.get(THREADS_VARIABLE, "").strip():
        if not (said.isascii() and said.isdecimal() and int(said) > 0):
            raise ThreadsError(f"{THREADS_VARIABLE}: {said!r} is not a number of threads")
        if int(said) > MAX_THREADS:
            raise ThreadsError(
                f"{THREADS_VARIABLE}: {said} threads are too many, the maximum is {MAX_THREADS}"
            )
        return int(said)
    cpus = _allowed_cpus() if allowed_cpus is None else frozenset(allowed_cpus)
    limits = [_count_cores(cpus, topology), *_cpu_quotas(proc_cgroup, cgroup_root)]
    return max(1, int(min(MAX_THREADS, *limits)))


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _count_cores(cpus: frozenset[int], topology: Path) -> int:
    """CPUs of which nobody says what core they are of count as one each."""
    cores = {
        "".join(_read_lines(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        or f"cpu{cpu}"
        for cpu in cpus
    }
    return len(cores)


def _cpu_quotas(proc_cgroup: Path, cgroup_root: Path) -> Iterator[float]:
    """CPUs' worth of time, of each group that limits it."""
    for folder in _cgroup_folders(proc_cgroup, cgroup_root):
        # cgroup v2 in one file, v1 in two; "max" and -1 are no limit
        told = " ".join(_read_lines(folder / "cpu.max")).split() or [
            "".join(_read_lines(folder / "cpu.cfs_quota_us")).strip(),
            "".join(_read_lines(folder / "cpu.cfs_period_us")).strip(),
        ]
        if len(told) == 2 and all(part.isdecimal() and int(part) > 0 for part in told):
            yield int(told[0]) / int(told[1])


def _cgroup_folders(proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """The groups that this process is in, and all around them. In a container of its own, the
    outermost of these is the container's."""
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

# the names under which distributions install it, the variant with threads of its own first
_OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
_MKL_NAMES = ("libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so")

# what PyPI's scipy-openblas32 puts before each name
_SCIPY_PREFIX = "scipy_"

# log2 of the cycles that a thread of OpenBLAS looks for work before it sleeps: a tenth of a
# millisecond. By default 26, which takes a core from whoever computes next.
_OPENBLAS_THREAD_TIMEOUT = "18"


# `CpuBackend.why` where a machine lacks what it could have; of the second, only how it begins
NOT_FOUND = "no OpenBLAS or MKL was found"
NOT_BUILT = "OpenBLAS is installed, but the BLAS shim that MLX calls it through was not built"
USES_CUDA = "MLX uses CUDA"


class CpuBackendError(OSError):
    """The BLAS that was asked for cannot be had. An OSError, as whatever else the machine denies:
    who reports those reports this one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBackend:
    """threads: that compute, those of BLAS or ours. blas: the library that MLX's products on the
    CPU go to, None where that is the one MLX was built with. path: where it lies. why: a sentence,
    where nothing was put in the place of MLX's own."""

    threads: int
    blas: str | None = None
    path: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlasCandidate:
    path: str
    prefix: str = ""


def select_blas(environ: MutableMapping[str, str], *, shim: Path = _SHIM_LIBRARY) -> CpuBackend:
    """Make a good BLAS visible, and write into `environ` what makes it suit its neighbours. Raises
    BackendError for one that was asked for and cannot be opened, ThreadsError."""
    threads = get_num_threads(environ)
    asked = environ.get(BLAS_VARIABLE, "").strip()
    if why := _unsupported_reason():
        return CpuBackend(threads=threads, why=why)
    everything = ctypes.CDLL(None)
    if hasattr(everything, "cblas_sgemm"):  # LD_PRELOAD: what was there first is found first
        return CpuBackend(
            threads=threads, blas=_describe_library(everything, "", "a preloaded library")
        )
    if asked == "stock":
        return CpuBackend(threads=threads, why=f"{BLAS_VARIABLE} is stock")
    if "mlx.core" in sys.modules:
        return CpuBackend(threads=threads, why="too late: mlx.core was imported before models")
    environ.update(_blas_variables(environ, threads))
    refusals: list[str] = []
    for candidate in _blas_candidates(asked):
        try:
            blas = _load_library(candidate, shim)
        except OSError as error:
            refusals.append(str(error))
        else:
            return CpuBackend(threads=threads, blas=blas, path=candidate.path)
    if asked:
        reason = "; ".join(dict.fromkeys(refusals)) or "it is not installed"
        raise CpuBackendError(f"{BLAS_VARIABLE}: {asked} cannot be used: {reason}")
    if _find_scipy_openblas() and not shim.is_file():
        return CpuBackend(threads=threads, why=f"{NOT_BUILT}: {read_not_built_reason(shim.parent)}")
    return CpuBackend(threads=threads, why=NOT_FOUND)


def read_not_built_reason(folder: Path) -> str:
    """Why nothing was compiled into models/kernels, and what to do, as the install wrote it down
    (kernels/CMakeLists.txt)."""
    try:
        line = (folder / "not_built.txt").read_text("utf-8").strip()
    except OSError:
        return "install a C++20 compiler (g++), and then mlxrunner again (with make or pip)"
    reason, _, rest = line.removeprefix("mlxrunner: ").partition(": models run on a CPU")
    _, semicolon, advice = rest.partition("; ")
    return f"{reason}{semicolon}{advice}"


def count_blas_calls(shim: Path = _SHIM_LIBRARY) -> int | None:
    """Products that went through our library so far; None where it is not what MLX calls."""
    if not hasattr(ctypes.CDLL(None), "mlxrunner_blas_calls"):
        return None
    counted = ctypes.CDLL(str(shim)).mlxrunner_blas_calls
    counted.restype = ctypes.c_ulong
    return int(counted())


def _unsupported_reason() -> str | None:
    """A sentence where MLX is not the one that lacks a BLAS."""
    if sys.platform != "linux":
        return "MLX needs no other BLAS on this platform"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"no BLAS is selected on {platform.machine()}"
    found = importlib.util.find_spec("mlx")
    places = [Path(place).parent for place in (found and found.submodule_search_locations) or ()]
    if any(list(place.glob("mlx_cuda*.dist-info")) for place in places):
        return USES_CUDA
    if not any(list(place.glob("mlx_cpu-*.dist-info")) for place in places):
        return "MLX was not installed from its CPU wheel (mlx-cpu)"
    return None


def _blas_variables(environ: Mapping[str, str], threads: int) -> Mapping[str, str]:
    """What the libraries read when they are opened, but for what somebody has said already."""
    wanted = {"OPENBLAS_THREAD_TIMEOUT": _OPENBLAS_THREAD_TIMEOUT, "KMP_BLOCKTIME": "0"}
    if not any(environ.get(name) for name in ("OMP_NUM_THREADS", "GOTO_NUM_THREADS")):
        wanted["OPENBLAS_NUM_THREADS"] = str(threads)
    if not environ.get("OMP_NUM_THREADS"):
        wanted["MKL_NUM_THREADS"] = str(threads)
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def _blas_candidates(asked: str) -> Iterator[_BlasCandidate]:
    """Best first."""
    if asked not in ("", "openblas", "mkl"):
        yield _BlasCandidate(path=asked)
        yield _BlasCandidate(path=asked, prefix=_SCIPY_PREFIX)
        return
    if asked != "mkl":
        if path := _find_scipy_openblas():
            yield _BlasCandidate(path=path, prefix=_SCIPY_PREFIX)
        yield from (_BlasCandidate(path=name) for name in _OPENBLAS_NAMES)
    if asked != "openblas":
        # pip puts it beside Python's own libraries
        yield from (_BlasCandidate(path=str(Path(sys.prefix, "lib", name))) for name in _MKL_NAMES)
        yield from (_BlasCandidate(path=name) for name in _MKL_NAMES)


def _find_scipy_openblas() -> str | None:
    """The library of scipy-openblas32, which is not imported for it."""
    found = importlib.util.find_spec("scipy_openblas32")
    for place in (found and found.submodule_search_locations) or ():
        path = Path(place, "lib", "libscipy_openblas.so")
        if path.is_file():
            return str(path)
    return None


def _load_library(candidate: _BlasCandidate, shim: Path) -> str:
    """Its name, once MLX will find it. Raises OSError, having made nothing global."""
    path, prefix = candidate.path, candidate.prefix
    library = ctypes.CDLL(path)
    if not hasattr(library, f"{prefix}cblas_sgemm"):
        raise OSError(f"{path} has no CBLAS functions")
    if "USE64BITINT" in _openblas_config(library, prefix):
        raise OSError(f"{path} uses 64-bit integers, MLX needs 32-bit integers")
    if shim.is_file():
        ours: Any = ctypes.CDLL(str(shim))
        why = ctypes.create_string_buffer(512)
        opened = ours.mlxrunner_blas_open
        opened.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        if opened(os.fsencode(path), prefix.encode(), why, len(why)):
            raise OSError(why.value.decode(errors="replace"))
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    elif prefix:
        raise OSError(f"{path} needs the BLAS shim, which was not built")
    else:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return _describe_library(library, prefix, Path(path).name)


def _describe_library(library: ctypes.CDLL, prefix: str, default: str) -> str:
    """As it calls itself, with the kernels that it has chosen."""
    if told := _openblas_config(library, prefix):
        core = _call_string_function(library, f"{prefix}openblas_get_corename")
        return " ".join([*told.split()[:2], *([f"({core})"] if core else [])])
    return "MKL" if hasattr(library, "mkl_get_max_threads") else default


def _openblas_config(library: ctypes.CDLL, prefix: str) -> str:
    return _call_string_function(library, f"{prefix}openblas_get_config")


def _call_string_function(library: ctypes.CDLL, name: str) -> str:
    """What a function without arguments returns; nothing where there is none."""
    if not hasattr(library, name):
        return ""
    function = library[name]
    function.restype = ctypes.c_char_p
    return (function() or b"").decode(errors="replace")


# the one time that it can be settled: whoever imports `models` imports MLX next
ACTIVE = select_blas(os.environ)
