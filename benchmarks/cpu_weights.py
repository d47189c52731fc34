"""Reads the float32 weights of a model folder that cpu_models.py wrote, without MLX.

Knows: safetensors, MLX's affine packing, the names of a Llama's weights. Must not know: MLX, other
formats. Peers get the same weights as our backend, quantized in their own formats.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_cells import Format, ModelShape, get_group_size

_DTYPES: Mapping[str, Any] = {"F32": np.float32, "BF16": np.uint16, "U32": np.uint32}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    start: int


class StoredWeights:
    """The weights of a folder. Each is read when it is needed."""

    def __init__(self, folder: Path, shape: ModelShape, form: Format) -> None:
        self.shape = shape
        self.format = form
        file = folder / "model.safetensors"
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length))
        self._bytes = np.memmap(file, np.uint8, mode="r", offset=8 + length)
        self._stored = {
            name: _Stored(
                dtype=found["dtype"],
                shape=tuple(found["shape"]),
                start=found["data_offsets"][0],
            )
            for name, found in header.items()
            if name != "__metadata__"
        }

    def names(self) -> Iterator[str]:
        """The names of weights, without those of scales and biases."""
        return (name for name in self._stored if name.endswith(".weight"))

    def read(self, name: str) -> np.ndarray:
        """A weight as float32, dequantized."""
        plain = self._read_array(name)
        if self._stored[name].dtype != "U32":
            return plain
        assert self.format.bits is not None
        path = name.removesuffix(".weight")
        numbers = unpack(plain, self.format.bits)
        group = get_group_size(self.shape, self.format)
        scales, biases = self._read_array(f"{path}.scales"), self._read_array(f"{path}.biases")
        grouped = numbers.reshape(*scales.shape, group) * scales[..., None] + biases[..., None]
        return grouped.reshape(numbers.shape).astype(np.float32)

    def _read_array(self, name: str) -> np.ndarray:
        stored = self._stored[name]
        dtype = np.dtype(_DTYPES[stored.dtype])
        count = int(np.prod(stored.shape))
        array = self._bytes[stored.start : stored.start + count * dtype.itemsize].view(dtype)
        array = array.reshape(stored.shape)
        if stored.dtype == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(array)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """[rows, words] -> [rows, numbers]: the first number of a word is in its lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (packed[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.reshape(packed.shape[0], -1).astype(np.float32)
