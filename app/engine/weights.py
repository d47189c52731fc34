"""Opens model files as a model without its weights, then reads the weights.

Knows: safetensors, `models.build`. Must not know: where models come from, what a model is for.

MLX reads a tensor when it is first evaluated. Until `read_weights` only headers are read, so the
memory that a model of any size needs can be computed first. Unreadable files are detected before.
"""

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

import models
from app.core.errors import AppError, ErrorKind, LibraryPanic, PanicGuard
from app.core.model_files import ModelFiles
from app.core.settings import QuantizationBits
from models.base import Model, ModelError
from models.cpu_layout import apply_cpu_layout
from models.multimodal import get_text_weights
from models.ollama_names import to_mlx_names
from models.sharding import TensorParallelGroup, shard_model

# types that MLX can read; the model decides which of them it supports
_SUPPORTED_DTYPES = frozenset(
    {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
    | {"F8_E4M3", "F8_E8M0", "F16", "BF16", "F32", "C64"}
)

# bytes read between two reports of progress
_REPORT_EVERY_BYTES = 64 << 20

# open files that the process may need besides the shards
_EXTRA_OPEN_FILES = 256

# called with 0..100 and the bytes in memory
ProgressCallback = Callable[[int, int], None]


def open_model(
    files: ModelFiles, bits: QuantizationBits | None, share: TensorParallelGroup | None = None
) -> Model:
    """The model, with none of its weights in memory yet. bits: quantize plain weights to this when
    they are read. share: the group of ranks that divides the model, if any.

    Raises AppError(MODEL_FILES): one sentence that names the faulty file, if there is one.
    """
    weights, places = _open_shards(files.shards)
    try:
        model = models.build(files.config, weights, bits=bits)
        if share is not None:
            shard_model(model, share, files.config["model_type"])
        assert isinstance(model, nn.Module)
        apply_cpu_layout(model)
        return model
    except ModelError as error:
        place = _find_faulty_file(error, weights, places) or files.path
        raise AppError(ErrorKind.MODEL_FILES, f"{place}: {error}") from error


def read_weights(model: Model, path: Path, on_progress: ProgressCallback) -> None:
    """Read the weights into memory, one at a time: the source of a weight (the plain weight of a
    quantized one, the experts of a stack) is in memory only while it is converted. path: named in
    the AppError(MODEL_FILES) that is raised if this fails."""
    arrays = list_parameters(model)
    total = sum(array.nbytes for array in arrays) or 1
    done, told = 0, 0
    on_progress(0, mx.get_active_memory())
    for array in arrays:
        try:
            mx.eval(array)
        # a truncated file, a disk error, or out of memory
        except (MemoryError, RuntimeError) as error:
            raise AppError(
                ErrorKind.MODEL_FILES, f"{path}: reading the weights failed: {error}"
            ) from error
        done += array.nbytes
        if done - told >= _REPORT_EVERY_BYTES:
            told = done
            on_progress(100 * done // total, mx.get_active_memory())


def list_parameters(model: Model) -> list[mx.array]:
    assert isinstance(model, nn.Module)
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def _open_shards(shards: Sequence[Path]) -> tuple[dict[str, mx.array], dict[str, Path]]:
    """All tensors by name, and the file that contains each."""
    weights: dict[str, mx.array] = {}
    places: dict[str, Path] = {}
    shards = list(dict.fromkeys(shards))
    _allow_open_files(len(shards))
    for shard in shards:
        for name, array in _open_shard(shard).items():
            if name in places:
                raise AppError(
                    ErrorKind.MODEL_FILES,
                    f"the tensor {name} is in both {shard} and {places[name]}: remove the "
                    "file that "
                    "does not belong to the model",
                )
            weights[name], places[name] = array, shard
    return weights, places


def _open_shard(shard: Path) -> dict[str, mx.array]:
    """Open one file. It is checked first, because MLX reports a faulty file late and unclearly, or
    not at all."""
    try:
        with PanicGuard(), safe_open(shard, framework="mlx") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, LibraryPanic, OSError) as error:
        raise AppError(
            ErrorKind.MODEL_FILES, f"{shard} is not a complete safetensors file: {error}"
        ) from error
    for name, dtype in types.items():
        if dtype not in _SUPPORTED_DTYPES:
            raise AppError(
                ErrorKind.MODEL_FILES,
                f"{shard}: the tensor {name} is {dtype}, which MLX does not support",
            )
    # the format is given because a blob's name has no suffix
    arrays = mx.load(str(shard), format="safetensors")
    assert isinstance(arrays, dict)
    return arrays


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files. A file stays open until its last tensor was read, and a store
    with one file per tensor has more files than a process may open by default (256 on macOS)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _EXTRA_OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise AppError(
            ErrorKind.MODEL_FILES,
            f"the model has {count} files, so this process needs {needed} open files, but its "
            f"hard limit is {hard}: raise the limit (ulimit -Hn, LimitNOFILE)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _find_faulty_file(
    error: ModelError, weights: Mapping[str, mx.array], places: Mapping[str, Path]
) -> Path | None:
    """The file that contains the tensors named in the error, if it is one file."""
    if not isinstance(error, models.TensorError):
        return None
    by_array = {id(array): places[name] for name, array in weights.items()}
    found = {
        by_array.get(id(array))
        for name, array in get_text_weights(to_mlx_names(weights)).items()
        if name in error.tensors
    }
    return found.pop() if len(found) == 1 else None
