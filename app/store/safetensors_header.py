"""Parses safetensors headers. The data behind a header is never read.

Knows: the format (huggingface/safetensors, README.md, "Format"). Must not know: the meaning of
tensors, the tensors that a model needs.

    [ 8 bytes: size of the header | header: a JSON object | data ......................... ]
                                                          [ tensor | tensor | ... | tensor ]

The header is validated against the file size, so that code that reads the tensors can rely on it.
Each tensor has exactly as many bytes as its dtype and shape require. Together, the tensors cover
the data without gaps or overlap.
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

from app.core.errors import AppError, ErrorKind
from app.store.config_files import check_no_lfs_pointer

# the number of bits of one element
DTYPE_BITS: Mapping[str, int] = {
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

_LENGTH_BYTES = 8  # number of bytes of the header's size field

# the format's maximum size of a header; a checkpoint with 90,000 tensors needs 10 % of it
_MAX_HEADER_BYTES = 100_000_000

# dimensions are int32 in every tensor library, and no tensor has more than a few dimensions
_MAX_DIMENSION = (1 << 31) - 1
_MAX_NUM_DIMENSIONS = 16
_MAX_ELEMENTS = (1 << 63) - 1

_MAX_NAME_LENGTH = 80  # maximum number of characters of an unknown name in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The description of a tensor. start, end: the byte offsets within the data, which begins after
    the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return self.nbytes * 8 // DTYPE_BITS[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """The header of one file. metadata: the `__metadata__` of the header; empty if there is none.
    fingerprint: a digest of the header and of the file's size and modification time, which changes
    when the file is replaced."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """The total number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(path: Path) -> SafetensorsHeader:
    """Reads a header. Raises AppError(MODEL_FILES) if the header violates the format. The message
    is one line that names the file."""
    try:
        status = _stat_regular_file(path)
        size = status.st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if size < _LENGTH_BYTES:
                raise _invalid_header_error(
                    path, f"it has {size} bytes, fewer than the 8 bytes of the header length"
                )
            if length > _MAX_HEADER_BYTES:
                check_no_lfs_pointer(path, start + file.read(_MAX_NAME_LENGTH))
                raise _invalid_header_error(
                    path,
                    f"its header length is {length} bytes, which exceeds the limit of the format",
                )
            if length > size - _LENGTH_BYTES:
                raise _invalid_header_error(
                    path,
                    f"its header length is {length} bytes, but only {size - _LENGTH_BYTES} bytes "
                    "follow",
                )
            text = file.read(length)
    except OSError as error:
        raise _invalid_header_error(path, error.strerror or str(error)) from error
    version = hashlib.sha256(f"{size} {status.st_mtime_ns} ".encode() + text).hexdigest()
    return _parse_header(path, text, data_bytes=size - _LENGTH_BYTES - length, fingerprint=version)


def combine_fingerprints(headers: Iterable[SafetensorsHeader]) -> str:
    """Returns one digest of the fingerprints of several files."""
    return hashlib.sha256(" ".join(header.fingerprint for header in headers).encode()).hexdigest()


def _stat_regular_file(path: Path) -> os.stat_result:
    """Returns the file status of a regular file. Other files are rejected, because opening a pipe
    would block until it has a writer. Raises OSError."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise _invalid_header_error(path, "it is a link to a missing file") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        raise _invalid_header_error(path, "it is not a regular file")
    return status


def _parse_header(
    path: Path, text: bytes, *, data_bytes: int, fingerprint: str
) -> SafetensorsHeader:
    """Parses the header. data_bytes: the number of bytes after the header."""
    try:
        parsed: Any = json.loads(text.decode(), object_pairs_hook=_reject_duplicates)
    # RecursionError: the JSON is nested ten thousand levels deep
    except (ValueError, RecursionError) as error:
        raise _invalid_header_error(
            path, f"its header is not JSON ({_format_reason(error)})"
        ) from error
    if not isinstance(parsed, dict):
        raise _invalid_header_error(path, "its header is not a JSON object")
    entries = cast(dict[str, Any], parsed)
    metadata = _parse_metadata(path, entries.pop("__metadata__", None))
    tensors = {name: _parse_tensor(path, name, entry) for name, entry in entries.items()}
    _check_contiguous(path, tensors, data_bytes=data_bytes)
    return SafetensorsHeader(path=path, tensors=tensors, metadata=metadata, fingerprint=fingerprint)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rejects duplicate keys, because JSON parsers disagree on which value to use."""
    made = dict(pairs)
    if len(made) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{_quote_name(name)} appears twice")
    return made


def _parse_metadata(path: Path, entry: Any) -> dict[str, str]:
    if entry is None:  # MLX writes null for an empty entry
        return {}
    if not isinstance(entry, dict):
        raise _invalid_header_error(path, "its __metadata__ is not an object")
    metadata = cast(dict[str, Any], entry)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid_header_error(path, "its __metadata__ has a value that is not a string")
    return cast(dict[str, str], metadata)


def _parse_tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    if not name.isprintable():  # the name appears in messages and logs
        raise _invalid_header_error(
            path, f"the tensor name {_quote_name(name)} contains unprintable characters"
        )
    match entry:
        case {"dtype": str(dtype), "shape": list(), "data_offsets": [int(start), int(end)]}:
            shape = cast("list[Any]", entry["shape"])
        case _:
            raise _invalid_header_error(
                path, f"{_quote_name(name)} must have a valid dtype, shape and data_offsets"
            )
    if dtype not in DTYPE_BITS:
        raise _invalid_header_error(
            path, f"{_quote_name(name)} has the unknown dtype {_quote_name(dtype)}"
        )
    elements = _count_elements(shape)
    if elements is None:
        raise _invalid_header_error(path, f"the shape of {_quote_name(name)} is invalid")
    if isinstance(start, bool) or isinstance(end, bool) or not 0 <= start <= end <= _MAX_ELEMENTS:
        raise _invalid_header_error(path, f"the data_offsets of {_quote_name(name)} are invalid")
    if elements * DTYPE_BITS[dtype] != (end - start) * 8:
        raise _invalid_header_error(
            path,
            f"{_quote_name(name)} has {end - start} bytes, which does not match its dtype "
            "and shape",
        )
    return TensorInfo(dtype=dtype, shape=tuple(shape), start=start, end=end)


def _count_elements(shape: list[Any]) -> int | None:
    """Returns the number of elements of this shape, or None if the shape is invalid."""
    if len(shape) > _MAX_NUM_DIMENSIONS:
        return None
    count, bound = 1, 1
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool):
            return None
        if not 0 <= size <= _MAX_DIMENSION:
            return None
        count *= size
        bound *= max(size, 1)  # a zero must not hide the other dimensions
        if bound > _MAX_ELEMENTS:
            return None
    return count


def _check_contiguous(path: Path, tensors: Mapping[str, TensorInfo], *, data_bytes: int) -> None:
    """Checks that the tensors cover exactly `data_bytes` bytes. Each tensor must begin at the end
    of another one, and the last tensor must end at the end of the file."""
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != offset:
            kind = "overlaps" if tensor.start < offset else "leaves a gap after"
            raise _invalid_header_error(path, f"{_quote_name(name)} {kind} the previous tensor")
        offset = tensor.end
    if offset > data_bytes:
        raise _invalid_header_error(
            path, f"it is truncated: its tensors need {offset} bytes, but the file has {data_bytes}"
        )
    if offset < data_bytes:
        raise _invalid_header_error(
            path, f"its tensors have {offset} bytes, but the file has {data_bytes}"
        )


def _quote_name(name: str) -> str:
    return repr(name if len(name) <= _MAX_NAME_LENGTH else name[:_MAX_NAME_LENGTH] + "…")


def _format_reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _invalid_header_error(path: Path, why: str) -> AppError:
    return AppError(ErrorKind.MODEL_FILES, f"{path} is not a valid safetensors file: {why}")
