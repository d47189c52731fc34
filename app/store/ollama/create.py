"""Creates models in Ollama's store: from another model or from uploaded files.

Knows: the role of each layer. Must not know: HTTP, which models are served. All functions block, so
call them on a thread.

A new model shares the layers of a base model in the store, so that Ollama can also run it. For
other base models, each weight file becomes a layer, which only this server can read.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from app.core.errors import AppError, ErrorKind, mark_client_text, redact_paths
from app.core.model_files import ModelFiles
from app.core.models import ModelRecipe
from app.core.thread_pools import CancelToken
from app.store.config_files import read_json_object
from app.store.gguf import model as gguf_model
from app.store.gguf.projector import has_projector_header
from app.store.model_names import OllamaName
from app.store.ollama import manifest
from app.store.ollama.manifest import (
    GGUF,
    JSON,
    LICENSE,
    MESSAGES,
    PARAMS,
    PROJECTOR,
    SYSTEM,
    TENSOR,
    Manifest,
    ManifestLayer,
)
from app.store.ollama.model import PARENT_KEY
from app.store.ollama.writer import (
    BlobReference,
    add_blob,
    get_blob_path,
    parse_digest,
    write_blob,
    write_json_blob,
    write_manifest,
)

# files of a model folder that become layers, in addition to the weights
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)

_GGUF_SUFFIX, _WEIGHTS_SUFFIX = ".gguf", ".safetensors"
_WEIGHTS_NAME = re.compile(r"\w[\w.-]{0,200}\.safetensors", re.ASCII)


def create_model(
    name: OllamaName, recipe: ModelRecipe, base: ModelFiles | None, token: CancelToken
) -> None:
    """Creates a model. base: the files of `recipe.base`. Raises AppError, and WorkCancelled soon
    after `token` is cancelled. In both cases, no model is created or replaced."""
    if base is None:
        layers, config = _import_files(recipe, token), dict[str, Any]()
    else:
        layers, config = _take_layers(base, token)
    layers = _replace_text(layers, SYSTEM, recipe.system)
    layers = _replace_text(layers, LICENSE, recipe.license)
    if recipe.messages is not None:
        layers = _without(layers, MESSAGES)
        messages = [{"role": role, "content": content} for role, content in recipe.messages]
        layers += [write_json_blob(messages, MESSAGES)] if messages else []
    layers = _merge_parameters(layers, recipe.parameters)
    token.check()
    if any(layer.media_type == GGUF for layer in layers):
        config = {"model_format": "gguf", **config}
    write_manifest(name, layers, {**_describe(base), **config, PARENT_KEY: recipe.base or ""})


def _take_layers(
    base: ModelFiles, token: CancelToken
) -> tuple[list[BlobReference], Mapping[str, Any]]:
    """Returns the layers and the config of the base."""
    if base.path.is_dir():
        return _import_folder(base, token), {}
    if base.path in base.shards:
        return _import_gguf(base, token), {}
    base_manifest = manifest.read(base.path)
    if base_manifest is None:
        message = f"{base.name} was deleted in the meantime"
        raise AppError(ErrorKind.MODEL_NOT_FOUND, message)
    return [_refer(layer) for layer in base_manifest.layers], _read_config(base_manifest)


def _read_config(base_manifest: Manifest) -> Mapping[str, Any]:
    config = read_json_object(base_manifest.config.blob) or {}
    return {key: value for key, value in config.items() if key != "rootfs"}


def _refer(layer: ManifestLayer) -> BlobReference:
    return BlobReference(
        media_type=layer.media_type,
        sha256=layer.sha256,
        size=layer.blob.stat().st_size,
        name=layer.name,
    )


def _import_folder(base: ModelFiles, token: CancelToken) -> list[BlobReference]:
    names = [name for name in _JSON_FILES if (base.path / name).is_file()]
    layers = [add_blob(base.path / name, JSON, name, token) for name in names]
    return layers + [add_blob(shard, TENSOR, shard.name, token) for shard in base.shards]


def _import_gguf(base: ModelFiles, token: CancelToken) -> list[BlobReference]:
    if len(base.shards) > 1:
        message = f"{base.name} consists of {len(base.shards)} files: merge them first"
        raise AppError(ErrorKind.INVALID, message)
    layers = [add_blob(base.path, GGUF, "", token)]
    if base.projector_path is not None and base.projector_path not in base.shards:
        layers.append(add_blob(base.projector_path, PROJECTOR, "", token))
    return layers


def _import_files(recipe: ModelRecipe, token: CancelToken) -> list[BlobReference]:
    """Creates layers from uploaded files. Raises AppError(INVALID)."""
    layers: list[BlobReference] = []
    if any(name.endswith(_GGUF_SUFFIX) for name in recipe.files):
        return _import_gguf_files(recipe, token)
    for name, digest in recipe.files.items():
        path = _find_upload(name, digest)
        token.check()
        is_weights = _WEIGHTS_NAME.fullmatch(name) is not None
        if not is_weights and name not in _JSON_FILES:
            continue  # for example, a README
        layers.append(
            BlobReference(
                media_type=TENSOR if is_weights else JSON,
                sha256=parse_digest(digest),
                size=path.stat().st_size,
                name=name,
            )
        )
    names = {layer.name for layer in layers}
    for needed in ("config.json", "tokenizer.json"):
        if needed not in names:
            raise AppError(ErrorKind.INVALID, f"files has no {needed}, which a model needs")
    if all(layer.media_type != TENSOR for layer in layers):
        raise AppError(ErrorKind.INVALID, "files has no .safetensors file, which a model needs")
    return layers


def _import_gguf_files(recipe: ModelRecipe, token: CancelToken) -> list[BlobReference]:
    """Creates the layers of an uploaded GGUF file, which contains the whole model, and of its
    projector. Raises AppError(INVALID)."""
    found: dict[str, list[BlobReference]] = {GGUF: [], PROJECTOR: []}
    for name, digest in recipe.files.items():
        if name.endswith(_WEIGHTS_SUFFIX):
            message = "files must not contain both GGUF and .safetensors files"
            raise AppError(ErrorKind.INVALID, message)
        path = _find_upload(name, digest)
        token.check()
        if not name.endswith(_GGUF_SUFFIX):
            continue  # for example, a README
        media_type = PROJECTOR if _is_projector(name, path) else GGUF
        layer = BlobReference(
            media_type=media_type, sha256=parse_digest(digest), size=path.stat().st_size
        )
        found[media_type].append(layer)
    for kind, layers in (("model", found[GGUF]), ("projector", found[PROJECTOR])):
        if len(layers) > 1:
            raise AppError(
                ErrorKind.INVALID,
                f"files has {len(layers)} GGUF files of the type {kind}, but only one is "
                "supported: merge the files of a split model with llama-gguf-split --merge",
            )
    if not found[GGUF]:
        message = "files has only a projector: add the GGUF file of the model"
        raise AppError(ErrorKind.INVALID, message)
    return [*found[GGUF], *found[PROJECTOR]]


def _is_projector(name: str, path: Path) -> bool:
    if not gguf_model.is_gguf(path):
        message = f"{mark_client_text(name[:100])} does not begin as a GGUF file"
        raise AppError(ErrorKind.INVALID, message)
    try:
        return has_projector_header(path)
    except AppError as error:
        redacted = redact_paths(error, path, mark_client_text(name[:100]))
        raise AppError(ErrorKind.INVALID, redacted.marked_message) from error


def _find_upload(name: str, digest: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise AppError(ErrorKind.INVALID, "file path must be relative")
    path = get_blob_path(parse_digest(digest))
    if not path.is_file():
        shown = mark_client_text(name[:100])
        message = f"the blob of {shown} is missing: upload it with POST /api/blobs/{digest}"
        raise AppError(ErrorKind.INVALID, message)
    return path


def _replace_text(
    layers: list[BlobReference], media_type: str, text: str | None
) -> list[BlobReference]:
    if text is None:
        return layers
    remaining = _without(layers, media_type)
    return [*remaining, write_blob(text.encode(), media_type)] if text else remaining


def _merge_parameters(
    layers: list[BlobReference], parameters: Mapping[str, Any]
) -> list[BlobReference]:
    """Adds parameters, which override the parameters of the base model."""
    if not parameters:
        return layers
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer.media_type == PARAMS:
            merged.update(read_json_object(get_blob_path(layer.sha256)) or {})
    merged.update(parameters)
    return [*_without(layers, PARAMS), write_json_blob(merged, PARAMS)]


def _without(layers: Iterable[BlobReference], media_type: str) -> list[BlobReference]:
    return [layer for layer in layers if layer.media_type != media_type]


def _describe(base: ModelFiles | None) -> dict[str, Any]:
    """Returns the config blob of a model whose base is not in the store."""
    architecture = "" if base is None else str(base.config.get("model_type", ""))
    return {
        "model_format": "safetensors",
        "model_family": architecture,
        "model_families": [architecture] if architecture else [],
        "architecture": "amd64",
        "os": "linux",
    }
