"""Ollama's store, which consists of manifests and blobs.

Knows: the layout on disk, the names of models. Must not know: the meaning of a blob.

    manifests/<host>/<namespace>/<model>/<tag>      JSON: the blobs and their roles
    blobs/sha256-<64 digits>                        named by the digest of the content
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.store import digests
from app.store.config_files import is_regular_file, model_files_error, read_json_object
from app.store.model_names import OllamaName, parse_ollama_name

TENSOR, JSON, TEMPLATE, SYSTEM, PARAMS, GGUF, PROJECTOR, ADAPTER, MESSAGES, LICENSE = (
    f"application/vnd.ollama.image.{kind}"
    for kind in (
        "tensor",
        "json",
        "template",
        "system",
        "params",
        "model",
        "projector",
        "adapter",
        "messages",
        "license",
    )
)

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

# the maximum size of a manifest; one blob for each of 50,000 experts takes 10 MB
_MAX_MANIFEST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLayer:
    """One layer of a manifest. media_type: one of the media types above, or an unknown one. name:
    the name of a tensor or of the original file, such as config.json. sha256: 64 hexadecimal
    digits."""

    media_type: str
    name: str
    blob: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest. layers: the layers in the order of the file. Each blob exists and has the given
    size. config: Ollama's description of the model."""

    path: Path
    layers: tuple[ManifestLayer, ...]
    config: ManifestLayer

    def get_layers(self, media_type: str) -> list[ManifestLayer]:
        return [layer for layer in self.layers if layer.media_type == media_type]


def store_folder() -> Path:
    given = os.environ.get("OLLAMA_MODELS")
    return Path(given).expanduser() if given else Path.home() / ".ollama" / "models"


def get_manifest_path(name: OllamaName) -> Path:
    return store_folder() / "manifests" / name.host / name.namespace / name.model / name.tag


def get_blob_path(sha256: str) -> Path:
    return store_folder() / "blobs" / f"sha256-{sha256}"


def list_names() -> Iterator[OllamaName]:
    """Yields every name that has a manifest."""
    folder = store_folder() / "manifests"
    # the fixed depth makes circular links harmless
    for path in sorted(folder.glob("*/*/*/*")):
        if path.is_dir():
            continue
        host, namespace, model, tag = path.relative_to(folder).parts
        name = parse_ollama_name(f"{host}/{namespace}/{model}:{tag}")
        if name is not None:
            yield name


def read(path: Path) -> Manifest | None:
    """Reads a manifest. Returns None if the file does not exist. Raises AppError(MODEL_FILES) for
    an invalid manifest and for missing or truncated blobs. The message is one line that names the
    file."""
    content = read_json_object(path, max_bytes=_MAX_MANIFEST_BYTES)
    if content is None:
        return None
    entries = content.get("layers")
    if not isinstance(entries, list):
        raise model_files_error(f"{path} is not a manifest: it has no layers")
    # a tensor blob contains a weight and its scales, or a group of experts, so a digest may occur
    # twice
    layers = tuple(_parse_layer(path, layer) for layer in cast("list[Any]", entries))
    return Manifest(path=path, layers=layers, config=_parse_layer(path, content.get("config")))


def verify_layer(layer: ManifestLayer) -> None:
    """Raises AppError(MODEL_FILES) for a small blob whose content does not match its digest."""
    try:
        valid = digests.sha256(layer.blob) == layer.sha256
    except OSError as error:
        raise model_files_error(f"{layer.blob} cannot be read: {error}") from error
    if not valid:
        raise model_files_error(
            f"{layer.blob} ({layer.name or layer.media_type}) is damaged: its SHA-256 does not "
            "match its name; remove it and run `ollama pull` again"
        )


def get_digests(shards: tuple[Path, ...]) -> Mapping[Path, str]:
    """Returns the expected digest of each shard. Only Ollama's file names contain a digest."""
    named = {path: _DIGEST.fullmatch(path.name.replace("-", ":", 1)) for path in shards}
    return {path: match[1] for path, match in named.items() if match}


def _parse_layer(path: Path, entry: Any) -> ManifestLayer:
    match entry:
        case {"mediaType": str(role), "digest": str(digest), "size": int(size)}:
            pass
        case _:
            raise model_files_error(
                f"{path} is not a manifest: a layer lacks mediaType, digest or size"
            )
    named: Any = cast(dict[str, Any], entry).get("name", "")
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise model_files_error(f"{path} lists {digest[:100]!r}, which is not a SHA-256 digest")
    blob = get_blob_path(match[1])
    if not is_regular_file(blob):
        raise model_files_error(
            f"{path} lists {blob.name}, which is missing: run `ollama pull` again"
        )
    if blob.stat().st_size != size:
        raise model_files_error(
            f"{blob} has {blob.stat().st_size} bytes, but {path} gives {size}: remove it and run "
            "`ollama pull` again"
        )
    return ManifestLayer(media_type=role, name=str(named), blob=blob, sha256=match[1])
