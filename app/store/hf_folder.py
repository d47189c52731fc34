"""Reads model folders in the layout of the Hugging Face hub.

Knows: file names, JSON. Must not know: tensors, tokenizers, the meaning of templates.

The contents are validated as far as possible. Code in a folder is never run. Pickle files are never
opened, because they contain code.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError
from app.core.model_files import ModelFiles, merge_processor_config
from app.store import safetensors_header, tiktoken_vocabulary
from app.store.config_files import (
    is_regular_file,
    model_files_error,
    read_json_object,
    read_text,
)
from app.store.safetensors_header import SafetensorsHeader
from app.store.vocabulary import read_vocabulary

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"

# the maximum size of the index; the names of 100,000 tensors take 10 MB
_MAX_INDEX_BYTES = 128 << 20

# weight formats that are not supported
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_GGUF = "*.gguf"

# the files of a LoRA adapter: the settings, and the weights in the formats of PEFT and mlx-lm
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")

# the file in which Diffusers lists the models of a pipeline
_PIPELINE = "model_index.json"

# tokenizers in other formats
_OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")

# the maximum length of a file name on all systems
_MAX_NAME_LENGTH = 255

# a shard of a set: its number and the total number
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")

# named templates, which transformers saves next to the default one
_TEMPLATE_FOLDER, _MAX_TEMPLATES = "additional_chat_templates", 16


def read(folder: Path, *, name: str) -> ModelFiles:
    """Reads a model folder. Raises AppError(MODEL_FILES) for files that are missing, unreadable or
    invalid."""
    config = read_json_object(folder / "config.json")
    if config is None:
        raise _missing_config_error(folder)
    tokenizer_config = read_json_object(folder / "tokenizer_config.json") or {}
    tokenizer = folder / "tokenizer.json"
    if not is_regular_file(tokenizer):
        tokenizer = _convert_tokenizer(folder, tokenizer_config)
    if "auto_map" in config:
        log.info("%s: the model's own code (auto_map) is not run", name)
    for adapter in _ADAPTER_WEIGHTS:
        if (folder / adapter).is_file() and any(_list_weights(folder)):
            log.warning(
                "%s: the LoRA adapter %s next to the model is not used: set --adapter NAME=%s",
                name,
                adapter,
                folder,
            )
    shards = _find_shards(folder)
    processor = read_json_object(folder / "processor_config.json")
    template, template_file = _read_template(folder, tokenizer_config, processor or {})
    vocabulary = read_vocabulary(
        tokenizer, tokenizer_config, read_json_object(folder / "added_tokens.json") or {}
    )
    return ModelFiles(
        name=name,
        path=folder,
        config=config,
        shards=tuple(header.path for header in shards),
        tokenizer_path=tokenizer,
        tokenizer_config=tokenizer_config,
        generation_config=read_json_object(folder / "generation_config.json") or {},
        chat_template=template,
        chat_template_file=template_file,
        named_templates=_read_named_templates(folder),
        processor_config=merge_processor_config(
            read_json_object(folder / "preprocessor_config.json"), processor
        ),
        created=int(folder.stat().st_mtime),
        tokenizer_vocab_size=vocabulary.size,
        added_tokens=vocabulary.missing,
        weight_bytes=sum(header.nbytes for header in shards),
        weights_digest=safetensors_header.combine_fingerprints(shards),
    )


def _convert_tokenizer(folder: Path, tokenizer_config: Mapping[str, Any]) -> Path:
    """Returns the tokenizer.json that replaces another format. Raises AppError(MODEL_FILES) if none
    can be built."""
    vocabulary = folder / tiktoken_vocabulary.FILE_NAME
    if not is_regular_file(vocabulary):
        raise _missing_tokenizer_error(folder)
    if not tiktoken_vocabulary.uses_known_code(tokenizer_config):
        raise model_files_error(
            f"{folder} has a {vocabulary.name}, but no tokenizer.json: only the model's own code, "
            "which is not run, can split text; use a copy of the model that has a tokenizer.json"
        )
    return tiktoken_vocabulary.write_tokenizer(vocabulary, tokenizer_config)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a tokenizer in any format."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_OTHER_TOKENIZERS))


def _read_template(
    folder: Path, tokenizer_config: Mapping[str, Any], processor: Mapping[str, Any]
) -> tuple[str | None, str]:
    """Returns the template of a separate file, and the name of the file. transformers wrote
    chat_template.json for models with images until version 4.50, and before that the template into
    processor_config.json. They are used only if no other file has a template."""
    template = read_text(folder / "chat_template.jinja")
    if template is not None or tokenizer_config.get("chat_template") is not None:
        return template, "chat_template.jinja"
    path = folder / "chat_template.json"
    template = read_json_template(path)
    if template is None and processor.get("chat_template") is not None:
        path = folder / "processor_config.json"
        template = _get_template(path, processor)
    return template, "chat_template.jinja" if template is None else path.name


def read_json_template(path: Path) -> str | None:
    """Returns the template in a chat_template.json; None if there is no such file. Raises
    AppError(MODEL_FILES)."""
    parsed = read_json_object(path)
    return None if parsed is None else _get_template(path, parsed)


def _get_template(path: Path, parsed: Mapping[str, Any]) -> str:
    template: Any = parsed.get("chat_template")
    if not isinstance(template, str):
        raise model_files_error(f"{path} has no text in chat_template")
    return template


def _read_named_templates(folder: Path) -> Mapping[str, str]:
    paths = sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))[:_MAX_TEMPLATES]
    return {path.stem: text for path in paths if (text := read_text(path)) is not None}


def _missing_tokenizer_error(folder: Path) -> AppError:
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).is_file()]
    has = f", only {others[0]}" if others else ""
    return model_files_error(
        f"{folder} has no tokenizer.json{has}: use a copy of the model that has this file, for "
        "example from mlx-community, or save its tokenizer with transformers"
    )


def _missing_config_error(folder: Path) -> AppError:
    adapter = read_json_object(folder / _ADAPTER_CONFIG)
    if adapter is not None:
        return _adapter_error(folder, adapter)
    if (pipeline := read_json_object(folder / _PIPELINE)) is not None:
        kind = str(pipeline.get("_class_name"))[:80]
        return model_files_error(
            f"{folder} is a pipeline of Diffusers ({kind!r} in {_PIPELINE}) and not a language "
            "model"
        )
    if found := sorted(path.name for path in folder.glob(_GGUF)):
        return model_files_error(
            f"{folder} contains {len(found)} GGUF files: name one of them, such as "
            f"{folder / found[0]}"
        )
    if _is_incomplete_download(folder):
        return _incomplete_download_error(folder, "config.json")
    return model_files_error(f"{folder} has no config.json: it is not a model folder")


def _adapter_error(folder: Path, config: Mapping[str, Any]) -> AppError:
    """config: the adapter's config. PEFT and mlx-lm name the model under different keys."""
    given = config.get("base_model_name_or_path") or config.get("model")
    base = given[:200] if isinstance(given, str) else "the model that it was trained for"
    kind = "PEFT" if "peft_type" in config else "mlx-lm"
    return model_files_error(
        f"{folder} is a LoRA adapter of {kind} and not a model: serve {base} with --adapter "
        f"NAME={folder}"
    )


def _is_incomplete_download(folder: Path) -> bool:
    """Returns whether a download into this folder, or into the cache that it is a snapshot in, was
    interrupted."""
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    return any(path for place in places for path in place.glob("*.incomplete"))


def _incomplete_download_error(folder: Path, missing: str) -> AppError:
    return model_files_error(
        f"the download into {folder} is incomplete ({missing} is missing): run the command that "
        "downloaded it again"
    )


def _find_shards(folder: Path) -> tuple[SafetensorsHeader, ...]:
    """Returns the shards that the index lists. Without an index, or if it does not match the files,
    returns all files whose names look like weights. The tensors are checked when the model is
    built, so the index is not needed."""
    index = read_json_object(folder / _INDEX, max_bytes=_MAX_INDEX_BYTES)
    weight_map: Mapping[str, str] = {}
    if index is not None:
        weight_map = _read_weight_map(folder / _INDEX, index)
    names = sorted(set(weight_map.values()))
    if names and all(_is_file_name(name) and is_regular_file(folder / name) for name in names):
        shards = tuple(safetensors_header.read(folder / name) for name in names)
        stored = {(name, header.path.name) for header in shards for name in header.tensors}
        if weight_map.items() <= stored:
            _check_no_duplicates(shards)
            return shards
    if names:
        log.warning("%s does not match the files next to it and is not used", folder / _INDEX)
    if missing := find_missing_shards(folder):
        if _is_incomplete_download(folder):
            raise _incomplete_download_error(folder, missing[0])
        listed = f", which {_INDEX} lists" if missing[0] in names else ""
        raise model_files_error(f"{folder} has no {missing[0]}{listed}")
    shards = tuple(safetensors_header.read(path) for path in _list_unindexed_shards(folder))
    _check_no_duplicates(shards)
    return shards


def find_missing_shards(folder: Path) -> Sequence[str]:
    """Returns the missing files of the sets of shards in a folder; without any weights, the files
    that the index lists. Ignores an index that cannot be read."""
    present = [path.name for path in _list_weights(folder)]
    if not present:
        try:
            index = read_json_object(folder / _INDEX, max_bytes=_MAX_INDEX_BYTES)
            listed = _read_weight_map(folder / _INDEX, index or {}).values()
        except AppError:
            return []
        return sorted({name for name in listed if _is_file_name(name)})
    sets: dict[tuple[str, int], set[int]] = {}
    for name in present:
        if match := _SHARD_NAME.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    return [
        f"{prefix}-{number:05}-of-{total:05}.safetensors"
        for (prefix, total), numbers in sorted(sets.items())
        if (number := next((n for n in range(1, total + 1) if n not in numbers), None)) is not None
    ]


def _list_weights(folder: Path) -> Sequence[Path]:
    """Returns `model*.safetensors` if there are such files. Other files in the same folder are
    the same weights under other names (consolidated.safetensors). Adapters are omitted."""
    every = sorted(
        path for path in folder.glob("*.safetensors") if path.name not in _ADAPTER_WEIGHTS
    )
    return [path for path in every if path.name.startswith("model")] or every


def _list_unindexed_shards(folder: Path) -> Sequence[Path]:
    if weights := _list_weights(folder):
        return weights
    if (adapter := read_json_object(folder / _ADAPTER_CONFIG)) is not None:
        raise _adapter_error(folder, adapter)
    if _is_incomplete_download(folder):
        raise _incomplete_download_error(folder, "model.safetensors")
    if any(folder.glob(_GGUF)):
        raise model_files_error(
            f"{folder} has no .safetensors file, only a GGUF file: name the file itself, or remove "
            "config.json"
        )
    pickle = ""
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        pickle = (
            ", only a pickle file, which is never opened because it can run code: use the model's "
            "safetensors version, or one that was converted for MLX"
        )
    raise model_files_error(f"{folder} has no .safetensors file{pickle}")


def _read_weight_map(path: Path, index: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the file of each tensor. The files may not exist."""
    parsed: Any = index.get("weight_map")
    if not isinstance(parsed, dict) or not parsed:
        raise model_files_error(f"{path} has no weight_map")
    weight_map = cast(dict[str, Any], parsed)
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise model_files_error(f"{path}: the values of weight_map must be file names")
    return weight_map


def _is_file_name(name: str) -> bool:
    """Returns whether a name in the index is a safetensors file in the same folder. Other files are
    never opened."""
    is_printable = name.isprintable() and len(name) <= _MAX_NAME_LENGTH
    return is_printable and Path(name).name == name and name.endswith(".safetensors")


def _check_no_duplicates(shards: Iterable[SafetensorsHeader]) -> None:
    shard_by_tensor: dict[str, Path] = {}
    for header in shards:
        for name in header.tensors.keys() & shard_by_tensor.keys():
            raise model_files_error(
                f"tensor {name} is in both {header.path} and {shard_by_tensor[name].name}"
            )
        shard_by_tensor.update(dict.fromkeys(header.tensors, header.path))
