"""Parses the headers of GGUF files. The data behind a header is never read.

Knows: the format (ggml-org/ggml, docs/gguf.md), split files. Must not know: the meaning of keys and
tensors, MLX.

    "GGUF" | version | counts | keys and values | names, shapes, types, offsets of tensors | data

The header is hostile input: each count and length is compared with the size of the file and with a
limit before anything of that size is allocated or iterated. The header is validated, so that code
that reads the tensors can rely on it: each tensor is inside the file and overlaps no other tensor.
Strings in arrays are decoded on demand, because a vocabulary has hundreds of thousands.
"""

import hashlib
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from models.gguf.ggml_types import GGML_TYPES, UNSUPPORTED_TYPES, GGMLType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32

# the bytes that are read at first; the header of a model with 50,000 tokens has 2 MB
_FIRST_READ_BYTES = 4 << 20
_READ_GROWTH = 4

# the maximum size of a header; those of the largest vocabularies, 260,000 tokens, have 15 MB, and
# 50 MB with the text of a tokenizer.json
_MAX_HEADER_BYTES = 64 << 20

# tensors of a model, and keys: a model of 100 layers has 2,000 tensors and 50 keys
_MAX_TENSORS, _MAX_KEYS = 1 << 17, 1 << 14

# the total number of strings in arrays; 260,000 tokens with their merges are 780,000
_MAX_STRINGS = 1 << 20

# the total number of arrays in arrays, which no known file has
_MAX_INNER_ARRAYS = 1 << 12

# a longer text is not decoded, during which no other thread of Python would run; the longest
# texts that are used are licenses with 50,000 characters
_MAX_TEXT_BYTES = 1 << 20

# GGML_MAX_NAME of ggml; a key may have 65,535 bytes, but real keys have 50
_MAX_NAME_BYTES, _MAX_KEY_BYTES = 64, 256
_MAX_NUM_DIMENSIONS = 4
_MAX_DIMENSION = (1 << 31) - 1
_MAX_ALIGNMENT = 1 << 20
_MAX_DEPTH = 2
_MAX_SHARDS = 1024
_MAX_FLOATS = 4096

# value type number: (name, struct format, bytes); strings and arrays are parsed below
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, tuple[str, str, int]] = {
    0: ("u8", "B", 1),
    1: ("i8", "b", 1),
    2: ("u16", "H", 2),
    3: ("i16", "h", 2),
    4: ("u32", "I", 4),
    5: ("i32", "i", 4),
    6: ("f32", "f", 4),
    _BOOL: ("bool", "B", 1),
    10: ("u64", "Q", 8),
    11: ("i64", "q", 8),
    12: ("f64", "d", 8),
}

_LENGTH = struct.Struct("<Q")

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

# the start of a file that Git LFS left in place of the content
_LFS_POINTER = b"version https://git-lfs"


class GGUFError(ValueError):
    """The file is not a valid or supported GGUF file. The message is one line that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array of the header. kind: the type of its elements: "string", "array" or a number type.
    data: the encoded elements."""

    kind: str
    count: int
    data: memoryview = field(repr=False)

    def strings(self) -> list[bytes]:
        """Returns the elements as they are in the file, which may be invalid UTF-8. Raises
        ValueError for an array of any other type."""
        if self.kind != "string":
            raise ValueError(f"an array of {self.kind}, but strings are needed")
        data, offset, found = bytes(self.data), 0, list[bytes]()
        for _ in range(self.count):
            end = offset + 8 + _LENGTH.unpack_from(data, offset)[0]
            found.append(data[offset + 8 : end])
            offset = end
        return found

    def numbers(self, limit: int) -> list[int] | list[float]:
        """Returns the first elements, up to `limit`. Raises ValueError for an array of any other
        type."""
        count = min(self.count, limit)
        for name, code, _ in _SCALARS.values():
            if name == self.kind:
                return list(struct.unpack_from(f"<{count}{code}", self.data))
        raise ValueError(f"an array of {self.kind}, but numbers are needed")


class UnsupportedError(GGUFError):
    """The file is valid, but it uses an unsupported feature."""


Value = int | float | bool | str | Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """A tensor. shape: from the slowest dimension to the fastest, as in MLX; the file has the
    reverse order. offset: its position in the file in bytes. file_version: of the file at `path`
    when its header was read, see `get_version`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    path: Path
    file_version: str
    offset: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        return self.nbytes // self.type.nbytes * self.type.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """The header of a model, which may consist of several files. paths: its files. metadata: the
    values of the first file by key; a text of more than 1 MiB is an array of bytes. header_digest:
    a digest of all headers, which identifies the content of the metadata. fingerprint: a digest
    that also covers sizes and modification times, and therefore changes when a file is replaced.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]
    header_digest: str
    fingerprint: str

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def nbytes(self) -> int:
        """The total number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def get_version(status: os.stat_result) -> str:
    """Returns a string that changes whenever a file is replaced or written: its size and its
    modification time."""
    return f"{status.st_size} {status.st_mtime_ns}"


def has_magic(path: Path) -> bool:
    """Returns whether a regular file begins as a GGUF file, whatever its name. Raises OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read(path: Path) -> GGUFFile:
    """Reads the header of a model. path: the file, or any file of a model that is split into
    several. Raises GGUFError for an invalid or unsupported file, or one that cannot be read."""
    return _combine([_read_file(one) for one in _list_shards(path)])


def read_versions(path: Path) -> tuple[str, ...]:
    """Returns the versions of all files of a model, see `get_version`. Raises GGUFError for a file
    that is missing or cannot be read."""
    try:
        return tuple(get_version(os.stat(one)) for one in _list_shards(path))
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror or error}") from error


def _list_shards(path: Path) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or (count := int(match[3])) <= 1:
        return [path]
    if count > _MAX_SHARDS:
        raise _error(path, f"its name gives {count} files, more than {_MAX_SHARDS}")
    names = [f"{match[1]}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise GGUFError(
            f"{path} is one of {count} files of a model, but {path.parent} has no {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}: download all of them"
        )
    return [path.parent / name for name in names]


def read_floats(tensor: GGUFTensor) -> list[float]:
    """Reads a small float32 tensor, such as the factors of rotary frequencies. Raises GGUFError for
    any other type or more than 4,096 numbers, and if the file cannot be read."""
    if not _is_small(tensor):
        raise _error(
            tensor.path,
            f"the tensor {tensor.name} must consist of at most {_MAX_FLOATS} numbers of type F32",
        )
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.nbytes)
    except OSError as error:
        raise GGUFError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
    if len(data) != tensor.nbytes:
        raise _error(tensor.path, "it was truncated while being read")
    return list(struct.unpack(f"<{tensor.num_elements}f", data))


def copy_header(
    read: Callable[[int, int], bytes], size: int, path: Path, *, contents: Collection[str]
) -> None:
    """Writes a file with the header of a GGUF file of `size` bytes elsewhere, without the content
    of its tensors. The new file has the same size, but is sparse. read: returns a number of bytes
    at an offset, or fewer at the end. contents: tensors whose content is copied, if `read_floats`
    accepts them. Raises GGUFError, OSError, and the errors of `read`."""
    done = 0

    def read_next(count: int) -> bytes:
        nonlocal done
        data = read(done, count)
        done += len(data)
        return data

    header, data = _parse_start(path, size, "", read_next)
    with path.open("wb") as out:
        out.write(data)
        for tensor in header.tensors.values():
            if tensor.name in contents and _is_small(tensor):
                out.seek(tensor.offset)
                out.write(read(tensor.offset, tensor.nbytes))
        out.truncate(size)


def _is_small(tensor: GGUFTensor) -> bool:
    return tensor.type.name == "F32" and tensor.num_elements <= _MAX_FLOATS


def is_later_shard(path: Path) -> bool:
    """Returns whether this is the name of the second or a later file of a split model."""
    match = _SPLIT_NAME.fullmatch(path.name)
    return match is not None and int(match[2]) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]
    digest: str
    version: str


def _combine(headers: list[_Header]) -> GGUFFile:
    first = headers[0]
    declared = first.metadata.get("split.count", 1)
    if declared not in (len(headers), 0):
        raise _error(
            first.path,
            f"split.count is {declared!r}, but its name gives {len(headers)}: keep the names under "
            "which the files were downloaded (NAME-00001-of-00002.gguf)",
        )
    tensors: dict[str, GGUFTensor] = {}
    for index, header in enumerate(headers):
        if header.metadata.get("split.no", index) != index:
            raise _error(header.path, f"split.no is {header.metadata['split.no']!r}, not {index}")
        for name in header.tensors.keys() & tensors.keys():
            raise _error(header.path, f"the tensor {name} is also in {tensors[name].path.name}")
        tensors.update(header.tensors)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(headers) > 1 and total != len(tensors):
        raise _error(
            first.path, f"split.tensors.count is {total!r}, but its files have {len(tensors)}"
        )
    return GGUFFile(
        paths=tuple(header.path for header in headers),
        metadata=first.metadata,
        tensors=tensors,
        header_digest=_digest(header.digest for header in headers),
        fingerprint=_digest(f"{header.digest} {header.version}" for header in headers),
    )


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _read_file(path: Path) -> _Header:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block until it has a writer
            raise _error(path, "it is not a regular file")
        with path.open("rb") as file:
            return _parse_start(path, status.st_size, get_version(status), file.read)[0]
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse_start(
    path: Path, size: int, version: str, read: Callable[[int], bytes]
) -> tuple[_Header, bytes]:
    """Reads as much of a file as its header needs. Returns the header and all bytes that were read.
    size: of the file."""
    data, wanted = b"", _FIRST_READ_BYTES
    while True:
        data += read(wanted - len(data))
        try:
            return _Parser(path, data, size).parse(version), data
        except _NeedsMoreError as more:
            if len(data) >= size or more.end > size:
                raise _error(
                    path,
                    f"it is truncated: {more.what} needs {more.end} bytes, but the file has "
                    f"{size}; download it again",
                ) from None
            if len(data) < wanted:
                raise _error(path, "it was truncated while being read") from None
            if more.end > _MAX_HEADER_BYTES:
                raise _error(path, f"its header has more than {_MAX_HEADER_BYTES} bytes") from None
            wanted = min(max(more.end, wanted * _READ_GROWTH), _MAX_HEADER_BYTES)


class _NeedsMoreError(Exception):
    """The header continues after the bytes that were read. end: the offset of the end of the part
    that is needed next."""

    def __init__(self, what: str, end: int) -> None:
        super().__init__(what)
        self.what, self.end = what, end


class _Parser:
    """Parses the start of one file. size: the size of the file in bytes."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._view = memoryview(data)
        self._offset = 0
        self._strings = self._inner_arrays = 0

    def parse(self, version: str) -> _Header:
        self._check_magic()
        num_tensors, num_keys = self._unpack("Q", "its counts"), self._unpack("Q", "its counts")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._error(
                f"it declares {num_tensors} tensors and {num_keys} keys, more than the limits of "
                f"{_MAX_TENSORS} and {_MAX_KEYS}"
            )
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._read_name("a key", _MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"the key {key} appears twice")
            metadata[key] = self._read_value(self._unpack("I", f"the key {key}"), key)
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._read_name("the name of a tensor", _MAX_NAME_BYTES)
            if name in infos:
                raise self._error(f"the tensor {name} appears twice")
            infos[name] = self._read_tensor_info(name)
        digest = hashlib.sha256(self._view[: self._offset]).hexdigest()
        alignment = self._get_alignment(metadata)
        start = -(-self._offset // alignment) * alignment
        tensors = {
            name: self._place_tensor(name, shape, number, start + offset, alignment, version)
            for name, (shape, number, offset) in infos.items()
        }
        self._check_no_overlap(tensors.values())
        return _Header(
            path=self._path, metadata=metadata, tensors=tensors, digest=digest, version=version
        )

    def _check_magic(self) -> None:
        magic = self._data[: len(MAGIC)]
        if self._data.startswith(_LFS_POINTER):
            raise self._error("it is a Git LFS pointer: download the content (git lfs pull)")
        if magic != MAGIC:
            if not self._data:
                raise self._error("it is empty")
            raise self._error(f"it does not begin with {MAGIC!r}")
        self._offset = len(MAGIC)
        version = self._unpack("I", "its version")
        if version in _VERSIONS:
            return
        if version and version & 0xFFFF == 0:
            raise self._error("it is big-endian, which is not supported: convert the model again")
        raise self._error(
            f"its version is {version}, but versions {_VERSIONS[0]} and {_VERSIONS[1]} are "
            "supported: convert the model again or download a newer file"
        )

    def _read_value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            raw = self._take_string(f"the value of {key}")
            if len(raw) > _MAX_TEXT_BYTES:
                return Array(kind="u8", count=len(raw), data=raw)
            return bytes(raw).decode(errors="replace")
        if kind == _ARRAY:
            return self._read_array(key, depth=1)
        if kind not in _SCALARS:
            raise self._error(f"the value of {key} has the unknown type {kind}")
        value = self._unpack(_SCALARS[kind][1], f"the value of {key}")
        return bool(value) if kind == _BOOL else value

    def _read_array(self, key: str, depth: int) -> Array:
        what = f"the value of {key}"
        kind, count = self._unpack("I", what), self._unpack("Q", what)
        start = self._offset
        if kind == _STRING:
            self._strings += count
            if self._strings > _MAX_STRINGS:
                raise self._error(f"{what} has more than {_MAX_STRINGS} strings")
            self._require(8 * count, what)
            self._skip_strings(count, what)
            name = "string"
        elif kind == _ARRAY:
            self._inner_arrays += count
            if depth >= _MAX_DEPTH or self._inner_arrays > _MAX_INNER_ARRAYS:
                raise self._error(f"{what} is nested too deeply or too large")
            for _ in range(count):
                self._read_array(key, depth + 1)
            name = "array"
        elif kind in _SCALARS:
            name, _, nbytes = _SCALARS[kind]
            self._require(nbytes * count, what)
            self._offset += nbytes * count
        else:
            raise self._error(f"{what} is an array of the unknown type {kind}")
        return Array(kind=name, count=count, data=self._view[start : self._offset])

    def _skip_strings(self, count: int, what: str) -> None:
        """Moves past `count` strings, in a tight loop because vocabularies are large."""
        data, offset, end, unpack = self._data, self._offset, len(self._data), _LENGTH.unpack_from
        for _ in range(count):
            if offset + 8 > end:
                raise _NeedsMoreError(what, offset + 8)
            offset += 8 + unpack(data, offset)[0]
        if offset > end:
            raise _NeedsMoreError(what, offset)
        self._offset = offset

    def _read_tensor_info(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Returns the shape, the number of the type and the offset within the data."""
        what = f"the tensor {name}"
        num_dimensions = self._unpack("I", what)
        if not 1 <= num_dimensions <= _MAX_NUM_DIMENSIONS:
            raise self._error(f"{what} has {num_dimensions} dimensions")
        shape = tuple(self._unpack("Q", what) for _ in range(num_dimensions))[::-1]
        if not all(1 <= size <= _MAX_DIMENSION for size in shape):
            raise self._error(f"{what} has the invalid shape {list(shape)}")
        return shape, self._unpack("I", what), self._unpack("Q", what)

    def _place_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        number: int,
        offset: int,
        alignment: int,
        version: str,
    ) -> GGUFTensor:
        kind = GGML_TYPES.get(number)
        if kind is None:
            known = UNSUPPORTED_TYPES.get(number)
            label = f"the type {known}" if known else f"the unknown type {number}"
            supported = ", ".join(kind.name for kind in GGML_TYPES.values())
            raise UnsupportedError(
                f"{self._path}: the tensor {name} has {label}, which is not supported: use a file "
                f"with other types ({supported})"
            )
        if shape[-1] % kind.elements:
            raise self._error(
                f"the tensor {name} has rows of {shape[-1]}, not a multiple of the "
                f"{kind.elements} elements of a {kind.name} block"
            )
        count = 1
        for size in shape:
            count *= size
        nbytes = count // kind.elements * kind.nbytes
        if offset % alignment:
            raise self._error(f"the data of the tensor {name} is not aligned to {alignment} bytes")
        if offset + nbytes > self._size:
            raise self._error(
                f"it is truncated: the tensor {name} ends at byte {offset + nbytes}, but the file "
                f"has {self._size} bytes; download it again"
            )
        return GGUFTensor(
            name=name,
            shape=shape,
            type=kind,
            path=self._path,
            file_version=version,
            offset=offset,
            nbytes=nbytes,
        )

    def _check_no_overlap(self, tensors: Iterable[GGUFTensor]) -> None:
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._error(f"the data of the tensor {tensor.name} overlaps another tensor")
            end = tensor.offset + tensor.nbytes

    def _get_alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if (
            not isinstance(value, int)
            or not 0 < value <= _MAX_ALIGNMENT
            or value & (value - 1)
            or isinstance(value, bool)
        ):
            raise self._error(f"{_ALIGNMENT_KEY} is {value!r}, but must be a power of two")
        return value

    def _read_name(self, what: str, limit: int) -> str:
        raw = bytes(self._take_string(what, limit))
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = ""
        if not name or not name.isprintable():  # names appear in messages and logs
            raise self._error(f"{what} is {raw[:40]!r}, which is not a name")
        return name

    def _take_string(self, what: str, limit: int | None = None) -> memoryview:
        length = self._unpack("Q", what)
        if limit is not None and length > limit:
            raise self._error(f"{what} has {length} bytes, more than {limit}")
        self._require(length, what)
        start = self._offset
        self._offset += length
        return self._view[start : self._offset]

    def _unpack(self, code: str, what: str) -> int:
        nbytes = struct.calcsize(code)
        self._require(nbytes, what)
        (value,) = struct.unpack_from(f"<{code}", self._data, self._offset)
        self._offset += nbytes
        return value

    def _require(self, nbytes: int, what: str) -> None:
        """Raises _NeedsMoreError unless the next `nbytes` bytes were read."""
        if self._offset + nbytes > len(self._data):
            raise _NeedsMoreError(what, self._offset + nbytes)

    def _error(self, why: str) -> GGUFError:
        return _error(self._path, why)


def _error(path: Path, why: str) -> GGUFError:
    return GGUFError(f"{path} is not a usable GGUF file: {why}")
