"""From hidden states to embeddings: pooling, the dense layers of sentence-transformers, the norm.

Knows: hidden states, modules.json and the folders that it lists, as saved by sentence-transformers
5, and that a GGUF file may have dense layers. Must not know: jobs, models.

The poolings are weighted sums over positions. Rows of different poolings can therefore share a
batch, and an input can be split into several chunks. For "mean", the weight of each position is 1 /
length. For "cls" and "last", the weight of the first or last position is 1 and all other weights
are 0. Sources: Reimers and Gurevych 2019 (arXiv:1908.10084) for the mean over all tokens, including
special tokens; Devlin et al. 2018 (arXiv:1810.04805) for the first token; Neelakantan et al. 2022
(arXiv:2201.10005) for the last token; Kusupati et al. 2022 (arXiv:2205.13147) for embeddings that
may be truncated to their first dimensions.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from app.core.errors import AppError, ErrorKind
from app.core.model_files import read_embedding_modules
from app.core.requests import PoolingType
from app.engine.weights import open_shard
from models.gguf.reader import GGUFError
from models.gguf.weights import read_dense_layers

# The epsilon of torch.nn.functional.normalize, which the reference implementations use.
_MIN_NORM = 1e-12

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"

# The activations of a dense layer, by the name of their class in torch.
_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "SiLU": nn.silu,
}


def pooling_weights(pooling: PoolingType, length: int, start: int, width: int) -> list[float]:
    """Returns the pooling weights of `width` positions, beginning at position `start` of an input
    with `length` tokens. Positions after the end of the input have weight 0."""
    if pooling == "mean":
        here = max(0, min(width, length - start))
        return [1 / length] * here + [0.0] * (width - here)
    chosen = 0 if pooling == "cls" else length - 1
    return [float(start + place == chosen) for place in range(width)]


def pool_hidden_states(hidden: mx.array, weights: mx.array) -> mx.array:
    """Pools hidden states [B, L, D] with weights [B, L]. Returns [B, D] in float32. Positions with
    weight 0 may contain any value, including NaN."""
    weights = weights[..., None]
    return mx.sum(mx.where(weights > 0, weights * hidden.astype(mx.float32), 0), axis=1)


def normalize(vectors: mx.array, dimensions: Sequence[int | None]) -> mx.array:
    """Scales each row of [B, D] to unit length. Before that, all but the first `dimensions`
    elements of a row are set to zero (None keeps all). Zero vectors stay zero."""
    width = vectors.shape[-1]
    kept = mx.array([[width if count is None else count] for count in dimensions])
    cut = mx.where(mx.arange(width) < kept, vectors, 0)
    # Dividing by the maximum first prevents overflow when the values are squared.
    largest = mx.max(mx.abs(cut), axis=-1, keepdims=True)
    cut = cut / mx.where(largest > 0, largest, 1)
    return cut / mx.maximum(mx.linalg.norm(cut, axis=-1, keepdims=True), _MIN_NORM)


def vectors_to_bytes(vectors: mx.array, dimensions: Sequence[int | None]) -> list[bytes | None]:
    """Returns the first `dimensions` values of each row (None for all) as little-endian float32.
    MLX supports only little-endian machines. Returns None for a row that contains NaN or infinity.
    Waits for the device."""
    width = vectors.shape[-1]
    sound = cast(list[bool], mx.all(mx.isfinite(vectors), axis=-1).tolist())
    # MLX's type stubs lack the buffer protocol.
    view = memoryview(cast(Any, mx.contiguous(vectors))).cast("B")
    return [
        bytes(view[4 * width * row : 4 * (width * row + (count or width))]) if sound[row] else None
        for row, count in enumerate(dimensions)
    ]


def scores_to_bytes(scores: mx.array) -> bytes | None:
    """Returns scores [N] like `vectors_to_bytes`."""
    return vectors_to_bytes(scores[None].astype(mx.float32), [None])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """weight: [out, in]. bias: [out] or None."""

    weight: mx.array
    bias: mx.array | None
    activation: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        # each row by itself: a product of several rows may round differently
        rows = [x[row : row + 1] @ self.weight.T for row in range(x.shape[0])]
        product = mx.concatenate(rows)
        return self.activation(product if self.bias is None else product + self.bias)


class EmbeddingHead:
    """Converts pooled hidden states to embeddings. hidden_size: their width. size: that of an
    embedding."""

    def __init__(self, hidden_size: int, layers: Sequence[DenseLayer] = ()) -> None:
        self._layers = tuple(layers)
        self.size = layers[-1].weight.shape[0] if layers else hidden_size

    def __call__(self, pooled: mx.array, dimensions: Sequence[int | None]) -> mx.array:
        """Converts pooled hidden states [B, D] to embeddings [B, size] of unit length, whose
        elements after the first `dimensions` are zero."""
        x = pooled
        for layer in self._layers:
            x = layer(x)
        return normalize(x, dimensions)


def load_embedding_head(folder: Path, hidden_size: int) -> EmbeddingHead:
    """Reads the dense layers that modules.json of a model's folder lists. Without that file, there
    are none. Raises AppError(MODEL_FILES) for dense layers that cannot be used."""
    folders = [folder / path for path in _list_dense_folders(folder)]
    return _make_head(((path, _read_dense(path)) for path in folders), hidden_size)


def load_gguf_embedding_head(path: Path, hidden_size: int) -> EmbeddingHead:
    """Reads the dense layers in a GGUF file, if it has any. Raises the same errors as
    `load_embedding_head`."""
    try:
        weights = read_dense_layers(path)
    except (EOFError, GGUFError, OSError) as error:
        raise _error(path, f"reading the dense layers failed: {error}") from error
    identity = _ACTIVATIONS["Identity"]
    layers = [DenseLayer(weight=weight, bias=None, activation=identity) for weight in weights]
    return _make_head(((path, layer) for layer in layers), hidden_size)


def _make_head(layers: Iterable[tuple[Path, DenseLayer]], hidden_size: int) -> EmbeddingHead:
    used: list[DenseLayer] = []
    width = hidden_size
    for path, layer in layers:
        if layer.weight.ndim != 2 or layer.weight.shape[1] != width:
            raise _error(
                path,
                f"linear.weight has the shape {list(layer.weight.shape)}, but its input has "
                f"{width} elements",
            )
        width = layer.weight.shape[0]
        used.append(layer)
    return EmbeddingHead(hidden_size, used)


def _list_dense_folders(folder: Path) -> Sequence[str]:
    """Returns the folders of the dense layers, in order. Only direct subfolders are used."""
    found: list[str] = []
    for kind, path in read_embedding_modules(folder):
        if kind != "Dense":
            continue
        if not isinstance(path, str) or Path(path).name != path:
            raise _error(folder / "modules.json", f"{path!r} is not a subfolder of the model")
        found.append(path)
    return found


def _read_dense(folder: Path) -> DenseLayer:
    try:
        config: Any = json.loads((folder / _CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _error(folder / _CONFIG, f"the dense layer cannot be read: {error}") from error
    name = str(config.get("activation_function") if isinstance(config, dict) else None)
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        raise _error(folder / _CONFIG, f"the activation_function {name!r} is not supported")
    arrays = open_shard(folder / _WEIGHTS)
    if "linear.weight" not in arrays:
        raise _error(folder / _WEIGHTS, "it has no tensor linear.weight")
    weight = arrays["linear.weight"].astype(mx.float32)
    bias = arrays.get("linear.bias")
    mx.eval(weight)
    return DenseLayer(
        weight=weight,
        bias=None if bias is None else bias.astype(mx.float32),
        activation=activation,
    )


def _error(path: Path, message: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{path}: {message}")
