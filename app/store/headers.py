"""The header of a safetensors file, and never what lies behind it.

Knows: the format (huggingface/safetensors, README.md, "Format"). Must not know: what tensors mean,
which of them a model needs.

    [ 8 bytes: size of the header | header: a JSON object | data ......................... ]
                                                          [ tensor | tensor | ... | tensor ]

Everything that the header claims is held against the length of the file, so that whoever reads the
tensors later can trust it: each tensor has exactly the bytes that its type and shape ask for, and
together they are the data, without holes or overlap.
"""

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, Kind

# bits of one element
BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

_SIZE = 8  # bytes that the size of the header takes

# the format's own bound on a header; a checkpoint of 90,000 tensors needs a tenth of it
_LONGEST = 100_000_000

# a dimension is an int32 wherever tensors are computed with, and nobody has more than a few
_LARGEST_DIMENSION = (1 << 31) - 1
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = (1 << 63) - 1

_SHOWN = 80  # characters of a foreign name in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """start, end: its bytes within the data, which begins where the header ends."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def elements(self) -> int:
        return self.nbytes * 8 // BITS[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What one file holds. metadata: its `__metadata__`, empty when it has none. version: a digest
    of the header, the size and the modification time of the file, so that it changes when the file
    is replaced."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    version: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(path: Path) -> Header:
    """Raises AppError(MODEL_FILES), one line that names the file, for whatever is not as the
    format says."""
    try:
        found = _stat_of(path)
        size = found.st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_SIZE), "little")
            if size < _SIZE:
                raise _broken(path, f"it has {size} bytes, fewer than the 8-byte header length")
            if length > _LONGEST:
                raise _broken(
                    path, f"its header length is {length} bytes, more than the format allows"
                )
            if length > size - _SIZE:
                raise _broken(
                    path, f"its header length is {length} bytes, but only {size - _SIZE} follow"
                )
            text = file.read(length)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    version = hashlib.sha256(f"{size} {found.st_mtime_ns} ".encode() + text).hexdigest()
    return _parsed(path, text, data=size - _SIZE - length, version=version)


def versions(headers: Iterable[Header]) -> str:
    """One digest of the versions of several files."""
    return hashlib.sha256(" ".join(header.version for header in headers).encode()).hexdigest()


def _stat_of(path: Path) -> os.stat_result:
    """Opening a pipe would wait for somebody to write into it. Raises OSError."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise _broken(path, "it is not a regular file")
    return found


def _parsed(path: Path, text: bytes, *, data: int, version: str) -> Header:
    """data: bytes behind the header."""
    try:
        found: Any = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    # RecursionError: something nested ten thousand deep
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({_clause(error)})") from error
    if not isinstance(found, dict):
        raise _broken(path, "its header is not a JSON object")
    entries = cast(dict[str, Any], found)
    metadata = _metadata(path, entries.pop("__metadata__", None))
    tensors = {name: _tensor(path, name, told) for name, told in entries.items()}
    _check_tiled(path, tensors, data=data)
    return Header(path=path, tensors=tensors, metadata=metadata, version=version)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers do not agree on which of two entries counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{_shown(name)} appears twice")
    return made


def _metadata(path: Path, told: Any) -> dict[str, str]:
    if told is None:  # so MLX says "none"
        return {}
    if not isinstance(told, dict):
        raise _broken(path, "its __metadata__ is not an object")
    metadata = cast(dict[str, Any], told)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its __metadata__ has a value that is not a string")
    return cast(dict[str, str], metadata)


def _tensor(path: Path, name: str, told: Any) -> Tensor:
    if not name.isprintable():  # it would stand in messages and logs
        raise _broken(path, f"the tensor name {_shown(name)} contains unprintable characters")
    match told:
        case {"dtype": str(dtype), "shape": list(), "data_offsets": [int(start), int(end)]}:
            shape = cast("list[Any]", told["shape"])
        case _:
            raise _broken(path, f"{_shown(name)} needs dtype, shape and data_offsets")
    if dtype not in BITS:
        raise _broken(path, f"{_shown(name)} has the unknown dtype {_shown(dtype)}")
    elements = _elements(shape)
    if elements is None:
        raise _broken(path, f"the shape of {_shown(name)} is invalid")
    if isinstance(start, bool) or isinstance(end, bool) or not 0 <= start <= end <= _MOST_ELEMENTS:
        raise _broken(path, f"the data_offsets of {_shown(name)} are invalid")
    if elements * BITS[dtype] != (end - start) * 8:
        raise _broken(
            path,
            f"{_shown(name)} has {end - start} bytes, which does not match its dtype and shape",
        )
    return Tensor(dtype=dtype, shape=tuple(shape), start=start, end=end)


def _elements(shape: list[Any]) -> int | None:
    """How many a tensor of this shape has; None where there can be no such tensor."""
    if len(shape) > _MOST_DIMENSIONS:
        return None
    count, bound = 1, 1
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool):
            return None
        if not 0 <= size <= _LARGEST_DIMENSION:
            return None
        count *= size
        bound *= max(size, 1)  # a zero must not hide what the others come to
        if bound > _MOST_ELEMENTS:
            return None
    return count


def _check_tiled(path: Path, tensors: Mapping[str, Tensor], *, data: int) -> None:
    """The tensors are the data: each begins where another ends, the last one ends the file."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            kind = "overlaps" if tensor.start < at else "leaves a gap after"
            raise _broken(path, f"{_shown(name)} {kind} the tensor before it")
        at = tensor.end
    if at > data:
        raise _broken(
            path, f"it is truncated: its tensors need {at} bytes, but the file has {data}"
        )
    if at < data:
        raise _broken(path, f"its tensors have {at} bytes, but the file has {data}")


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "…")


def _clause(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _broken(path: Path, why: str) -> AppError:
    return AppError(Kind.MODEL_FILES, f"{path} is not a valid safetensors file: {why}")
