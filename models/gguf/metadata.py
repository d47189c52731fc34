"""Typed access to the keys of a GGUF file.

Knows: key names with the name of the architecture as prefix. Must not know: the meaning of keys.
"""

import math
import struct
from typing import Any

from models.gguf.reader import Array, GGUFError, GGUFFile

_ARCHITECTURE = "general.architecture"

# numbers of layers, heads, widths and tokens are far below
_MAX_INTEGER = 1 << 31


class Metadata:
    """The keys of one file. Methods take names without the prefix of the architecture: `integer(
    "block_count")` reads `llama.block_count`. They raise GGUFError, which names file and key, for a
    value of the wrong type, and for a missing value without a default."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get(_ARCHITECTURE)
        if not isinstance(architecture, str) or not architecture:
            raise GGUFError(f"{file.path} lacks {_ARCHITECTURE}: it is not a language model")
        self.architecture = architecture

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.file.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not _is_integer(value):
            raise self._error(name, value, "an integer from 0 to 2147483648")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a finite number. The decimal number with the fewest digits that has the same
        float32 value is returned, as it is in config.json."""
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._error(name, value, "a finite number")
        return _shorten_float32(float(value))

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._error(name, value, "a string")
        return value

    def integers(self, name: str, count: int, default: int | None = None) -> list[int]:
        """Returns one integer per layer. A single integer applies to all layers."""
        value = self._get(name, default)
        numbers: list[Any] = [value] * count
        if isinstance(value, Array):
            is_numeric = value.kind not in ("string", "array")
            numbers = list(value.numbers(count)) if is_numeric else []
        if len(numbers) >= count and all(map(_is_integer, numbers)):
            return numbers
        raise self._error(name, value, f"an integer or {count} integers")

    def numbers(self, name: str, count: int) -> list[float]:
        """Returns finite numbers, each as `number` does."""
        value = self._get(name, None)
        if isinstance(value, Array) and value.kind in ("f32", "f64") and value.count >= count:
            found = list(value.numbers(count))
            if all(map(math.isfinite, found)):
                return [_shorten_float32(number) for number in found]
        raise self._error(name, value, f"{count} finite numbers")

    def flags(self, name: str, count: int) -> list[bool]:
        """Returns true or false for each layer."""
        value = self._get(name, None)
        if isinstance(value, Array) and value.kind == "bool" and value.count >= count:
            return [bool(flag) for flag in value.numbers(count)]
        raise self._error(name, value, f"true or false for each of {count} layers")

    def uniform_integer(self, name: str, count: int, default: int | None = None) -> int:
        """Returns the integer that applies to all layers. If there are several, zeros, which mark
        layers without such a part, are ignored."""
        found = {number for number in self.integers(name, count, default) if number}
        if len(found) > 1:
            raise GGUFError(
                f"{self.file.path}: layers with different {self.architecture}.{name} "
                f"({', '.join(map(str, sorted(found)))}) are not supported"
            )
        return found.pop() if found else 0

    def _get(self, name: str, default: Any) -> Any:
        key = f"{self.architecture}.{name}"
        value: Any = self.file.metadata.get(key, default)
        if value is None:
            raise GGUFError(f"{self.file.path} lacks the key {key}")
        return value

    def _error(self, name: str, value: Any, expected: str) -> GGUFError:
        text = f"an array of {value.count}" if isinstance(value, Array) else repr(value)[:80]
        return GGUFError(
            f"{self.file.path}: the key {self.architecture}.{name} is {text}, but must be "
            f"{expected}"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INTEGER


def _shorten_float32(value: float) -> float:
    """Returns 1e-05 for 9.999999747378752e-06, the float32 number next to it."""
    try:
        wanted = struct.pack("<f", value)
        for digits in range(1, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == wanted:
                return short
    except OverflowError:  # a float64 that no float32 can represent
        pass
    return value
