"""Reads models from Ollama's store, by converting manifests to ModelFiles.

Knows: the role of each layer, Ollama's parameter names. Must not know: the location of blobs,
tensors.

The files of a model folder are blobs in this store, or the model is one GGUF file. In addition, a
model has a system prompt, a template and parameters. The template is a Go template and is not used.
Models with tensor layers also include tokenizer_config.json with their Jinja template, and GGUF
files contain theirs.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.core.model_files import Json, ModelFiles, merge_processor_config
from app.store import safetensors_header
from app.store.config_files import (
    model_files_error,
    read_json_array,
    read_json_object,
    read_text,
)
from app.store.gguf import model as gguf_model
from app.store.gguf.templates import find_template
from app.store.hf_folder import read_json_template
from app.store.model_names import OllamaName
from app.store.ollama import manifest
from app.store.ollama.manifest import (
    ADAPTER,
    GGUF,
    JSON,
    LICENSE,
    MESSAGES,
    PARAMS,
    PROJECTOR,
    SYSTEM,
    TEMPLATE,
    TENSOR,
    Manifest,
)
from app.store.vocabulary import read_vocabulary

log = logging.getLogger(__name__)

# Ollama's parameters and the equivalent keys of generation_config.json
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

# in Ollama, these parameters are unset if they are 0 or negative
_POSITIVE = ("repeat_penalty", "num_predict")

# mlxrunner's own key in the config blob; Ollama ignores unknown keys
PARENT_KEY = "parent_model"

# the prefix of tensors of a draft model for speculative decoding
_DRAFT_PREFIX = "draft."


def find(name: OllamaName) -> ModelFiles | None:
    """Finds a model. Returns None if the store does not contain the name. The digests of small
    blobs are verified. Tensors are not read, but `manifest.get_digests` returns their digests.

    Raises AppError(MODEL_FILES), with a message of one line, for a model that cannot be served.
    """
    parsed = manifest.read(manifest.get_manifest_path(name))
    if parsed is None:
        return None
    _check_format(name, parsed)
    for media_type in (JSON, SYSTEM, PARAMS, TEMPLATE, MESSAGES, LICENSE):
        for layer in parsed.get_layers(media_type):
            manifest.verify_layer(layer)
    read = _read_gguf if parsed.get_layers(GGUF) else _read_tensors
    files, parameters = read(name, parsed), _read_parameters(parsed)
    return replace(
        files,
        path=parsed.path,
        generation_config=_merge_generation_config(files.generation_config, parameters),
        created=int(parsed.path.stat().st_mtime),
        system_prompt=_read_texts(parsed, SYSTEM),
        first_messages=_read_messages(parsed),
        license=_read_texts(parsed, LICENSE) or files.license,
        parent=_read_parent(parsed),
        recommended_context=_read_context_length(parsed, parameters),
        adapter_path=next((layer.blob for layer in parsed.get_layers(ADAPTER)), None),
    )


def _read_tensors(name: OllamaName, found: Manifest) -> ModelFiles:
    """Reads the files of a model with tensor layers."""
    files = {layer.name: layer for layer in found.get_layers(JSON)}
    for needed in ("config.json", "tokenizer.json"):
        if needed not in files:
            raise model_files_error(f"{found.path} has no {needed} layer: run `ollama pull` again")
    names = (
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "added_tokens.json",
    )
    objects: dict[str, Json] = {
        file: read_json_object(files[file].blob) or {} if file in files else {} for file in names
    }
    # each blob is listed only once, although several tensors may share one
    tensors = found.get_layers(TENSOR)
    blobs = dict.fromkeys(
        layer.blob for layer in tensors if not layer.name.startswith(_DRAFT_PREFIX)
    )
    jinja = files.get("chat_template.jinja")
    template = None if jinja is None else read_text(jinja.blob)
    template_file = "chat_template.jinja"
    if template is None and not objects["tokenizer_config.json"].get("chat_template"):
        if "chat_template.json" in files:
            template_file = "chat_template.json"
            template = read_json_template(files[template_file].blob)
        elif found.get_layers(TEMPLATE):
            log.warning(
                "%s: its chat template is in Ollama's Go format, which is not supported", name
            )
    vocabulary = read_vocabulary(
        files["tokenizer.json"].blob, objects["tokenizer_config.json"], objects["added_tokens.json"]
    )
    shards = [safetensors_header.read(blob) for blob in blobs]
    return ModelFiles(
        name=str(name),
        path=found.path,
        config=objects["config.json"],
        shards=tuple(blobs),
        tokenizer_path=files["tokenizer.json"].blob,
        tokenizer_config=objects["tokenizer_config.json"],
        generation_config=objects["generation_config.json"],
        chat_template=template,
        chat_template_file=template_file,
        processor_config=merge_processor_config(
            objects["preprocessor_config.json"], objects["processor_config.json"]
        ),
        created=0,
        tokenizer_vocab_size=vocabulary.size,
        added_tokens=vocabulary.missing,
        weight_bytes=sum(header.nbytes for header in shards),
        weights_digest=safetensors_header.combine_fingerprints(shards),
    )


def _read_gguf(name: OllamaName, found: Manifest) -> ModelFiles:
    """Reads a model whose weights are one GGUF file, Ollama's usual format. The file contains the
    tokenizer, and almost always a Jinja template. Otherwise, the template of the family is used,
    because Ollama's own templates are in Go's format."""
    weights = found.get_layers(GGUF)
    if len(weights) > 1:
        raise model_files_error(f"{name} has {len(weights)} GGUF layers, but only one is supported")
    projectors = [layer.blob for layer in found.get_layers(PROJECTOR)]
    files = gguf_model.read(weights[0].blob, name=str(name), projectors=projectors)
    if files.tokenizer_config.get("chat_template") or not found.get_layers(TEMPLATE):
        return files
    return replace(files, chat_template=find_template(weights[0].blob))


def _check_format(name: OllamaName, found: Manifest) -> None:
    """Raises AppError(MODEL_FILES) unless the model consists of tensor layers or a GGUF layer, with
    at most one adapter."""
    if not found.get_layers(GGUF) and not found.get_layers(TENSOR):
        raise model_files_error(
            f"{name} has no weights in a supported format: use the same model in the "
            "safetensors format, for example from mlx-community: "
            "`mlxrunner pull mlx-community/...`"
        )
    if (count := len(found.get_layers(ADAPTER))) > 1:
        raise model_files_error(f"{name} has {count} LoRA adapters, but only one is supported")


def _read_texts(found: Manifest, media_type: str) -> str | None:
    texts = [read_text(layer.blob) or "" for layer in found.get_layers(media_type)]
    return "\n\n".join(filter(None, texts)) or None


def _read_messages(found: Manifest) -> tuple[tuple[str, str], ...]:
    """Reads the messages of Ollama's MESSAGE instruction: a JSON array of objects with role and
    content."""
    messages: list[tuple[str, str]] = []
    for layer in found.get_layers(MESSAGES):
        value = read_json_array(layer.blob)
        for entry in value or ():
            match entry:
                case {"role": "system" | "user" | "assistant" as role, "content": str(content)}:
                    messages.append((role, content))
                case _:
                    raise model_files_error(
                        f"{layer.blob} holds a message that is not a role and a text"
                    )
    return tuple(messages)


def _read_parent(found: Manifest) -> str:
    """Reads the name of the model from which this model was created, as written by `create`."""
    config = read_json_object(found.config.blob) or {}
    parent = config.get(PARENT_KEY)
    return parent if isinstance(parent, str) else ""


def _read_parameters(found: Manifest) -> Json:
    """Merges the parameters. As in Ollama, later layers take precedence."""
    merged: dict[str, Any] = {}
    for layer in found.get_layers(PARAMS):
        merged.update(read_json_object(layer.blob) or {})
    ignored = sorted(merged.keys() - _PARAMETERS.keys() - {"num_ctx"})
    if ignored:
        log.info("%s: ignored parameters: %s", found.path, ", ".join(ignored))
    return merged


def _merge_generation_config(config: Json, parameters: Json) -> Json:
    """Overrides the values of generation_config.json with the parameters.
    app.core.model_files validates both."""
    changed = {
        key: parameters[name]
        for name, key in _PARAMETERS.items()
        if name in parameters and not _is_unset(name, parameters[name])
    }
    if "temperature" in changed:  # a temperature enables sampling, even if do_sample is false
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
        raise model_files_error(
            f"{found.path}: the parameter num_ctx is {value!r}, but must be at least 1"
        )
    return value
