"""The tensors of a GGUF file as the weights of our modules.

Knows: what llama.cpp's converters change in the tensors of an architecture, and how to undo it.
Must not know: the layout of blocks, modules.

MLX cannot read a part of a file lazily, except in its own formats. Therefore the weights are
computed from arrays of bytes whose content is read later (`UnreadTensors.read`): until then, the
memory requirement of the model can be computed without reading or allocating anything.
"""

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from models.base import ModelError
from models.gguf import reader
from models.gguf.architectures import (
    DENSE_TENSORS,
    NUM_UNUSED_POSITIONS,
    find_architecture,
    rename_tensors,
)
from models.gguf.blocks import dequantize, repack_affine
from models.gguf.ggml_types import GGMLType
from models.gguf.layers import StoredBlocks, choose_storage
from models.gguf.metadata import Metadata
from models.gguf.reader import GGUFFile, GGUFTensor, get_version

_PLAIN_DTYPES: Mapping[str, mx.Dtype] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
}

# the most bytes that Linux reads in one call is slightly below 2 GiB
_READ_BYTES = 1 << 30

Arrays = dict[str, mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnreadTensor:
    """bytes: the array, uint8, for the content of the tensor."""

    bytes: mx.array
    tensor: GGUFTensor


class UnreadTensors:
    """The arrays of bytes on which the weights of a file depend. blocks: those of quantized
    weights, for `architectures.build`."""

    def __init__(self) -> None:
        self._tensors: list[_UnreadTensor] = []
        self.blocks: list[StoredBlocks] = []

    def add(self, tensor: GGUFTensor) -> mx.array:
        """Returns an array for the bytes of the tensor: the last axis is a row."""
        *outer, width = tensor.shape
        row = width // tensor.type.elements * tensor.type.nbytes
        array = mx.zeros((*outer, row), mx.uint8)
        self._tensors.append(_UnreadTensor(bytes=array, tensor=tensor))
        return array

    def read(self) -> None:
        """Reads the content of all arrays, once. It must be called before anything that depends on
        them is evaluated. Afterwards, this object holds no array. Raises OSError, and
        ModelError if a file changed after its header was read."""
        unread, self._tensors = self._tensors[::-1], []
        opened: dict[Path, int] = {}
        versions: dict[Path, str] = {}
        try:
            while unread:
                one = unread.pop()
                path = one.tensor.path
                if path not in opened:
                    opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    versions[path] = one.tensor.file_version
                _fill(one.bytes, opened[path], one.tensor)
            # a change that ended before the check was made may have been read
            for path, file in opened.items():
                if get_version(os.fstat(file)) != versions[path]:
                    raise _change_error(path)
        finally:
            for file in opened.values():
                os.close(file)


def _fill(array: mx.array, file: int, tensor: GGUFTensor) -> None:
    mx.eval(array)
    target: Any = array  # MLX's stubs lack the buffer protocol
    with memoryview(target) as view, view.cast("B") as content:
        done = 0
        while done < len(content):
            part = content[done : done + _READ_BYTES]
            count = os.preadv(file, [part], tensor.offset + done)
            if not count:
                raise _change_error(tensor.path)
            done += count


def _change_error(path: Path) -> ModelError:
    return ModelError(f"{path} was changed while the model was loaded: load it again")


def open_weights(file: GGUFFile) -> tuple[Arrays, UnreadTensors]:
    """Returns the weights of a model, with the names of our modules and in MLX's packings, and the
    arrays whose content must be read before the weights are evaluated. Raises GGUFError for a
    tensor that the architecture does not have, and ModelError for a shape that contradicts the
    metadata."""
    metadata = Metadata(file)
    architecture = find_architecture(metadata)
    unread = UnreadTensors()
    weights: Arrays = {}
    opened = (
        (target, raw, file.tensors[name])
        for name, whole in rename_tensors(file).items()
        for target, raw in _split_fused(whole, unread.add(file.tensors[name]))
    )
    for target, raw, tensor in opened:
        parts = unpack(target, raw, tensor.type)
        if architecture.rotates_pairs and target.endswith(ROTATED):
            heads = "head_count" if ".q_proj." in target else "head_count_kv"
            count = metadata.integer(f"attention.{heads}", metadata.integer("attention.head_count"))
            parts = {name: split_rotated_pairs(name, one, count) for name, one in parts.items()}
            raw = split_rotated_pairs(target, raw, count)
        if architecture.norms_have_one_added and target.endswith("norm.weight"):
            parts = {target: parts[target] - 1}
        if not tensor.type.is_plain and target.endswith(".weight"):
            unread.blocks.append(
                StoredBlocks(weight=parts[target], raw=raw, type_id=tensor.type.id)
            )
        weights |= parts
    return _convert_layers(metadata, weights), unread


def read_dense_layers(path: Path) -> list[mx.array]:
    """Returns the weights [out, in], float32, of the dense layers that follow the pooling of an
    encoder. Raises the errors of `reader.read` and of `UnreadTensors.read`."""
    tensors = reader.read(path).tensors
    found = [tensors[name] for name in DENSE_TENSORS if name in tensors]
    unread = UnreadTensors()
    raws = [unread.add(tensor) for tensor in found]
    unread.read()
    pairs = zip(raws, found, strict=True)
    return [to_floats(raw, tensor.type).astype(mx.float32) for raw, tensor in pairs]


# fused projections -> the axis of the tensor that is split, and the projections
_FUSED: Mapping[str, tuple[int, Sequence[str]]] = {
    ".experts.gate_up_proj": (1, (".experts.gate_proj", ".experts.up_proj")),
    ".self_attn.fused_qkv": (0, (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj")),
    ".attention.self.fused_qkv": (
        0,
        (".attention.self.query", ".attention.self.key", ".attention.self.value"),
    ),
}


def _split_fused(name: str, raw: mx.array) -> Iterator[tuple[str, mx.array]]:
    """Yields the tensor, or the projections that are fused in it. They consist of whole rows and
    therefore keep their blocks. raw: uint8 [out, bytes per row], or [E, out, bytes per row]."""
    module, _, part = name.rpartition(".")
    for fused, (axis, projections) in _FUSED.items():
        if not module.endswith(fused):
            continue
        if raw.ndim <= axis or raw.shape[axis] % len(projections):
            raise ModelError(f"{name} cannot be split into {len(projections)} projections")
        path = module.removesuffix(fused)
        for projection, rows in zip(
            projections, raw.split(len(projections), axis=axis), strict=True
        ):
            yield f"{path}{projection}.{part}", rows
        return
    yield name, raw


# projections whose rows belong to rotated heads
ROTATED = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")


def unpack(name: str, raw: mx.array, kind: GGMLType) -> Arrays:
    """Returns the weight `name` and, if it is packed, its scales and biases. This is the storage
    without the kernels: `models.architectures.build` replaces it with the blocks."""
    if kind.is_plain:
        return {name: to_floats(raw, kind)}
    module, _, part = name.rpartition(".")
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    storage = choose_storage(kind.id, has_kernels=False, on_gpu=on_gpu)
    if part != "weight" or storage != "affine":
        array = to_floats(raw, kind)
        return {name: array.astype(mx.bfloat16) if storage == "bfloat16" else array}
    packed = repack_affine(raw, kind.id)
    parts = {f"{module}.weight": packed.weight, f"{module}.scales": packed.scales}
    if packed.biases is not None:
        parts[f"{module}.biases"] = packed.biases
    return parts


def to_floats(raw: mx.array, kind: GGMLType) -> mx.array:
    """Returns the numbers of a tensor, in its own type if it is not quantized, else in float32."""
    return raw.view(_PLAIN_DTYPES[kind.name]) if kind.is_plain else dequantize(raw, kind.id)


def split_rotated_pairs(name: str, array: mx.array, heads: int) -> mx.array:
    """Reorders the rows of each head from pairs that are rotated together to the first elements of
    all pairs, followed by the second ones."""
    rows = array.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise ModelError(f"{name} has {rows} rows, which cannot be divided among {heads} heads")
    return array[mx.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()]


# matrices that some converters write as vectors if they have one row
_MATRICES_OF_ONE_ROW = (
    ".shared_expert_gate.weight",
    "embeddings.token_type_embeddings.weight",
    "classifier.out_proj.weight",
)

_POSITIONS = "embeddings.position_embeddings.weight"


def _convert_layers(metadata: Metadata, weights: Arrays) -> Arrays:
    """Converts tensors that llama.cpp stores in a different form."""
    converted: Arrays = {}
    for name, array in weights.items():
        if name.endswith((".conv1d.weight", ".conv.conv.weight")) and array.ndim == 2:
            array = array[..., None]  # [D, width, 1]
        elif name.endswith(".A_log"):
            array = mx.log(-array).flatten()
        elif name.endswith((".mixer.D", ".mixer.norm.weight")):
            array = array.flatten()
        elif name.endswith(_MATRICES_OF_ONE_ROW) and array.ndim == 1:
            array = array[None]
        elif name == _POSITIONS and metadata.has_tensor("cls.output.weight"):
            unused = mx.zeros((NUM_UNUSED_POSITIONS, array.shape[-1]), array.dtype)
            with _name_faulty_tensor(name):
                array = mx.concatenate([unused, array])
        converted[name] = array
    if metadata.has("ssm.group_count") and metadata.has("full_attention_interval"):
        return _convert_gated_delta(metadata, converted)
    return converted


def _convert_gated_delta(metadata: Metadata, weights: Arrays) -> Arrays:
    """Restores the order of the value heads in the gated delta nets of Qwen3.5, and splits the
    projection for steps and decay of Qwen3-Next.

    Several value heads belong to one key head. The original stores them together. For Qwen3.5,
    llama.cpp stores the first value heads of all key heads, then the second ones, and so on.
    """
    key_heads, value_heads = (
        metadata.integer("ssm.group_count"),
        metadata.integer("ssm.time_step_rank"),
    )
    keys = metadata.integer("ssm.state_size") * key_heads
    if key_heads < 1 or value_heads % key_heads:
        raise ModelError(f"{value_heads} value heads cannot be divided among {key_heads} key heads")
    ratio = value_heads // key_heads
    is_tiled = ratio > 1 and metadata.architecture != "qwen3next"
    converted: Arrays = {}
    for name, array in weights.items():
        with _name_faulty_tensor(name):
            path, _, parameter = name.partition(".linear_attn.")
            if parameter.startswith("in_proj_ba."):
                halves = array.reshape(key_heads, 2, ratio, -1)
                for index, half in enumerate(("in_proj_b", "in_proj_a")):
                    target = f"{path}.linear_attn.{half}.{parameter.rpartition('.')[2]}"
                    converted[target] = halves[:, index].reshape(value_heads, -1)
                continue
            if is_tiled and parameter.startswith(("in_proj_qkv.", "conv1d.")):
                array = mx.concatenate(
                    [array[: 2 * keys], _group_heads(array[2 * keys :], key_heads, ratio)]
                )
            elif is_tiled and parameter.startswith(_VALUE_HEAD_ROWS):
                array = _group_heads(array, key_heads, ratio)
            elif is_tiled and parameter.startswith("out_proj."):
                # the columns of each head, which consist of whole groups of 32 if they are packed
                if array.shape[-1] % value_heads:
                    raise ModelError(f"{name} cannot be divided among {value_heads} heads")
                array = _group_heads(array.T, key_heads, ratio).T
            converted[name] = array
    return converted


@contextlib.contextmanager
def _name_faulty_tensor(name: str) -> Generator[None]:
    """Raises ModelError if MLX rejects the shape of a tensor."""
    try:
        yield
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{name} does not have the shape that follows from the keys") from error


# the parameters whose first axis is the value heads
_VALUE_HEAD_ROWS = ("in_proj_z.", "in_proj_b.", "in_proj_a.", "A_log", "dt_bias")


def _group_heads(array: mx.array, key_heads: int, ratio: int) -> mx.array:
    """Reorders the first axis, (ratio, key_heads, size), to (key_heads, ratio, size)."""
    split = array.reshape(ratio, key_heads, -1, *array.shape[1:])
    return split.swapaxes(0, 1).reshape(array.shape)
