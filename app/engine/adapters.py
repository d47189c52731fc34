"""The adapters of a loaded model: reads their files, and selects them for the rows of a batch.

Knows: the files of an adapter, models/lora.py. Must not know: sequences, requests, the names that
clients use.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from app.core.errors import AppError, ErrorKind
from app.core.settings import AdapterSettings
from app.engine.weights import open_shard
from models.base import Model, ModelError
from models.checkpoint_config import get_text_config
from models.gguf import lora as gguf_lora
from models.gguf import reader as gguf_reader
from models.gguf.reader import GGUFError
from models.lora import AdaptedModel, LoraFactors, read_lora_weights

log = logging.getLogger(__name__)

# The key of the adapter that is a part of the model.
_DEFAULT_KEY = ""

_CONFIG = "adapter_config.json"

# PEFT's name, and mlx-lm's
_WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """index: its index in the adapted model. nbytes: the size of its weights."""

    index: int
    nbytes: int


class Adapters:
    """The adapters of one model, which is copied only when it has an adapter.

    has_default: whether rows without a named adapter also use one.
    reserve: called with the size of an adapter before its weights are read, and with the negative
        size after it was unloaded. May raise AppError(MODEL_FILES), and the adapter is not loaded.
    """

    def __init__(
        self,
        model: Model,
        settings: Sequence[AdapterSettings],
        *,
        config: Mapping[str, Any],
        default: Path | None = None,
    ) -> None:
        """Reads the adapters. config: the model's config. default: the adapter that is a part of
        the model, for rows without a named one. Raises AppError(MODEL_FILES) for an adapter that
        cannot be used; if it was loaded while the server was running, the error is logged
        instead."""
        self.reserve: Callable[[int], None] = lambda _: None
        self._model = model
        self._adapted: AdaptedModel | None = None
        self._config = get_text_config(config)
        self._loaded: dict[str, _Adapter] = {}
        self.has_default = default is not None
        if default is not None:
            self.load(_DEFAULT_KEY, default)
        for adapter in settings:
            try:
                self.load(adapter.key, Path(adapter.path))
            except AppError as error:
                if not adapter.version:
                    raise
                log.error("the adapter %s is not loaded again: %s", adapter.name, error.message)

    @property
    def nbytes(self) -> int:
        """The size of the weights of all adapters."""
        return sum(adapter.nbytes for adapter in self._loaded.values())

    def find_salt(self, key: str) -> int | None:
        """Returns a positive number that distinguishes an adapter and its cached prefixes from
        all others, including former ones with the same key. None if it is not loaded."""
        found = self._loaded.get(key)
        return None if found is None else 1 + found.index

    def select(self, salts: Sequence[int]) -> Model:
        """Returns the model for the next forward pass. salts: the salt of each row's adapter; 0 for
        a row without a named one."""
        assert self._adapted is not None, "no adapter was loaded"
        default = self._loaded[_DEFAULT_KEY].index if self.has_default else None
        self._adapted.select([salt - 1 if salt else default for salt in salts])
        return self._adapted.model

    def load(self, key: str, path: Path) -> None:
        """Loads an adapter. Raises AppError(MODEL_FILES), and then changes nothing."""
        assert key not in self._loaded, f"the adapter {key} is loaded"
        if self.has_default and key != _DEFAULT_KEY:
            raise _error(
                path,
                "the model contains an adapter, and supports no others: serve its base model",
            )
        if self._adapted is None:
            self._adapted = AdaptedModel(self._model)
        try:
            factors = read_adapter(path, self._config)
            index = self._adapted.add(factors)
        except (ModelError, RuntimeError, ValueError) as error:  # of our checks, and of MLX
            raise _error(path, str(error)) from error
        arrays = self._adapted.parameters(index)
        self._loaded[key] = _Adapter(index=index, nbytes=sum(array.nbytes for array in arrays))
        try:
            self._read(path, factors, arrays)
        except AppError:
            del self._loaded[key]
            self._adapted.remove(index)
            raise

    def unload(self, key: str) -> None:
        """Unloads an adapter that no row uses. Does nothing if it is not loaded."""
        found = self._loaded.pop(key, None)
        if found is not None:
            assert self._adapted is not None, "the adapter was never added"
            self._adapted.remove(found.index)
            self.reserve(-found.nbytes)

    def _read(
        self, path: Path, factors: Mapping[str, LoraFactors], arrays: Sequence[mx.array]
    ) -> None:
        """Reads the weights, which nothing has evaluated before. arrays: made from the factors."""
        nbytes = sum(array.nbytes for array in arrays)
        self.reserve(nbytes)
        halves = [half for one in factors.values() for half in (one.a, one.b)]
        try:
            finite = mx.all(mx.stack([mx.all(mx.isfinite(half)) for half in halves]))
            mx.eval(finite, arrays)
            if not finite.item():
                raise _error(path, "some of its numbers are not finite")
        except (AppError, RuntimeError, MemoryError) as error:
            self.reserve(-nbytes)
            if isinstance(error, AppError):
                raise
            raise _error(path, f"it cannot be read: {error}") from error


def read_adapter(path: Path, config: Mapping[str, Any]) -> dict[str, LoraFactors]:
    """Opens the factors of an adapter, which is a folder or a GGUF file. config: the config of the
    text model. Raises AppError(MODEL_FILES) for files that are missing or unreadable, and
    ModelError for an adapter that is not supported."""
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
        why = f"it has no {_CONFIG}: it is not an adapter folder"
        raise _error(folder, why if folder.exists() else "it does not exist") from error
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
