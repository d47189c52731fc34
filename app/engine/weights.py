"""Opens a model without its weights, and then reads the weights.

Knows: safetensors, GGUF, `architectures.build`. Must not know: the model store, requests.

MLX reads a tensor of a safetensors file when it is first evaluated. The tensors of a GGUF file are
read at the start of `read_weights`. Before it is called, only the headers are read, so the memory
requirement of a model of any size can be computed first. Unreadable files are detected before the
weights are read.
"""

import logging
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from app.core.errors import AppError, ErrorKind, LibraryPanic, PanicGuard
from app.core.model_files import ModelFiles
from app.core.settings import ActivationPrecision, KVPrecision, QuantizationBits
from app.engine.precision import choose_activation_bits, choose_kv_dtype
from models import architectures
from models.base import Model, ModelError
from models.checkpoint_config import get_text_config
from models.cpu_layout import apply_cpu_layout, get_activation_bits, set_activation_bits
from models.gguf import reader as gguf_reader
from models.gguf.ollama_towers import read_projector
from models.gguf.ollama_variant import list_other_modules, translate
from models.gguf.reader import GGUFError, has_magic
from models.gguf.weights import UnreadTensors, open_weights
from models.multimodal import get_text_weights
from models.ollama_names import to_mlx_names
from models.sharding import TensorParallelGroup, shard_model

log = logging.getLogger(__name__)

# The types that MLX can read. The model decides which of them it supports.
_SUPPORTED_DTYPES = frozenset(
    {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}
    | {"F8_E4M3", "F8_E8M0", "F16", "BF16", "F32", "C64"}
)

# The attribute of a model for the tensors of its GGUF file, until they are read.
_UNREAD = "unread_tensors"

# The number of bytes read between two progress reports.
_REPORT_EVERY_BYTES = 64 << 20

# The number of open files reserved for other uses, in addition to the shards.
_EXTRA_OPEN_FILES = 256

# Called with a percentage from 0 to 100 and the number of bytes in memory.
ProgressCallback = Callable[[int, int], None]


def open_model(
    files: ModelFiles,
    bits: QuantizationBits | None,
    share: TensorParallelGroup | None = None,
    *,
    kv: KVPrecision = "auto",
    vision: bool = True,
    activations: ActivationPrecision = "auto",
) -> Model:
    """Opens a model without reading its weights.

    bits: the number of bits to which plain weights are quantized when they are read. None keeps
        the weights unchanged.
    share: the tensor-parallel group that shares the model, if any.
    kv, activations: the precision of the layer caches, and of the inputs of layers with 4- and
        8-bit weights, see app/engine/precision.py.
    vision: whether to build the vision tower, if the model has one.

    Raises AppError(MODEL_FILES). The message is one sentence, which includes the name of a faulty
    file.
    """
    unread: UnreadTensors | None = None
    places: Mapping[str, Path] = {}
    if _is_gguf(files):
        is_whole = vision and files.projector_path in files.shards
        weights, unread = _open_gguf(files.shards[0], vision=is_whole)
        weights |= _open_projector(files, unread) if vision else {}
    else:
        weights, places = _open_shards(files.shards)
    try:
        # ranks share matrices of MLX's packings only
        blocks = unread.blocks if unread is not None and share is None else ()
        model = architectures.build(
            files.config,
            weights,
            bits=bits,
            blocks=blocks,
            vision=vision,
            processor=files.processor_config,
        )
        if share is not None:
            shard_model(model, share, get_text_config(files.config)["model_type"])
        assert isinstance(model, nn.Module)
        parameters = list_parameters(model, vision=False)
        has_blocks = unread is not None and bool(unread.blocks)
        model.kv_dtype = choose_kv_dtype(parameters, kv)
        bits_of_inputs = choose_activation_bits(parameters, activations, has_blocks=has_blocks)
        apply_cpu_layout(model)
        if activations != "auto" or get_activation_bits(model) is not None:
            set_activation_bits(model, bits_of_inputs)
        if unread is not None:
            unread.blocks.clear()
        setattr(model, _UNREAD, unread)
        return model
    except architectures.TowerError as error:
        raise _tower_error(f"{files.projector_path or files.path}: {error}") from error
    except ModelError as error:
        place = _find_faulty_file(error, weights, places) or files.path
        raise AppError(ErrorKind.MODEL_FILES, f"{place}: {error}") from error


def read_weights(model: Model, path: Path, on_progress: ProgressCallback) -> None:
    """Reads the weights into memory, one at a time.

    The source of a weight, such as the unquantized weight or the experts of a stack, is in memory
    only while the weight is converted. The tensors of a GGUF file are read first, and each is freed
    after its conversion. Raises AppError(MODEL_FILES) with a message that includes `path`.
    """
    arrays = list_parameters(model)
    total = sum(array.nbytes for array in arrays) or 1
    done, reported = 0, 0
    on_progress(0, mx.get_active_memory())
    _read_gguf(model, path)
    for array in arrays:
        try:
            mx.eval(array)
        # The file may be truncated, the disk may have failed, or the system may be out of memory.
        except (MemoryError, RuntimeError) as error:
            raise AppError(
                ErrorKind.MODEL_FILES, f"{path}: reading the weights failed: {error}"
            ) from error
        done += array.nbytes
        if done - reported >= _REPORT_EVERY_BYTES:
            reported = done
            on_progress(100 * done // total, mx.get_active_memory())


def _is_gguf(files: ModelFiles) -> bool:
    try:
        return has_magic(files.shards[0])
    except (IndexError, OSError):  # `_open_shards` reports missing files
        return False


def _open_gguf(path: Path, *, vision: bool) -> tuple[dict[str, mx.array], UnreadTensors]:
    """Opens the text model. vision: whether the vision tower in the same file is also opened."""
    try:
        file = gguf_reader.read(path)
        if modules := list_other_modules(file, vision=vision):
            log.info("%s: loading the model without its %s", path, ", ".join(modules))
        return open_weights(translate(file))
    except GGUFError as error:
        raise AppError(ErrorKind.MODEL_FILES, str(error)) from error
    except ModelError as error:
        raise AppError(ErrorKind.MODEL_FILES, f"{path}: {error}") from error


def _open_projector(files: ModelFiles, unread: UnreadTensors) -> dict[str, mx.array]:
    """Opens the vision tower of a GGUF model, if it has one."""
    if files.projector_path is None:
        return {}
    # imported here, because few models have a projector
    from models.gguf.projector_weights import open_projector

    try:
        return open_projector(read_projector(files.projector_path), unread)
    except GGUFError as error:
        raise _tower_error(str(error)) from error
    except ModelError as error:
        raise _tower_error(f"{files.projector_path}: {error}") from error


def _tower_error(message: str) -> AppError:
    return AppError(
        ErrorKind.MODEL_FILES, f"{message}; --no-vision loads the text model without it"
    )


def _read_gguf(model: Model, path: Path) -> None:
    """Reads the tensors of a GGUF file. Does nothing for other models."""
    unread: UnreadTensors | None = getattr(model, _UNREAD, None)
    if unread is None:
        return
    try:
        unread.read()
    except ModelError as error:  # it names the file, which may be another one of a split model
        raise AppError(ErrorKind.MODEL_FILES, str(error)) from error
    except (MemoryError, OSError, RuntimeError) as error:
        raise AppError(
            ErrorKind.MODEL_FILES, f"{path}: reading the weights failed: {error}"
        ) from error


def list_parameters(model: Model, *, vision: bool = True) -> list[mx.array]:
    """vision: whether to include the vision tower."""
    assert isinstance(model, nn.Module)
    flat: Any = tree_flatten(model.parameters())
    return [array for name, array in flat if vision or not name.startswith("vision.")]


def _open_shards(shards: Sequence[Path]) -> tuple[dict[str, mx.array], dict[str, Path]]:
    """Returns all tensors by name, and the file that contains each tensor."""
    weights: dict[str, mx.array] = {}
    places: dict[str, Path] = {}
    shards = list(dict.fromkeys(shards))
    _allow_open_files(len(shards))
    for shard in shards:
        for name, array in open_shard(shard).items():
            if name in places:
                raise AppError(
                    ErrorKind.MODEL_FILES,
                    f"the tensor {name} is in both {shard} and {places[name]}: remove the "
                    "file that "
                    "does not belong to the model",
                )
            weights[name], places[name] = array, shard
    return weights, places


def open_shard(shard: Path) -> dict[str, mx.array]:
    """Opens one file. The file is checked first, because MLX reports faulty files late, with
    unclear errors, or not at all."""
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
    # The format is given explicitly, because the file name of a blob has no suffix.
    arrays = mx.load(str(shard), format="safetensors")
    assert isinstance(arrays, dict)
    return arrays


def _allow_open_files(count: int) -> None:
    """Raises the limit on open files. A file stays open until its last tensor has been read. With
    one file per tensor, as in Ollama's store, a model has more files than a process may open by
    default (256 on macOS)."""
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
    """Returns the file that contains the tensors named in the error, if they are all in one
    file."""
    if not isinstance(error, architectures.TensorError):
        return None
    by_array = {id(array): places.get(name) for name, array in weights.items()}
    found = {
        by_array.get(id(array))
        for name, array in get_text_weights(to_mlx_names(weights)).items()
        if name in error.tensors
    }
    return found.pop() if len(found) == 1 else None
