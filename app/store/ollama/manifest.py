"""Ollama's store: names, manifests and the blobs that they name.

Knows: the layout on disk. Must not know: what a blob says.

    manifests/<host>/<namespace>/<model>/<tag>      JSON: which blobs, in which role
    blobs/sha256-<64 digits>                        each under the digest of what it holds
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, Kind
from app.store import digests
from app.store.documents import is_there, read_object
from app.store.names import OllamaName, ollama_name

TENSOR, JSON, TEMPLATE, SYSTEM, PARAMS, GGUF, ADAPTER, MESSAGES = (
    f"application/vnd.ollama.image.{kind}"
    for kind in (
        "tensor",
        "json",
        "template",
        "system",
        "params",
        "model",
        "adapter",
        "messages",
    )
)

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

# a blob for each of 50,000 experts takes 10 MB
_LARGEST_MANIFEST = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """role: one of the media types above, or one that is not known here. name: of a tensor, or of
    the file that it was, such as config.json. sha256: 64 digits."""

    role: str
    name: str
    blob: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """layers: in the order of the file; each blob is there and has its size. config: what Ollama
    says of the model."""

    path: Path
    layers: tuple[Layer, ...]
    config: Layer

    def of(self, role: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.role == role]


def root() -> Path:
    given = os.environ.get("OLLAMA_MODELS")
    return Path(given).expanduser() if given else Path.home() / ".ollama" / "models"


def path_of(name: OllamaName) -> Path:
    return root() / "manifests" / name.host / name.namespace / name.model / name.tag


def everything() -> Iterator[OllamaName]:
    """Every name that has a manifest."""
    folder = root() / "manifests"
    # so many levels and no more: no link can lead round and round
    for path in sorted(folder.glob("*/*/*/*")):
        if path.is_dir():
            continue
        host, namespace, model, tag = path.relative_to(folder).parts
        name = ollama_name(f"{host}/{namespace}/{model}:{tag}")
        if name is not None:
            yield name


def read(path: Path) -> Manifest | None:
    """None when there is no such file. Raises AppError(MODEL_FILES), one line that names the
    file, for a manifest that makes no sense and for blobs that are missing or cut off."""
    found = read_object(path, most=_LARGEST_MANIFEST)
    if found is None:
        return None
    told = found.get("layers")
    if not isinstance(told, list):
        raise _bad(f"{path} is not a manifest: it has no layers")
    # one tensor blob holds a weight and its scales, or a group of experts: a digest may come twice
    layers = tuple(_layer(path, layer) for layer in cast("list[Any]", told))
    return Manifest(path=path, layers=layers, config=_layer(path, found.get("config")))


def check(layer: Layer) -> None:
    """Raises AppError(MODEL_FILES) for a small blob that does not hold what its name says."""
    try:
        whole = digests.sha256(layer.blob) == layer.sha256
    except OSError as error:
        raise _bad(f"{layer.blob} cannot be read: {error}") from error
    if not whole:
        raise _bad(
            f"{layer.blob} ({layer.name or layer.role}) is damaged: its SHA-256 is not the one in "
            "its name; remove it and run `ollama pull` again"
        )


def digests_of(shards: tuple[Path, ...]) -> Mapping[Path, str]:
    """What each must hash to. Only Ollama names a file so."""
    named = {path: _DIGEST.fullmatch(path.name.replace("-", ":", 1)) for path in shards}
    return {path: match[1] for path, match in named.items() if match}


def _layer(path: Path, told: Any) -> Layer:
    match told:
        case {"mediaType": str(role), "digest": str(digest), "size": int(size)}:
            pass
        case _:
            raise _bad(f"{path} is not a manifest: a layer lacks mediaType, digest or size")
    named: Any = cast(dict[str, Any], told).get("name", "")
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise _bad(f"{path} lists {digest[:100]!r}, which is not a SHA-256 digest")
    blob = root() / "blobs" / f"sha256-{match[1]}"
    if not is_there(blob):
        raise _bad(f"{path} lists {blob.name}, which is missing: run `ollama pull` again")
    if blob.stat().st_size != size:
        raise _bad(
            f"{blob} has {blob.stat().st_size} bytes, but {path} gives {size}: remove it and run "
            "`ollama pull` again"
        )
    return Layer(role=role, name=str(named), blob=blob, sha256=match[1])


def _bad(message: str) -> AppError:
    return AppError(Kind.MODEL_FILES, message)
