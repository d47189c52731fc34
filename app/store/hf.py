"""A folder in the layout of the Hugging Face hub.

Knows: file names and JSON. Must not know: tensors, tokenizers, templates' meaning.

What a folder says is believed as far as it can be held against something. Code in it is never run,
and pickles, which are code, are never opened.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.store import headers
from app.store.documents import is_there, read_object, read_text
from app.store.headers import Header
from app.store.vocabulary import count_ids

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"

# names of 100,000 tensors take 10 MB
_LARGEST_INDEX = 128 << 20

# what weights may lie in that are not read here
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_GGUF = "*.gguf"

_NAMED = 3


def read(folder: Path, *, name: str) -> ModelFiles:
    """Raises AppError(MODEL_FILES) for whatever is missing, unreadable or not what it says."""
    config = read_object(folder / "config.json")
    if config is None:
        raise _without_config(folder)
    tokenizer = folder / "tokenizer.json"
    if not is_there(tokenizer):
        raise _bad(
            f"{folder} has no tokenizer.json, the only supported tokenizer format: save the "
            "tokenizer with transformers' AutoTokenizer, which writes one"
        )
    if "auto_map" in config:
        log.info("%s: the model's own code (auto_map) is not run", name)
    shards = _shards(folder)
    return ModelFiles(
        name=name,
        path=folder,
        config=config,
        shards=tuple(header.path for header in shards),
        tokenizer=tokenizer,
        tokenizer_config=read_object(folder / "tokenizer_config.json") or {},
        generation_config=read_object(folder / "generation_config.json") or {},
        template=read_text(folder / "chat_template.jinja"),
        created=int(folder.stat().st_mtime),
        tokens=count_ids(tokenizer),
        stored=sum(header.nbytes for header in shards),
        weights=headers.versions(shards),
    )


def _without_config(folder: Path) -> AppError:
    if any(folder.glob(_GGUF)):
        return _bad(
            f"{folder} contains a GGUF file, which is not supported: use the model's {_OURS}"
        )
    return _bad(f"{folder} has no config.json: it is not a model folder")


_OURS = "safetensors version, or one that was converted for MLX"


def _shards(folder: Path) -> tuple[Header, ...]:
    """Of the files that the index names, or else of every one that is named like weights."""
    index = read_object(folder / _INDEX, most=_LARGEST_INDEX)
    if index is None:
        found = tuple(headers.read(path) for path in _loose_shards(folder))
        _check_apart(found)
        return found
    places = _weight_map(folder / _INDEX, index)
    found = tuple(headers.read(folder / name) for name in sorted(set(places.values())))
    _check_apart(found)
    _check_promises(folder / _INDEX, places, found)
    return found


def _loose_shards(folder: Path) -> Sequence[Path]:
    """`model*.safetensors` where there are any: other files beside them are adapters, or the same
    weights again under other names (consolidated.safetensors)."""
    every = sorted(folder.glob("*.safetensors"))
    if every:
        return [path for path in every if path.name.startswith("model")] or every
    if any(folder.glob(_GGUF)):
        why = "but a GGUF file, which is not supported"
    elif any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        why = "but a pickle file, which can run code and is never opened"
    else:
        raise _bad(f"{folder} has no .safetensors file")
    raise _bad(f"{folder} has no .safetensors file, {why}: use the model's {_OURS}")


def _weight_map(path: Path, index: Mapping[str, Any]) -> Mapping[str, str]:
    """Tensor -> the file that it is in, which lies beside the index."""
    found: Any = index.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise _bad(f"{path} has no weight_map")
    places = cast(dict[str, Any], found)
    for name in set(map(_text, places.values())):
        if name is None:
            raise _bad(f"{path}: the values of weight_map must be file names")
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _bad(
                f"{path} lists {name[:200]!r}, which is not a safetensors file in the same folder"
            )
        if not is_there(path.parent / name):
            raise _bad(f"{path.parent} has no {name}, which {_INDEX} lists")
    return places


def _check_apart(shards: Iterable[Header]) -> None:
    seen: dict[str, Path] = {}
    for header in shards:
        for name in header.tensors.keys() & seen.keys():
            raise _bad(f"tensor {name} is in both {header.path} and {seen[name].name}")
        seen.update(dict.fromkeys(header.tensors, header.path))


def _check_promises(path: Path, places: Mapping[str, str], shards: Iterable[Header]) -> None:
    here = {(name, header.path.name) for header in shards for name in header.tensors}
    broken = sorted(places.items() - here)
    if broken:
        told = ", ".join(f"{name} in {file}" for name, file in broken[:_NAMED])
        more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        raise _bad(f"{path} lists tensors that are missing: {told}{more}")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _bad(message: str) -> AppError:
    return AppError(Kind.MODEL_FILES, message)
