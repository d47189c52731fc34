"""Models of Ollama's store: from a manifest to ModelFiles.

Knows: the role of each layer, Ollama's parameter names. Must not know: where blobs are, tensors.

The files of a model folder are blobs here; in addition there are a system prompt, a template and
parameters. The template is a Go template, which is not used: models with tensor layers also include
tokenizer_config.json with their Jinja template.
"""

import logging
from collections.abc import Mapping
from typing import Any

from app.core.errors import AppError, ErrorKind
from app.core.model_files import Json, ModelFiles
from app.store import safetensors_header
from app.store.config_files import read_json_object, read_text
from app.store.model_names import OllamaName
from app.store.ollama import manifest
from app.store.ollama.manifest import (
    ADAPTER,
    GGUF,
    JSON,
    MESSAGES,
    PARAMS,
    SYSTEM,
    TEMPLATE,
    TENSOR,
    Manifest,
)
from app.store.vocabulary import count_token_ids

log = logging.getLogger(__name__)

# Ollama's parameter -> the equivalent key of generation_config.json
_PARAMETERS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_predict": "max_new_tokens",
    "seed": "seed",
    "stop": "stop_strings",
}

# in Ollama, 0 and below mean none
_POSITIVE = ("repeat_penalty", "num_predict")

# tensors of a draft model for speculative decoding
_DRAFT_PREFIX = "draft."


def find(name: OllamaName) -> ModelFiles | None:
    """Finds a model; None if the store has no such name. Verifies the digests of small blobs;
    tensors are not read, `manifest.get_digests` returns their digests.

    Raises AppError(MODEL_FILES), one line, for a model that cannot be served.
    """
    found = manifest.read(manifest.get_manifest_path(name))
    if found is None:
        return None
    _check_format(name, found)
    files = {layer.name: layer for layer in found.get_layers(JSON)}
    for layer in (
        *files.values(),
        *found.get_layers(SYSTEM),
        *found.get_layers(PARAMS),
        *found.get_layers(TEMPLATE),
    ):
        manifest.verify_layer(layer)
    for needed in ("config.json", "tokenizer.json"):
        if needed not in files:
            raise _model_files_error(f"{found.path} has no {needed} layer: run `ollama pull` again")
    names = ("config.json", "tokenizer_config.json", "generation_config.json")
    objects = {
        file: read_json_object(files[file].blob) or {} if file in files else {} for file in names
    }
    # each blob once, although several tensors may share one
    tensors = found.get_layers(TENSOR)
    blobs = dict.fromkeys(layer.blob for layer in tensors if _is_model_tensor(layer.name))
    parameters = _read_parameters(found)
    jinja = files.get("chat_template.jinja")
    template = None if jinja is None else read_text(jinja.blob)
    if found.get_layers(TEMPLATE) and template is None and not _has_template(objects):
        log.warning("%s: its chat template is in Ollama's Go format, which is not supported", name)
    shards = [safetensors_header.read(blob) for blob in blobs]
    return ModelFiles(
        name=str(name),
        path=found.path,
        config=objects["config.json"],
        shards=tuple(blobs),
        tokenizer_path=files["tokenizer.json"].blob,
        tokenizer_config=objects["tokenizer_config.json"],
        generation_config=_merge_generation_config(objects["generation_config.json"], parameters),
        chat_template=template,
        created=int(found.path.stat().st_mtime),
        system_prompt=_read_system_prompt(found),
        recommended_context=_read_context_length(found, parameters),
        tokenizer_vocab_size=count_token_ids(files["tokenizer.json"].blob),
        weight_bytes=sum(header.nbytes for header in shards),
        weights_digest=safetensors_header.combine_fingerprints(shards),
    )


def _is_model_tensor(tensor: str) -> bool:
    return not tensor.startswith(_DRAFT_PREFIX)


def _check_format(name: OllamaName, found: Manifest) -> None:
    """Raises AppError(MODEL_FILES) unless the model consists of tensor layers without adapters."""
    if found.get_layers(GGUF) or not found.get_layers(TENSOR):
        raise _model_files_error(
            f"{name} is a GGUF model, which is not supported: look for the same model "
            "in safetensors, such as those of mlx-community: `mlxrunner pull mlx-community/...`"
        )
    if found.get_layers(ADAPTER):
        raise _model_files_error(
            f"{name} has a LoRA adapter, which is not supported: serve the base model"
        )
    if found.get_layers(MESSAGES):
        log.warning("%s: its example conversation (MESSAGE) is ignored", name)


def _has_template(objects: Mapping[str, Json]) -> bool:
    return bool(objects["tokenizer_config.json"].get("chat_template"))


def _read_system_prompt(found: Manifest) -> str | None:
    texts = [read_text(layer.blob) or "" for layer in found.get_layers(SYSTEM)]
    return "\n\n".join(filter(None, texts)) or None


def _read_parameters(found: Manifest) -> Json:
    """Merges the parameters. Later layers win, as in Ollama."""
    merged: dict[str, Any] = {}
    for layer in found.get_layers(PARAMS):
        merged.update(read_json_object(layer.blob) or {})
    ignored = sorted(merged.keys() - _PARAMETERS.keys() - {"num_ctx"})
    if ignored:
        log.info("%s: ignored parameters: %s", found.path, ", ".join(ignored))
    return merged


def _merge_generation_config(config: Json, parameters: Json) -> Json:
    """Overrides generation_config.json with the parameters. Both are validated in
    app.core.generation_config."""
    changed = {
        key: parameters[name]
        for name, key in _PARAMETERS.items()
        if name in parameters and not _is_unset(name, parameters[name])
    }
    if "temperature" in changed:  # a temperature enables sampling, whatever the file contains
        config = {key: value for key, value in config.items() if key != "do_sample"}
    return {**config, **changed}


def _is_unset(name: str, value: Any) -> bool:
    if not isinstance(value, int | float):
        return False
    return (name in _POSITIVE and value <= 0) or (name == "seed" and value < 0)


def _read_context_length(found: Manifest, parameters: Json) -> int | None:
    value: Any = parameters.get("num_ctx")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _model_files_error(
            f"{found.path}: the parameter num_ctx is {value!r}, but must be 1 or more"
        )
    return value


def _model_files_error(message: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, message)
