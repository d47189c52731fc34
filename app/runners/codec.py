"""Encodes plain data as JSON lines. Decoding restores the same values and types.

Knows: type annotations. Must not know: the meaning of the encoded classes.

A dataclass is encoded as a JSON object. For a union of several dataclasses, the key "is" contains
the name of the class. Infinities, bytes and paths are encoded as strings. Annotations are evaluated
once per class, when a `Codec` is created, so encoding a token takes only two calls and a dict. Both
ends run the same code, so nothing is validated.
"""

import dataclasses
import math
import os
import types
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import quote_from_bytes, unquote_to_bytes

import orjson

T = TypeVar("T")

_Convert = Callable[[Any], Any]

_TAG = "is"


class _Coder:
    """`write` converts values to JSON, and `read` converts them back. Either function is None if no
    conversion is needed."""

    __slots__ = ("read", "write")

    def __init__(self, write: _Convert | None = None, read: _Convert | None = None) -> None:
        self.write = write
        self.read = read


class Codec(Generic[T]):
    """Encodes and decodes values of one type. `kind` is a dataclass or a union of dataclasses.
    Raises TypeError for an annotation that `_CoderFactory.make` does not support."""

    def __init__(self, kind: Any) -> None:
        coder = _CoderFactory().make(kind)
        self._write, self._read = coder.write or _identity, coder.read or _identity

    def encode(self, value: T) -> bytes:
        """Returns the value as one line, without the line terminator."""
        return orjson.dumps(self._write(value))

    def decode(self, line: bytes | bytearray) -> T:
        return self._read(orjson.loads(line))


class _CoderFactory:
    """Creates coders. The coders of dataclasses are cached, because dataclasses may be
    recursive."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type, bool], _Coder] = {}

    def make(self, kind: Any) -> _Coder:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin is tuple:
            return self._tuple(arguments)
        if origin is frozenset:
            return self._frozenset(arguments[0])
        if kind in (str, int, bool, Any, type(None)) or origin in (Literal, Mapping):
            return _Coder()  # a mapping holds parsed JSON
        if kind is float:
            return _Coder(_write_float, float)
        if kind is bytes:
            return _Coder(lambda value: b64encode(value).decode("ascii"), b64decode)
        if kind is Path:
            return _Coder(_write_path, _read_path)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return _Coder(None, kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._dataclass(kind, tagged=False)
        raise TypeError(f"cannot encode {kind}")

    def _union(self, members: tuple[Any, ...]) -> _Coder:
        others = tuple(member for member in members if member is not type(None))
        if len(others) == 1:
            return _optional_coder(self.make(others[0]))
        if all(dataclasses.is_dataclass(other) for other in others):
            return _optional_coder(self._tagged(others))
        coders = [self.make(other) for other in others]
        if any(coder.write or coder.read for coder in coders):
            raise TypeError(f"cannot encode the union of {others}: its members need a tag")
        return _Coder()

    def _tagged(self, classes: tuple[type, ...]) -> _Coder:
        coders = {kind: self._dataclass(kind, tagged=True) for kind in classes}
        names = {kind.__name__: coder for kind, coder in coders.items()}

        def write(value: Any) -> Any:
            return cast(_Convert, coders[type(value)].write)(value)

        def read(value: Any) -> Any:
            return cast(_Convert, names[value.pop(_TAG)].read)(value)

        return _Coder(write, read)

    def _tuple(self, arguments: tuple[Any, ...]) -> _Coder:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return _collection_coder(self.make(arguments[0]), tuple)
        places = [self.make(argument) for argument in arguments]
        if len(places) == 2:
            return _pair_coder(*places)
        writes, reads = [place.write for place in places], [place.read for place in places]

        def read(value: Any) -> Any:
            return tuple(one(v) if one else v for one, v in zip(reads, value, strict=True))

        def write(value: Any) -> Any:
            return [one(v) if one else v for one, v in zip(writes, value, strict=True)]

        return _Coder(write if any(writes) else None, read if any(reads) else tuple)

    def _frozenset(self, member: Any) -> _Coder:
        each = _collection_coder(self.make(member), frozenset)
        return _Coder(each.write or list, each.read)

    def _dataclass(self, kind: type, *, tagged: bool) -> _Coder:
        """Returns the coder of a dataclass. An untagged dataclass without fields that need
        conversion is encoded directly by orjson."""
        if (known := self._classes.get((kind, tagged))) is not None:
            return known
        # A field may refer to this class before the coder is complete.
        made = self._classes[kind, tagged] = _Coder()
        made.write, made.read = _lazy(made, "write"), _lazy(made, "read")
        hints = get_type_hints(kind)
        fields = [field.name for field in dataclasses.fields(kind)]
        coders = {name: self.make(hints[name]) for name in fields}
        writes = [(name, coder.write) for name, coder in coders.items() if coder.write]
        reads = [(name, coder.read) for name, coder in coders.items() if coder.read]
        tag = {_TAG: kind.__name__} if tagged else {}

        def write(value: Any) -> Any:
            written = {**tag, **{name: getattr(value, name) for name in fields}}
            for name, one in writes:
                written[name] = one(written[name])
            return written

        def read(value: Any) -> Any:
            for name, one in reads:
                value[name] = one(value[name])
            return kind(**value)

        made.write, made.read = write if tagged or writes else None, read
        return made


def _lazy(coder: _Coder, direction: Literal["write", "read"]) -> _Convert:
    """Returns a function that looks up the conversion of `coder` when it is called."""

    def turn(value: Any) -> Any:
        return getattr(coder, direction)(value)

    return turn


def _optional_coder(coder: _Coder) -> _Coder:
    """Returns the coder of an optional value."""

    def optional(turn: _Convert | None) -> _Convert | None:
        return turn and (lambda value: None if value is None else turn(value))

    return _Coder(optional(coder.write), optional(coder.read))


def _pair_coder(left: _Coder, right: _Coder) -> _Coder:
    """Returns the coder of a 2-tuple. This special case is optimized, because a prompt may have
    millions of (token, logprob) pairs."""
    read_left, read_right = left.read or _identity, right.read or _identity
    write_left, write_right = left.write or _identity, right.write or _identity

    def write(value: Any) -> Any:
        return write_left(value[0]), write_right(value[1])

    def read(value: Any) -> Any:
        return read_left(value[0]), read_right(value[1])

    return _Coder(
        write if left.write or right.write else None, read if left.read or right.read else tuple
    )


def _collection_coder(coder: _Coder, collect: _Convert) -> _Coder:
    write, read = coder.write, coder.read
    return _Coder(
        write and (lambda value: [write(one) for one in value]),
        (lambda value: collect([read(one) for one in value])) if read else collect,
    )


def _identity(value: Any) -> Any:
    return value


def _write_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _write_path(path: Path) -> str:
    """Percent-encodes a path, because its bytes may not be valid UTF-8."""
    return quote_from_bytes(os.fsencode(path))


def _read_path(text: str) -> Path:
    return Path(os.fsdecode(unquote_to_bytes(text)))
