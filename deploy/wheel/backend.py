"""The build backend, which creates a wheel with the single top-level package `mlxrunner`.

Knows: the wheel format (packaging.python.org, "Binary distribution format"). Must not know: the
build of the wheel's contents.

The source tree has the two top-level packages `app` and `models`. Many projects have packages with
these names, and site-packages can contain only one of each. Therefore this backend repacks the
wheel of scikit-build-core. Both packages move into a folder `mlxrunner`, and launcher.py becomes
the `__init__` of that folder. It puts the folder first on `sys.path`, so no import statement
changes. openapi.yaml, which the server serves, is next to them, as in the source tree. Editable
installs and sdists come from the upstream backend unchanged.

The environment variable MLXRUNNER_BUILD_FOR selects a wheel for a different target than this
machine. Both are without kernels (models/kernels/CMakeLists.txt) and for every Python:

- `macos` builds a wheel with the tag of MLX's own wheels for macOS. With the tag `any`, it would
  also be installed on Linux with a Python that has no wheel with kernels.
- `cuda` builds the distribution mlxrunner-cuda (cuda_distribution.py), also when editable.

A build for this machine is without kernels if there is no compiler, or with
MLXRUNNER_BUILD_KERNELS=0. The file models/kernels/not_built.txt then gives the reason. CMake writes
it if the build of the kernels fails.
"""

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cuda_distribution  # next to this module (backend-path in pyproject.toml)

try:
    from scikit_build_core.setuptools import build_meta
except ModuleNotFoundError:  # deploy/install.py installs it only where the kernels are compiled
    from setuptools import build_meta

build_sdist = build_meta.build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel


__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

PACKAGE = "mlxrunner"
MOVED = ("app/", "models/")
VARIABLE = "MLXRUNNER_BUILD_FOR"
KERNELS_VARIABLE = "MLXRUNNER_BUILD_KERNELS"
NOTE = "not_built.txt"
TAGS = {"cuda": "py3-none-any", "macos": "py3-none-macosx_14_0_arm64"}
_KERNELS = Path(__file__).resolve().parents[2] / "models/kernels"
_LAUNCHER = Path(__file__).with_name("launcher.py")
_OPENAPI = Path(__file__).parents[2] / "openapi.yaml"
_MAIN = f"import sys\n\nfrom {PACKAGE} import main\n\nsys.exit(main())\n"

_Entries = dict[str, tuple[zipfile.ZipInfo, bytes]]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    target, note = _get_target(), find_missing_note(os.environ)
    _disable_kernels(note)
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return repack(Path(wheel_directory, name), target=target, note=note).name


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    target, note = _get_target(), find_missing_note(os.environ)
    _disable_kernels(note)
    # of an earlier build, for another device or with a compiler
    module = f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    for old in (module, "libmlxrunner_blas.so", NOTE):
        (_KERNELS / old).unlink(missing_ok=True)
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    if note:
        (_KERNELS / NOTE).write_text(note, "utf-8")
    if target != "cuda":
        return name
    wheel = Path(wheel_directory, name)
    return _write(wheel, _rename(_read(wheel)), name.replace(PACKAGE, _CUDA_STEM, 1)).name


def find_missing_note(environ: Mapping[str, str]) -> str | None:
    """Returns the line for not_built.txt, or None if the build of the kernels is to be tried or
    models do not need them here."""
    if environ.get(VARIABLE) or sys.platform != "linux":
        return None
    advice = ""
    if environ.get(KERNELS_VARIABLE) == "0":
        reason = f"the CPU kernels are not built, because {KERNELS_VARIABLE}=0 is set"
    elif not any(map(shutil.which, (environ.get("CXX") or "c++", "c++", "g++", "clang++"))):
        reason = "no C++20 compiler was found, so the CPU kernels are not built"
        advice = "; install g++, and then reinstall mlxrunner (with make or pip)"
    else:
        return None
    lost = "models run on a CPU with MLX's own operations, many times slower"
    return f"mlxrunner: {reason}: {lost}{advice}\n"


def _disable_kernels(note: str | None) -> None:
    if note:
        print(note, end="")
        os.environ[KERNELS_VARIABLE] = "0"


def repack(wheel: Path, *, target: str = "", note: str | None = None) -> Path:
    """Moves the packages of a wheel into one package, in place. Returns the path of the wheel,
    whose name differs for a target other than this machine."""
    entries = _read(wheel)
    date = next(iter(entries.values()))[0].date_time
    packed: _Entries = {}
    for name, (info, data) in entries.items():
        if name.startswith(MOVED):
            name = f"{PACKAGE}/{name}"
        elif name.endswith(".dist-info/top_level.txt"):
            data = f"{PACKAGE}\n".encode()
        elif name.endswith(".dist-info/entry_points.txt"):
            data = data.replace(b"app.cli:main", f"{PACKAGE}:main".encode())
        packed[name] = info, data
    for name, data in (("__init__", _LAUNCHER.read_bytes()), ("__main__", _MAIN.encode())):
        path = f"{PACKAGE}/{name}.py"
        packed[path] = zipfile.ZipInfo(path, date), data
    path = f"{PACKAGE}/{_OPENAPI.name}"
    packed[path] = zipfile.ZipInfo(path, date), _OPENAPI.read_bytes()
    if note:
        path = f"{PACKAGE}/models/kernels/{NOTE}"
        packed[path] = zipfile.ZipInfo(path, date), note.encode()
    file_name = wheel.name
    if target:
        packed = _set_tag(packed, TAGS[target])
        distribution, version = file_name.split("-")[:2]
        if target == "cuda":
            packed, distribution = _rename(packed), _CUDA_STEM
        file_name = f"{distribution}-{version}-{TAGS[target]}.whl"
    return _write(wheel, packed, file_name)


_CUDA_STEM = cuda_distribution.NAME.replace("-", "_")


def _get_target() -> str:
    target = os.environ.get(VARIABLE, "")
    if target and target not in TAGS:
        raise SystemExit(f"{VARIABLE}: {target!r} is none of {', '.join(TAGS)}")
    return target


def _set_tag(entries: _Entries, tag: str) -> _Entries:
    """Sets the tag of a wheel, which must not have compiled files."""
    compiled = [name for name in entries if name.endswith((".so", ".dylib"))]
    if compiled:
        raise SystemExit(f"the wheel {tag} must not have compiled files, but has {compiled}")
    tagged = dict(entries)
    for name, (info, data) in entries.items():
        if name.endswith(".dist-info/WHEEL"):
            text = re.sub(r"(?m)^(Tag|Root-Is-Purelib): .*\n", "", data.decode()).rstrip("\n")
            # files of a pure wheel go to purelib, as in every environment of ours
            tagged[name] = info, f"{text}\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    return tagged


def _rename(entries: _Entries) -> _Entries:
    """Renames the distribution of a wheel to mlxrunner-cuda."""
    renamed: _Entries = {}
    for name, (info, data) in entries.items():
        folder, slash, rest = name.partition("/")
        if folder.endswith(".dist-info"):
            folder = folder.replace(PACKAGE, _CUDA_STEM, 1)
            if rest == "METADATA":
                data = cuda_distribution.rewrite_metadata(data.decode()).encode()
        renamed[folder + slash + rest] = info, data
    return renamed


def _read(wheel: Path) -> _Entries:
    """Reads the files of a wheel, except for its RECORD."""
    with zipfile.ZipFile(wheel) as opened:
        return {
            info.filename: (info, opened.read(info))
            for info in opened.infolist()
            if not info.filename.endswith(".dist-info/RECORD")
        }


def _write(wheel: Path, entries: _Entries, name: str) -> Path:
    """Replaces the wheel with one of this name and these files, and a RECORD. Returns its path."""
    date = next(iter(entries.values()))[0].date_time
    [folder] = {path.partition("/")[0] for path in entries if ".dist-info/" in path}
    record = f"{folder}/RECORD"
    rows: list[tuple[str, str, int | str]] = []
    repacked = wheel.with_suffix(".repacked")
    with zipfile.ZipFile(repacked, "w", zipfile.ZIP_DEFLATED) as new:
        for path, (info, data) in entries.items():
            info.filename = path
            info.external_attr = info.external_attr or 0o644 << 16
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
            rows.append((path, _digest(data), len(data)))
        new.writestr(zipfile.ZipInfo(record, date), _write_record([*rows, (record, "", "")]))
    wheel.unlink()
    return repacked.replace(wheel.with_name(name))


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def _write_record(rows: list[tuple[str, str, int | str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
