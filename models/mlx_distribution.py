"""Which distribution MLX's shared library comes from: mlx-cpu, mlx-cuda or mlx-metal.

Knows: the names of MLX's distributions, the records of installed files. Must not know: MLX itself.

Each of these distributions has the same file `mlx/lib/libmlx`. If several are installed, the one
that was installed last has overwritten the others. Only the digests in their records tell which it
is.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

_BACKENDS = re.compile(r"mlx-(cpu|cuda|metal)\b.*")
_LIBRARY = re.compile(r"mlx/lib/libmlx\.(so|dylib)")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxDistribution:
    """name: of the distribution, or "unknown". others: further distributions that installed the
    same library, which this one replaced."""

    name: str
    version: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def find_mlx_distribution() -> MlxDistribution:
    """Finds the distribution whose library is in place. Reads the whole library if there are
    several candidates."""
    found = sorted(_list_backends(), key=lambda one: one.name)
    for one in found:
        if len(found) == 1 or _is_intact(one):
            others = tuple(str(other) for other in found if other is not one)
            return MlxDistribution(name=one.name, version=one.version, others=others)
    return MlxDistribution(name="unknown", version="", others=tuple(map(str, found)))


@dataclass(frozen=True, slots=True)
class _Backend:
    """digest: of the library, in the form of a record: base64 without padding."""

    name: str
    version: str
    library: Path
    digest: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def _list_backends() -> Iterator[_Backend]:
    seen: set[str] = set()
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _BACKENDS.fullmatch(name) and name not in seen:
            seen.add(name)
            yield from _find_library(name, distribution)


def _find_library(name: str, distribution: Distribution) -> Iterator[_Backend]:
    for file in distribution.files or ():
        if _LIBRARY.fullmatch(file.as_posix()):
            digest = file.hash.value if file.hash is not None else ""
            path = Path(str(file.locate()))
            yield _Backend(name, distribution.version, path, digest)
            return


def _is_intact(backend: _Backend) -> bool:
    """Returns whether the library has the digest in the record."""
    digest = hashlib.sha256()
    try:
        with backend.library.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() == backend.digest
