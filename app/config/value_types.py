"""Types of option values: text on the command line and in the environment, TOML in a file.

Knows: numbers, units, durations, addresses. Must not know: individual settings, the source of a
value.
"""

import math
import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

from app.core import units
from app.core.errors import suggest
from app.core.settings import AdapterSettings, is_adapter_name, is_host_name, is_origin

# In seconds, GiB or MiB. Larger than any practical value, but small enough for timeouts and byte
# counts.
MAX_NUMBER = 1_000_000_000


# longer values are truncated in messages
_MAX_QUOTED_LENGTH = 60

_BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class InvalidOptionValue(Exception):
    """Raised for an invalid value. The message reads "must be …, not …"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """The type and text format of an option's value.

    description: a description of valid values. metavar: the placeholder in the help text. parse:
    converts text to a value; raises ValueError. types: the TOML types accepted in a file.
    to_toml_item: converts a value to TOML. choices: all accepted words, if they form a fixed list.
    unit: the unit of the number in text and files. secret: whether messages must not quote the
    text, because it may contain a password. is_list: whether the value is a tuple of items. The
    items are separated by commas in text and form a list in a file.
    """

    description: str
    metavar: str
    parse: Callable[[str], Any]
    types: tuple[type, ...] = (str,)
    choices: tuple[str, ...] = ()
    to_toml_item: Callable[[Any], Any] = lambda value: value
    unit: str = ""
    secret: bool = False
    is_list: bool = False

    def parse_text(self, word: str) -> Any:
        """Parses text from the command line or the environment. Raises InvalidOptionValue."""
        if not self.is_list:
            return self._parse_item(word)
        return tuple(self._parse_item(part.strip()) for part in word.split(",") if part.strip())

    def from_toml(self, value: object) -> Any:
        """Converts a value parsed from TOML. Raises InvalidOptionValue."""
        if not self.is_list:
            return self._item_from_toml(value)
        if type(value) is not list:
            raise InvalidOptionValue(f"must be a list, not {_quote(value)}")
        return tuple(self._item_from_toml(item) for item in cast("list[object]", value))

    def to_toml(self, value: Any) -> Any:
        """Converts a value to TOML; the inverse of `from_toml`."""
        return (
            [self.to_toml_item(item) for item in value]
            if self.is_list
            else self.to_toml_item(value)
        )

    def _item_from_toml(self, value: object) -> Any:
        # types are compared exactly, because bool is a subclass of int, but true is not a number
        if type(value) not in self.types:
            raise self._invalid_value(_quote(value))
        return self._parse_item(str(value).lower() if type(value) is bool else str(value))

    def _parse_item(self, word: str) -> Any:
        try:
            return self.parse(word)
        except ValueError:
            raise self._invalid_value(_quote(word), suggest(word, self.choices)) from None

    def _invalid_value(self, quoted: str, suggestion: str = "") -> InvalidOptionValue:
        return InvalidOptionValue(
            f"must be {self.description}" + ("" if self.secret else f", not {quoted}{suggestion}")
        )


def integer(minimum: int, maximum: int | None = None, unit: str = "") -> ValueType:
    def parse(word: str) -> int:
        count = int(word)
        if count < minimum or (maximum is not None and count > maximum):
            raise ValueError
        return count

    bounds = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
    return ValueType(
        description=f"an integer {bounds}",
        metavar=unit.upper() or "N",
        parse=parse,
        types=(int,),
        unit=unit,
    )


def number(minimum: float, maximum: float) -> ValueType:
    def parse(word: str) -> float:
        given = float(word)
        if not minimum <= given <= maximum:
            raise ValueError
        return given

    return ValueType(
        description=f"a number from {minimum:g} to {maximum:g}",
        metavar="X",
        parse=parse,
        types=(int, float),
        to_toml_item=_integral_if_whole,
    )


def count(minimum: int, unit: str = "") -> ValueType:
    """A number of things, which may have a suffix: 8192, 8k (8000), 8K (8192). -1 may be
    the minimum."""

    def parse(word: str) -> int:
        number = -1 if word.strip() == "-1" else units.parse_count(word)
        if number is None or number < minimum:
            raise ValueError
        return number

    example = ", such as 8192, 8k (8000) or 8K (8192)" if unit == "tokens" else ""
    return ValueType(
        description=f"an integer of {minimum} or more{example}",
        metavar=unit.upper() or "N",
        parse=parse,
        types=(int, str),
        unit=unit,
    )


def size(unit: str, bytes_per_unit: int) -> ValueType:
    """A number of bytes, given in a larger unit or with its own unit (6GB, 6 GiB). bytes_per_unit:
    the size of the larger unit in bytes."""

    def parse(word: str) -> int:
        given = units.parse_bytes(word)
        amount = float(word) if given is None else given / bytes_per_unit
        if not 1 / bytes_per_unit <= amount <= MAX_NUMBER:
            raise ValueError
        return int(amount * bytes_per_unit)

    return ValueType(
        description=(
            f"a number of {unit} above 0 and at most {MAX_NUMBER:,}, or a size such as 600MB or "
            "6GiB"
        ),
        metavar=unit.upper(),
        parse=parse,
        types=(int, float, str),
        to_toml_item=lambda value: _integral_if_whole(value / bytes_per_unit),
        unit=unit,
    )


def duration(*, allow_zero: bool = False, allow_forever: bool = False) -> ValueType:
    """A duration in seconds; math.inf means forever. allow_zero: whether to accept 0.
    allow_forever: whether to accept "forever" and negative numbers, both as math.inf."""

    def parse(word: str) -> float:
        if allow_forever and word == "forever":
            return math.inf
        length = units.parse_spoken_duration(word)
        if length is None:
            length = float(word)  # a number in a form that units rejects
        if allow_forever and length < 0:
            return math.inf
        if not (0 <= length <= MAX_NUMBER) or (length == 0 and not allow_zero):
            raise ValueError
        return length

    least = "of 0 or more" if allow_zero else "above 0"
    forever = '"forever", ' if allow_forever else ""
    return ValueType(
        description=(
            f"{forever}a number of seconds {least} and at most {MAX_NUMBER:,}, "
            'or a duration such as "5m"'
        ),
        metavar="TIME",
        parse=parse,
        types=(int, float, str),
        to_toml_item=lambda value: "forever" if math.isinf(value) else _integral_if_whole(value),
        unit="s",
    )


def boolean() -> ValueType:
    def parse(word: str) -> bool:
        value = _BOOLEAN_WORDS.get(word.lower())
        if value is None:
            raise ValueError
        return value

    return ValueType(description="true or false", metavar="", parse=parse, types=(bool,))


def choice(*choices: str | int) -> ValueType:
    by_word: Mapping[str, str | int] = {str(choice): choice for choice in choices}

    def parse(word: str) -> str | int:
        if word not in by_word:
            raise ValueError
        return by_word[word]

    kinds = tuple({type(choice) for choice in choices})
    return ValueType(
        description=" or ".join(by_word),
        metavar="|".join(by_word),
        parse=parse,
        types=kinds,
        choices=tuple(by_word),
    )


def text(description: str, metavar: str) -> ValueType:
    """Any printable text that is not blank. description: a description of valid values."""

    def parse(word: str) -> str:
        if not word.strip() or not word.isprintable():
            raise ValueError
        return word

    return ValueType(description=description, metavar=metavar, parse=parse)


def names() -> ValueType:
    return replace(text("the name of a model", "NAME"), is_list=True)


def adapters() -> ValueType:
    """Named folders or files, NAME=PATH; `~` is expanded."""

    def parse(word: str) -> AdapterSettings:
        name, equals, path = word.partition("=")
        if not equals or not path or "\0" in path or not is_adapter_name(name):
            raise ValueError
        return AdapterSettings(name=name, path=os.path.expanduser(path))

    return ValueType(
        description="NAME=PATH, with a name of letters, digits, '.', '_' and '-'",
        metavar="NAME=PATH",
        parse=parse,
        to_toml_item=lambda value: f"{value.name}={value.path}",
        is_list=True,
    )


def prose() -> ValueType:
    """Non-blank text of any number of lines."""

    def parse(text: str) -> str:
        if not text.strip():
            raise ValueError
        return text

    return ValueType(description="a string that is not blank", metavar="TEXT", parse=parse)


def path() -> ValueType:
    """The path of a file; `~` is expanded. A relative path is relative to the working directory."""

    def parse(word: str) -> str:
        if not word or "\0" in word:
            raise ValueError
        return os.path.expanduser(word)

    return ValueType(description="the path of a file", metavar="FILE", parse=parse)


def origins() -> ValueType:
    def parse(word: str) -> str:
        if word != "*" and not is_origin(word):
            raise ValueError
        return word

    what = (
        "an origin as browsers send it, such as https://chat.example.org (lower case, no path, "
        "no trailing slash, no default port)"
    )
    return ValueType(description=what, metavar="ORIGIN", parse=parse, is_list=True)


def host_names() -> ValueType:
    def parse(word: str) -> str:
        if not is_host_name(word):
            raise ValueError
        return word

    what = "a host name such as llm.example.org, or .example.org for all its subdomains (no port)"
    return ValueType(description=what, metavar="NAME", parse=parse, is_list=True)


def public_hosts() -> ValueType:
    def parse(word: str) -> str:
        if not is_host_name(word) or word.startswith(".") or "." not in word:
            raise ValueError
        return word.lower()

    what = "the exact name of a host, such as images.example.org (no port, no subdomains)"
    return ValueType(description=what, metavar="HOST", parse=parse, is_list=True)


def url() -> ValueType:
    """The URL of an OpenTelemetry collector. Credentials do not belong in the URL, but in
    OpenTelemetry's own variable for headers (OTEL_EXPORTER_OTLP_HEADERS)."""

    def parse(word: str) -> str:
        parts = urlsplit(word)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError
        return word

    return ValueType(
        description="a URL such as http://localhost:4318, without a password",
        metavar="URL",
        parse=parse,
        secret=True,
    )


def _integral_if_whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _quote(value: object) -> str:
    written = repr(value) if not isinstance(value, bool) else str(value).lower()
    return written if len(written) <= _MAX_QUOTED_LENGTH else f"{written[:_MAX_QUOTED_LENGTH]}…"
