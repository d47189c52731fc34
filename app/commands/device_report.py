"""The GPU of this machine as `mlxrunner doctor` reports it, and what to do if it is not fully used.

Knows: macOS versions, MLX's wheels, NVIDIA's drivers. Must not know: models, the other findings of
doctor.

The report is a pure function of a `DeviceDescription`. Its rules come from MLX's source and from
the wheels of MLX 0.32.4, and the tests use invented machines: no Mac and no NVIDIA GPU was
available.
"""

import ctypes
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.core.distributions import has_accelerator_hardware
from app.core.units import format_memory
from app.engine.memory_policy import DeviceMemory, wirable_bytes

# MLX has no wheel for older systems.
_OLDEST_MACOS = (14, 0)

# Neural accelerators: the kernels are only in the wheel for macOS 26, whose library needs macOS
# 26.2 (mlx/backend/metal/device.cpp, `is_nax_available`).
_ACCELERATOR_WHEEL, _ACCELERATOR_MACOS = "macosx_26", (26, 2)

# The first compute capability for which MLX uses cuDNN's attention.
_CUDNN_CAPABILITY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    """The facts about a GPU that the report needs. None or () means unknown.

    system: "Darwin" or "Linux". macos: the version of macOS. python_macos: the version that this
    Python reports to installers; it is older if Python was built for an older system. chip: the
    name of the chip or of the GPU. architecture: Metal's or CUDA's name, such as applegpu_g17s or
    sm_90. wheel: the platform tag of MLX's wheel. physical: the installed memory in bytes.
    working_set: the bytes that macOS recommends as the limit for wired memory. wired_limit_mb: the
    sysctl iogpu.wired_limit_mb; 0 is the system's default. driver: the version of NVIDIA's driver.
    driver_cuda: the latest version of CUDA that the driver supports. wheel_cuda: the version of
    CUDA of MLX's wheel.
    """

    system: str
    macos: tuple[int, ...] = ()
    python_macos: tuple[int, ...] = ()
    chip: str = ""
    architecture: str = ""
    wheel: str = ""
    physical: int | None = None
    working_set: int = 0
    wired_limit_mb: int | None = None
    driver: str = ""
    driver_cuda: tuple[int, ...] = ()
    wheel_cuda: int | None = None


def render_device_lines(found: DeviceDescription) -> Iterator[tuple[str, str]]:
    """Yields the lines of the report as (label, value)."""
    if found.system == "Darwin":
        yield "macOS", f"{_format_version(found.macos)}, {found.chip or 'unknown chip'}"
        yield "MLX wheel", found.wheel or "not installed from a wheel"
        yield "neural", _describe_accelerators(found)
        limit = found.wired_limit_mb
        set_by = f"iogpu.wired_limit_mb = {limit}" if limit else "the system's default"
        memory = DeviceMemory(physical=found.physical, recommended=found.working_set)
        yield (
            "wired",
            f"at most {format_memory(wirable_bytes(memory))}, of "
            f"{format_memory(found.working_set)} that macOS allows ({set_by})",
        )
    elif found.driver or found.driver_cuda or found.wheel_cuda:
        yield "GPU", f"{found.chip or 'none'} {found.architecture}".strip()
        supports = _format_version(found.driver_cuda)
        yield "driver", f"{found.driver or 'not found'}, supports CUDA {supports}"
        yield "CUDA", f"{found.wheel_cuda}, of MLX's wheel" if found.wheel_cuda else "no wheel"


def find_device_problems(found: DeviceDescription) -> Iterator[str]:
    """Yields one message per problem, each with a remedy."""
    if found.system == "Darwin":
        yield from _find_macos_problems(found)
    elif found.wheel_cuda:
        yield from _find_cuda_problems(found)


def _describe_accelerators(found: DeviceDescription) -> str:
    if not has_accelerator_hardware(found.architecture):
        return "this chip has no neural accelerators"
    if _ACCELERATOR_WHEEL not in found.wheel:
        return "neural accelerators are off: this wheel of MLX has no kernels for them"
    if found.macos and found.macos[:2] < _ACCELERATOR_MACOS:
        return "neural accelerators need macOS 26.2"
    return "neural accelerators can be used"


def _find_macos_problems(found: DeviceDescription) -> Iterator[str]:
    if found.macos and found.macos[:2] < _OLDEST_MACOS:
        yield (
            f"macOS {_format_version(found.macos)} is too old for MLX: update to macOS 14 or newer"
        )
    accelerated = has_accelerator_hardware(found.architecture)
    new_wheel = _ACCELERATOR_WHEEL in found.wheel
    if new_wheel and found.macos and found.macos[:2] < _ACCELERATOR_MACOS:
        yield (
            f"MLX's wheel for macOS 26 needs macOS 26.2, but this is macOS "
            f"{_format_version(found.macos)}, where results may be wrong: update macOS"
        )
    elif accelerated and not new_wheel and found.macos[:2] >= _ACCELERATOR_MACOS:
        reason = ""
        if found.python_macos and found.python_macos < (26,):
            reason = (
                f", because this Python reports macOS {_format_version(found.python_macos)} to "
                "installers"
            )
        yield (
            f"MLX was installed without kernels for this chip's neural accelerators{reason}: "
            "prompts are processed more slowly. Install mlxrunner again with a Python that was "
            "built for macOS 26 (from python.org or Homebrew)"
        )
    elif accelerated and found.macos and found.macos[:2] < _ACCELERATOR_MACOS:
        yield (
            "this chip's neural accelerators need macOS 26.2: update macOS, and then install "
            "mlxrunner again"
        )
    if found.wired_limit_mb and found.wired_limit_mb << 20 > found.working_set > 0:
        yield (
            f"iogpu.wired_limit_mb is {found.wired_limit_mb}, but macOS allows only "
            f"{format_memory(found.working_set)}: restart mlxrunner after changing it"
        )


def _find_cuda_problems(found: DeviceDescription) -> Iterator[str]:
    assert found.wheel_cuda is not None
    if not found.driver_cuda:
        yield "MLX was installed for CUDA, but NVIDIA's driver was not found: install the driver"
    elif found.driver_cuda[0] < found.wheel_cuda:
        yield (
            f"NVIDIA's driver {found.driver} supports CUDA {_format_version(found.driver_cuda)}, "
            f"but MLX was built for CUDA {found.wheel_cuda}: update the driver"
        )
    match = re.fullmatch(r"sm_(\d+)\d", found.architecture)
    if match is not None and int(match[1]) < _CUDNN_CAPABILITY:
        yield (
            f"this GPU ({found.architecture}) is older than those for which MLX has fused "
            "attention, so long prompts are slow: use a GPU with compute capability 8.0 or newer"
        )


def describe_device(info: Mapping[str, object], *, system: str | None = None) -> DeviceDescription:
    """Reads the facts about this machine. info: `mx.device_info()`. system: for tests."""
    system = platform.system() if system is None else system
    name, architecture = str(info.get("device_name", "")), str(info.get("architecture", ""))
    if system == "Darwin":
        physical = info.get("memory_size")
        working_set = info.get("max_recommended_working_set_size", 0)
        return DeviceDescription(
            system=system,
            macos=_parse_version(_sysctl("kern.osproductversion")),
            python_macos=_parse_version(platform.mac_ver()[0]),
            chip=_sysctl("machdep.cpu.brand_string") or name,
            architecture=architecture,
            wheel=read_wheel_tag("mlx-metal") or "",
            physical=physical if isinstance(physical, int) else None,
            working_set=working_set if isinstance(working_set, int) else 0,
            wired_limit_mb=_parse_int(_sysctl("iogpu.wired_limit_mb")),
        )
    on_gpu = architecture.startswith("sm_")
    return DeviceDescription(
        system=system,
        chip=name if on_gpu else "",
        architecture=architecture if on_gpu else "",
        driver=_read_nvidia_driver(),
        driver_cuda=_read_driver_cuda(),
        wheel_cuda=_find_cuda_wheel(),
    )


def read_wheel_tag(distribution: str) -> str | None:
    """Returns the platform tag of an installed wheel, or None if it was not installed from one."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    tags = re.findall(r"^Tag: *\S+-\S+-(\S+)$", text, re.MULTILINE)
    return tags[0] if tags else None


def _find_cuda_wheel() -> int | None:
    for version in (13, 12):
        try:
            importlib.metadata.distribution(f"mlx-cuda-{version}")
        except importlib.metadata.PackageNotFoundError:
            continue
        return version
    return None


def _read_nvidia_driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.readline())
    except OSError:
        return ""
    return found[1] if found else ""


def _read_driver_cuda() -> tuple[int, ...]:
    """Returns the latest version of CUDA that the driver supports."""
    if sys.platform != "linux":
        return ()
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return ()
    except (OSError, AttributeError):
        return ()
    return version.value // 1000, version.value % 1000 // 10


def _sysctl(name: str) -> str:
    """Returns a value from the macOS kernel, or "" if there is none."""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _parse_int(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version) or "unknown"
