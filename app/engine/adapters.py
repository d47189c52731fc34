"""The adapters of a loaded model: reads their files, and selects them for the rows of a batch.

Knows: the files of an adapter, models/lora.py. Must not know: sequences, requests, the names that
clients use.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import AdapterSettings
from app.engine.weights import open_shard
from models.base import Model, ModelError
from models.checkpoint_config import get_text_config
from models.gguf import lora as gguf_lora
from models.gguf import reader as gguf_reader
from models.gguf.reader import GGUFError
from models.lora import AdaptedModel, LoraFactors, read_lora_weights

_CONFIG = "adapter_config.json"

# PEFT's name, and mlx-lm's
_WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")


class Adapters:
    """The adapters of one model.

    nbytes: the size of their weights. has_default: whether rows without a named adapter use one,
    too.
    """

    def __init__(
        self,
        model: Model,
        settings: Sequence[AdapterSettings],
        *,
        config: Mapping[str, Any],
        default: Path | None = None,
    ) -> None:
        """Reads the adapters. config: of the model. default: the adapter that is a part of the
        model, for rows without a named one. Raises AppError(MODEL_FILES) for one that cannot be
        used."""
        self._adapted = AdaptedModel(model)
        self._config = get_text_config(config)
        self._indices: dict[str, int] = {}
        self._default: int | None = None
        self.nbytes = 0
        if default is not None:
            self._default = self._load(default)
        for adapter in settings:
            self._indices[adapter.name] = self._load(Path(adapter.path))

    @property
    def has_default(self) -> bool:
        return self._default is not None

    def salt(self, name: str) -> int:
        """Returns a positive number that distinguishes the cached prefixes of this adapter."""
        return 1 + self._indices[name]

    def select(self, names: Sequence[str]) -> Model:
        """Returns the model for the next forward pass. names: the adapter of each row; "" for a row
        without a named one."""
        self._adapted.select([self._indices[name] if name else self._default for name in names])
        return self._adapted.model

    def _load(self, path: Path) -> int:
        """Returns the index of the adapter."""
        try:
            index = self._adapted.add(read_adapter(path, self._config))
        except ModelError as error:
            raise _error(path, str(error)) from error
        arrays = self._adapted.parameters(index)
        mx.eval(arrays)
        self.nbytes += sum(array.nbytes for array in arrays)
        return index


def open_adapters(
    model: Model, files: ModelFiles, settings: Sequence[AdapterSettings]
) -> Adapters | None:
    """Reads the adapters of a model, if it has any. Raises AppError(MODEL_FILES)."""
    if not settings and files.adapter_path is None:
        return None
    if settings and files.adapter_path is not None:
        message = f"{files.name} contains an adapter, so --adapter is not supported for it"
        raise AppError(ErrorKind.MODEL_FILES, f"{message}: serve the model that it is made from")
    return Adapters(model, settings, config=files.config, default=files.adapter_path)


def read_adapter(path: Path, config: Mapping[str, Any]) -> dict[str, LoraFactors]:
    """Opens the factors of an adapter, which is a folder or a GGUF file. config: of the text model.
    Raises AppError(MODEL_FILES) for files that are missing or unreadable, and ModelError for an
    adapter that is not supported."""
    return _read_gguf(path, config) if path.is_file() else _read_folder(path)


def _read_gguf(path: Path, config: Mapping[str, Any]) -> dict[str, LoraFactors]:
    try:
        return gguf_lora.read_lora_weights(gguf_reader.read(path), config)
    except GGUFError as error:
        raise AppError(ErrorKind.MODEL_FILES, str(error)) from error
    except OSError as error:
        raise _error(path, f"it cannot be read: {error}") from error


def _read_folder(folder: Path) -> dict[str, LoraFactors]:
    try:
        config: Any = json.loads((folder / _CONFIG).read_text("utf-8"))
    except FileNotFoundError as error:
        raise _error(folder, f"it has no {_CONFIG}: it is not the folder of an adapter") from error
    except (OSError, ValueError) as error:
        raise _error(folder / _CONFIG, f"it cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise _error(folder / _CONFIG, "it is not a JSON object")
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return read_lora_weights(cast(dict[str, Any], config), open_shard(folder / name))
    raise _error(folder, f"it has neither {_WEIGHTS[0]} nor {_WEIGHTS[1]}")


def _error(path: Path, message: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{path}: {message}")
