"""The adapters of a loaded model: reads their folders, and selects them for the rows of a batch.

Knows: the files of an adapter, models/lora.py. Must not know: sequences, requests, the names that
clients use.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.settings import AdapterSettings
from app.engine.weights import open_shard
from models.base import Model, ModelError
from models.lora import AdaptedModel, LoraFactors, read_lora_weights

_CONFIG = "adapter_config.json"

# PEFT's name, and mlx-lm's
_WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")


class Adapters:
    """The adapters of one model. `nbytes` is the size of their weights."""

    def __init__(self, model: Model, settings: Sequence[AdapterSettings]) -> None:
        """Reads the adapters. Raises AppError(MODEL_FILES) for one that cannot be used."""
        self._adapted = AdaptedModel(model)
        self._indices: dict[str, int] = {}
        self.nbytes = 0
        for adapter in settings:
            self._load(adapter.name, Path(adapter.path))

    def salt(self, name: str) -> int:
        """Returns a positive number that distinguishes the cached prefixes of this adapter."""
        return 1 + self._indices[name]

    def select(self, names: Sequence[str]) -> Model:
        """Returns the model for the next forward pass. names: the adapter of each row; "" for a row
        without one."""
        self._adapted.select([self._indices[name] if name else None for name in names])
        return self._adapted.model

    def _load(self, name: str, folder: Path) -> None:
        try:
            index = self._adapted.add(read_adapter(folder))
        except ModelError as error:
            raise _error(folder, str(error)) from error
        arrays = self._adapted.parameters(index)
        mx.eval(arrays)
        self.nbytes += sum(array.nbytes for array in arrays)
        self._indices[name] = index


def read_adapter(folder: Path) -> dict[str, LoraFactors]:
    """Opens the factors of an adapter's folder. Raises AppError(MODEL_FILES) for files that are
    missing or unreadable, and ModelError for an adapter that is not supported."""
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
