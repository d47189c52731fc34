"""The distribution mlxrunner-cuda: the files of mlxrunner, with requirements for NVIDIA GPUs.

Knows: the metadata format (packaging.python.org, "Core metadata"). Must not know: wheels.

mlx-cpu and the CUDA libraries of MLX contain the same file, libmlx.so. An extra can only add
requirements, and the plain dependencies of mlxrunner on Linux include mlx-cpu. Therefore the CUDA
variant is a separate distribution. As a script, this module prints its requirements for
requirements/cuda.txt:

    python deploy/wheel/cuda_distribution.py pyproject.toml
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

NAME = "mlxrunner-cuda"

_REPLACED = frozenset({"mlx", "scipy-openblas32"})
_FIELD = "Requires-Dist: "


def list_requirements(requirements: Iterable[str]) -> Iterator[str]:
    """Yields the requirements of mlxrunner-cuda, given those of mlxrunner. Requirements of an extra
    are included unchanged."""
    version = ""
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or name[0].lower() not in _REPLACED or "extra ==" in requirement:
            yield requirement
        elif found := re.search(r">=([\w.]+)", requirement):
            version = found[1] if name[0].lower() == "mlx" else version
    # of an extra, mlx requires CUDA on Linux only
    yield f"mlx[cuda13]>={version}"


def rewrite_metadata(metadata: str) -> str:
    """Converts the METADATA file of mlxrunner to that of mlxrunner-cuda. Installers ignore
    Provides-Dist and Obsoletes-Dist, which document the relation of the two."""
    head, blank, body = metadata.partition("\n\n")
    required = [line.removeprefix(_FIELD) for line in head.splitlines() if line.startswith(_FIELD)]
    lines = [
        f"Name: {NAME}" if line == "Name: mlxrunner" else line
        for line in head.splitlines()
        if not line.startswith(_FIELD) and line != "Provides-Extra: cpu"
    ]
    lines += ["Provides-Dist: mlxrunner", "Obsoletes-Dist: mlxrunner"]
    lines += [_FIELD + requirement for requirement in list_requirements(required)]
    return "\n".join(lines) + blank + body


def main() -> None:
    project = tomllib.loads(Path(sys.argv[1]).read_text("utf-8"))["project"]
    print("# " + NAME, *list_requirements(project["dependencies"]), sep="\n")


if __name__ == "__main__":
    main()
