"""The installed distributions of mlxrunner and of MLX's library, and Metal's GPU names, without
importing MLX.

Knows: the metadata of installed distributions, the files of MLX, the form of the names. Must not
know: MLX's modules, the machine.

The distributions mlx-cpu, mlx-cuda-12 and mlx-cuda-13 install the same file, mlx/lib/libmlx.so.
Installers do not prevent this. The last one that was installed has overwritten the library of the
others, and removing one of them removes the library. MLX then fails at import, or computes on a
different device than intended.
"""

import csv
import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from app.core.errors import AppError, ErrorKind

# deploy/wheel/cuda_distribution.py builds the second one
_OWN_NAMES = ("mlxrunner", "mlxrunner-cuda")

_LIBRARY = "mlx/lib/libmlx.so"

# The first generations of GPUs with neural accelerators, of computers and of phones
# (mlx/backend/metal/device.cpp, `is_nax_available`).
_ACCELERATOR_GENERATION, _PHONE_GENERATION = 17, 18


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxLibrary:
    """The state of libmlx.so.

    providers: the installed distributions that have this file, as (name, version). loaded: the name
    of the provider whose file is installed; None if the file is missing or of none of them. own:
    the installed distributions of mlxrunner, as (name, version).
    """

    providers: tuple[tuple[str, str], ...]
    loaded: str | None
    own: tuple[tuple[str, str], ...]

    @property
    def is_consistent(self) -> bool:
        """Whether MLX can be used. Without a provider, MLX was installed in a different way."""
        return not self.providers or (len(self.providers) == 1 and self.loaded is not None)


def get_own_version() -> str:
    """Returns the version of mlxrunner, whichever distribution is installed."""
    for name in _OWN_NAMES[:-1]:
        if (version := _find_version(name)) is not None:
            return version
    return get_version(_OWN_NAMES[-1])


def get_version(name: str) -> str:
    """Returns the version of an installed distribution. Raises PackageNotFoundError of
    importlib.metadata, which is imported only for a distribution in an unusual place, because the
    import takes as long as half of a command's other imports."""
    if (version := _find_version(name)) is not None:
        return version
    import importlib.metadata

    return importlib.metadata.version(name)


def _find_version(name: str) -> str | None:
    """Returns the version in the name of the dist-info folder, or None if there is no folder."""
    pattern = f"{name.replace('-', '_')}-*.dist-info"
    found = (info for place in sys.path for info in Path(place or ".").glob(pattern))
    return next((_parse_info(info)[1] for info in found), None)


def inspect_mlx_library(folder: Path | None = None) -> MlxLibrary:
    """Compares libmlx.so with the records of the distributions that have it. folder: the folder
    that contains the package mlx; None searches sys.path.

    The size decides, because hashing the 21 MB of the CPU's library would take 45 ms at each start,
    and different libraries rarely have the same number of bytes.
    """
    place = folder or _find_mlx_folder()
    if place is None:
        return MlxLibrary(providers=(), loaded=None, own=())
    library = place / _LIBRARY
    providers: list[tuple[str, str]] = []
    loaded: str | None = None
    for info in sorted(place.glob("mlx_*.dist-info")):
        size = _read_recorded_size(info / "RECORD")
        if size is None:
            continue
        name, version = _parse_info(info)
        providers.append((name, version))
        if library.is_file() and library.stat().st_size == size:
            loaded = name
    own = [
        _parse_info(info)
        for name in _OWN_NAMES
        for info in place.glob(f"{name.replace('-', '_')}-*.dist-info")
    ]
    return MlxLibrary(providers=tuple(providers), loaded=loaded, own=tuple(own))


def check_mlx_library(library: MlxLibrary | None = None) -> None:
    """Raises AppError if several distributions have installed libmlx.so, or if it is not the file
    of the installed one. The message contains the two commands that repair it."""
    found = inspect_mlx_library() if library is None else library
    if found.is_consistent:
        return
    names = " and ".join(name for name, _ in found.providers)
    if len(found.providers) > 1:
        loaded = found.loaded or "neither"
        what = f"{names} are both installed, but have the same file libmlx.so (now of {loaded})"
    else:
        what = f"libmlx.so is not the file of {names}, the installed distribution"
    remove, install = repair_commands(found)
    raise AppError(ErrorKind.INVALID, f"{what}; repair MLX with: {remove} && {install}")


def repair_commands(found: MlxLibrary) -> tuple[str, str]:
    """Returns the command that removes all distributions in question, and the command that installs
    those that are kept."""
    wants_cuda = any(name == _OWN_NAMES[1] for name, _ in found.own)
    if len(found.own) != 1:
        wants_cuda = (found.loaded or "").startswith("mlx-cuda")
    kept = [p for p in found.providers if p[0].startswith("mlx-cuda") == wants_cuda][-1:]
    kept = kept or [found.providers[-1]]
    removed = [name for name, _ in found.providers]
    if len(found.own) > 1:  # they also have the same files
        removed += [name for name, _ in found.own]
        kept += [own for own in found.own if (own[0] == _OWN_NAMES[1]) == wants_cuda]
    pins = [f"{name}=={version}" for name, version in kept]
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is not None:
        uninstall, install = (
            f"{python} -m pip uninstall --yes",
            f"{python} -m pip install --no-deps",
        )
    else:  # an environment of uv
        uninstall = f"uv pip uninstall --python {python}"
        install = f"uv pip install --python {python} --no-deps"
    return f"{uninstall} {' '.join(removed)}", f"{install} {' '.join(pins)}"


def _parse_info(info: Path) -> tuple[str, str]:
    """Returns the name and the version in the name of a dist-info folder."""
    name, version = info.name.removesuffix(".dist-info").rsplit("-", 1)
    return name.replace("_", "-"), version


def _find_mlx_folder() -> Path | None:
    """Returns the folder that contains the package mlx. It is a namespace package, so several
    folders can contain parts of it; the first one with mlx.core is the one that is imported."""
    found = importlib.util.find_spec("mlx")
    places = map(Path, (found and found.submodule_search_locations) or ())
    return next((place.parent for place in places if any(place.glob("core*"))), None)


def _read_recorded_size(record: Path) -> int | None:
    """Returns the size of libmlx.so in a RECORD file. Returns None if the file is not listed."""
    try:
        with record.open(encoding="utf-8", newline="") as lines:
            rows = [row for row in csv.reader(lines) if row and row[0] == _LIBRARY]
    except OSError:
        return None
    return int(rows[0][2]) if rows and len(rows[0]) > 2 and rows[0][2].isdecimal() else None


def has_accelerator_hardware(architecture: str) -> bool:
    """Returns whether a GPU has neural accelerators, from Metal's name of its architecture."""
    match = re.fullmatch(r"applegpu_g(\d\d)(\w)", architecture)
    if match is None:
        return False
    least = _PHONE_GENERATION if match[2] == "p" else _ACCELERATOR_GENERATION
    return int(match[1]) >= least
