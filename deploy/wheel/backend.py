"""The build backend, which creates a wheel with the single top-level package `mlxrunner`.

Knows: the wheel format (packaging.python.org, "Binary distribution format"). Must not know: the
build of the wheel's contents.

The source tree has the two top-level packages `app` and `models`. Many projects have packages with
these names, and site-packages can contain only one of each. Therefore this backend repacks the
wheel of scikit-build-core. Both packages move into a folder `mlxrunner`, and launcher.py becomes
the `__init__` of that folder. It puts the folder first on `sys.path`, so no import statement
changes. openapi.yaml, which the server serves, is next to them, as in the source tree. Editable
installs and sdists come from the upstream backend unchanged.
"""

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

from scikit_build_core.setuptools import build_meta
from scikit_build_core.setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

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
_LAUNCHER = Path(__file__).with_name("launcher.py")
_OPENAPI = Path(__file__).parents[2] / "openapi.yaml"
_MAIN = f"import sys\n\nfrom {PACKAGE} import main\n\nsys.exit(main())\n"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    repack(Path(wheel_directory, name))
    return name


def repack(wheel: Path) -> None:
    """Moves the packages of a wheel into one package, in place."""
    added = {
        f"{PACKAGE}/__init__.py": _LAUNCHER.read_bytes(),
        f"{PACKAGE}/__main__.py": _MAIN.encode(),
        f"{PACKAGE}/{_OPENAPI.name}": _OPENAPI.read_bytes(),
    }
    repacked = wheel.with_suffix(".repacked")
    rows: list[tuple[str, str, int | str]] = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(repacked, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD"))
        entries = [(info, old.read(info)) for info in old.infolist() if info.filename != record]
        dates = entries[0][0].date_time
        entries += [(zipfile.ZipInfo(name, dates), data) for name, data in added.items()]
        for info, data in entries:
            if info.filename.startswith(MOVED):
                info.filename = f"{PACKAGE}/{info.filename}"
            elif info.filename.endswith(".dist-info/top_level.txt"):
                data = f"{PACKAGE}\n".encode()
            elif info.filename.endswith(".dist-info/entry_points.txt"):
                data = data.replace(b"app.cli:main", f"{PACKAGE}:main".encode())
            info.external_attr = info.external_attr or 0o644 << 16
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
            rows.append((info.filename, _digest(data), len(data)))
        new.writestr(zipfile.ZipInfo(record, dates), _write_record([*rows, (record, "", "")]))
    repacked.replace(wheel)


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def _write_record(rows: list[tuple[str, str, int | str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
