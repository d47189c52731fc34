"""Reads model folders in the layout of the Hugging Face hub.

Knows: file names, JSON. Must not know: tensors, tokenizers, the meaning of templates.

The contents are validated as far as possible. Code in a folder is never run. Pickle files are never
opened, because they contain code.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.store import safetensors_header, tiktoken_vocabulary
from app.store.config_files import is_regular_file, read_json_object, read_text
from app.store.safetensors_header import SafetensorsHeader
from app.store.vocabulary import count_token_ids

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"

# the maximum size of the index; the names of 100,000 tensors take 10 MB
_MAX_INDEX_BYTES = 128 << 20

# weight formats that are not supported
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_GGUF = "*.gguf"

_MAX_LISTED_TENSORS = 3


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
    shards = _find_shards(folder)
    return ModelFiles(
        name=name,
        path=folder,
        config=config,
        shards=tuple(header.path for header in shards),
        tokenizer_path=tokenizer,
        tokenizer_config=tokenizer_config,
        generation_config=read_json_object(folder / "generation_config.json") or {},
        chat_template=read_text(folder / "chat_template.jinja"),
        created=int(folder.stat().st_mtime),
        tokenizer_vocab_size=count_token_ids(tokenizer),
        weight_bytes=sum(header.nbytes for header in shards),
        weights_digest=safetensors_header.combine_fingerprints(shards),
    )


def _convert_tokenizer(folder: Path, tokenizer_config: Mapping[str, Any]) -> Path:
    """Returns the tokenizer.json that replaces another format. Raises AppError(MODEL_FILES) if none
    can be built."""
    vocabulary = folder / tiktoken_vocabulary.FILE_NAME
    if not is_regular_file(vocabulary):
        raise _model_files_error(
            f"{folder} has no tokenizer.json, the only supported tokenizer format: load the "
            "tokenizer with transformers' AutoTokenizer and save it to create this file"
        )
    if not tiktoken_vocabulary.uses_known_code(tokenizer_config):
        raise _model_files_error(
            f"{folder} has a {vocabulary.name}, but no tokenizer.json: how a text is split is only "
            "in the model's own code, which is not run; use a copy of the model that has a "
            "tokenizer.json"
        )
    return tiktoken_vocabulary.write_tokenizer(vocabulary, tokenizer_config)


def _missing_config_error(folder: Path) -> AppError:
    if found := sorted(path.name for path in folder.glob(_GGUF)):
        return _model_files_error(
            f"{folder} contains {len(found)} GGUF files: name one of them, such as "
            f"{folder / found[0]}"
        )
    return _model_files_error(f"{folder} has no config.json: it is not a model folder")


_SUPPORTED_FORMATS = "safetensors version, or one that was converted for MLX"


def _find_shards(folder: Path) -> tuple[SafetensorsHeader, ...]:
    """Returns the shards listed in the index or, without an index, all files whose names look like
    weights."""
    index = read_json_object(folder / _INDEX, max_bytes=_MAX_INDEX_BYTES)
    if index is None:
        shards = tuple(safetensors_header.read(path) for path in _list_unindexed_shards(folder))
        _check_no_duplicates(shards)
        return shards
    weight_map = _read_weight_map(folder / _INDEX, index)
    shards = tuple(
        safetensors_header.read(folder / name) for name in sorted(set(weight_map.values()))
    )
    _check_no_duplicates(shards)
    _check_index_complete(folder / _INDEX, weight_map, shards)
    return shards


def _list_unindexed_shards(folder: Path) -> Sequence[Path]:
    """Returns `model*.safetensors` if there are such files. Other files in the same folder are
    adapters, or the same weights under other names (consolidated.safetensors)."""
    every = sorted(folder.glob("*.safetensors"))
    if every:
        return [path for path in every if path.name.startswith("model")] or every
    if any(folder.glob(_GGUF)):
        raise _model_files_error(
            f"{folder} has no .safetensors file, only a GGUF file: name the file itself, or remove "
            "config.json"
        )
    if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        why = "only a pickle file, which is never opened because it can run code"
    else:
        raise _model_files_error(f"{folder} has no .safetensors file")
    raise _model_files_error(
        f"{folder} has no .safetensors file, {why}: use the model's {_SUPPORTED_FORMATS}"
    )


def _read_weight_map(path: Path, index: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the file of each tensor. All files are in the same folder as the index."""
    parsed: Any = index.get("weight_map")
    if not isinstance(parsed, dict) or not parsed:
        raise _model_files_error(f"{path} has no weight_map")
    weight_map = cast(dict[str, Any], parsed)
    for name in set(map(_as_text, weight_map.values())):
        if name is None:
            raise _model_files_error(f"{path}: the values of weight_map must be file names")
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _model_files_error(
                f"{path} lists {name[:200]!r}, which is not a safetensors file in the same folder"
            )
        if not is_regular_file(path.parent / name):
            raise _model_files_error(f"{path.parent} has no {name}, which {_INDEX} lists")
    return weight_map


def _check_no_duplicates(shards: Iterable[SafetensorsHeader]) -> None:
    shard_by_tensor: dict[str, Path] = {}
    for header in shards:
        for name in header.tensors.keys() & shard_by_tensor.keys():
            raise _model_files_error(
                f"tensor {name} is in both {header.path} and {shard_by_tensor[name].name}"
            )
        shard_by_tensor.update(dict.fromkeys(header.tensors, header.path))


def _check_index_complete(
    path: Path, places: Mapping[str, str], shards: Iterable[SafetensorsHeader]
) -> None:
    stored = {(name, header.path.name) for header in shards for name in header.tensors}
    broken = sorted(places.items() - stored)
    if broken:
        listed = ", ".join(f"{name} in {file}" for name, file in broken[:_MAX_LISTED_TENSORS])
        more = (
            f" and {len(broken) - _MAX_LISTED_TENSORS} more"
            if len(broken) > _MAX_LISTED_TENSORS
            else ""
        )
        raise _model_files_error(f"{path} lists tensors that are missing: {listed}{more}")


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _model_files_error(message: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, message)
