"""A folder in the layout of the Hugging Face hub.

Knows: file names and JSON. Must not know: tensors, tokenizers, templates' meaning.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles

_INDEX = "model.safetensors.index.json"


def read(folder: Path, *, name: str) -> ModelFiles:
    """Raises AppError(MODEL_FILES) for whatever is missing or unreadable."""
    config = _read_object(folder / "config.json")
    if config is None:
        raise _bad(f"{folder} has no config.json: it is not a model folder")
    _check_numbers(folder, config, "max_position_embeddings", "vocab_size")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise _bad(f"{folder} has no tokenizer.json")
    template = folder / "chat_template.jinja"
    return ModelFiles(
        name=name,
        path=folder,
        config=config,
        shards=_shards(folder),
        tokenizer=tokenizer,
        tokenizer_config=_read_object(folder / "tokenizer_config.json") or {},
        generation_config=_read_object(folder / "generation_config.json") or {},
        template=_read_text(template) if template.is_file() else None,
        created=int(folder.stat().st_mtime),
    )


def _shards(folder: Path) -> tuple[Path, ...]:
    """The files that the index names, or else every safetensors file."""
    index = _read_object(folder / _INDEX)
    if index is None:
        found = tuple(sorted(folder.glob("*.safetensors")))
        if not found:
            raise _bad(f"{folder} has no .safetensors file")
        return found
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(f"{folder / _INDEX} has no weight_map")
    names = sorted({str(name) for name in cast(dict[str, Any], weight_map).values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise _bad(f"{folder} lacks {name}, which {_INDEX} names")
    return tuple(folder / name for name in names)


def _check_numbers(folder: Path, config: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise _bad(f"{folder / 'config.json'}: {key} must be a positive integer")


def _read_object(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = orjson.loads(path.read_bytes())
    except (orjson.JSONDecodeError, OSError) as error:
        raise _bad(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise _bad(f"{path} is not a JSON object")
    return cast(Mapping[str, Any], found)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"{path} cannot be read: {error}") from error


def _bad(message: str) -> AppError:
    return AppError(Kind.MODEL_FILES, message)
