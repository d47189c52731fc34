"""How values are written: as words on the command line and in the environment, as TOML in a file.

Knows: numbers, units, durations, addresses. Must not know: which setting is which, where a word
came from.
"""

import difflib
import math
import os.path
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from app.core import durations
from app.core.settings import is_host_name, is_origin

# seconds, GiB, MiB: more than there is, and little enough to be counted in bytes and waited for
MOST = 1_000_000_000

# a longer word is cut where it is told
_TOLD = 60

_SWITCH = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class Misread(Exception):
    """A value that is not written as it has to be: "must be …, not …"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to write values.

    what: what a value has to be, in words. metavar: what stands for it in help. parse: a word to a
    value; raises ValueError. types: of TOML, that may stand in a file. write: a value to what
    stands in a file. words: every word that is accepted, where they are a fixed list. unit: of the
    number that is written. private: a word is never told again, for
    it may hold a password. many: a value is several of those, in a tuple: between commas in a word,
    in a list in a file."""

    what: str
    metavar: str
    parse: Callable[[str], Any]
    types: tuple[type, ...] = (str,)
    words: tuple[str, ...] = ()
    write: Callable[[Any], Any] = lambda value: value
    unit: str = ""
    private: bool = False
    many: bool = False

    def read(self, word: str) -> Any:
        """Raises Misread."""
        if not self.many:
            return self._one(word)
        return tuple(self._one(part.strip()) for part in word.split(",") if part.strip())

    def take(self, value: object) -> Any:
        """What TOML means by `value`. Raises Misread."""
        if not self.many:
            return self._taken(value)
        if type(value) is not list:
            raise Misread(f"must be a list, not {_told(value)}")
        return tuple(self._taken(item) for item in cast("list[object]", value))

    def give(self, value: Any) -> Any:
        """What `take` takes for `value`."""
        return [self.write(item) for item in value] if self.many else self.write(value)

    def _taken(self, value: object) -> Any:
        # exactly: true is no number, though Python counts with it
        if type(value) not in self.types:
            raise self._misread(_told(value))
        return self._one(str(value).lower() if type(value) is bool else str(value))

    def _one(self, word: str) -> Any:
        try:
            return self.parse(word)
        except ValueError:
            raise self._misread(_told(word), nearest(word, self.words)) from None

    def _misread(self, told: str, near: str = "") -> Misread:
        return Misread(f"must be {self.what}" + ("" if self.private else f", not {told}{near}"))


def whole(least: int, most: int | None = None, unit: str = "") -> Form:
    def parse(word: str) -> int:
        count = int(word)
        if count < least or (most is not None and count > most):
            raise ValueError
        return count

    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    return Form(
        what=f"a whole number {bounds}",
        metavar=unit.upper() or "N",
        parse=parse,
        types=(int,),
        unit=unit,
    )


def size(unit: str, in_bytes: int) -> Form:
    """Bytes, written in a larger unit."""

    def parse(word: str) -> int:
        amount = float(word)
        if not 1 / in_bytes <= amount <= MOST:
            raise ValueError
        return int(amount * in_bytes)

    return Form(
        what=f"a number of {unit} above 0 and at most {MOST:,}",
        metavar=unit.upper(),
        parse=parse,
        types=(int, float),
        write=lambda value: _plain(value / in_bytes),
        unit=unit,
    )


def time(*, zero: bool = False, forever: bool = False) -> Form:
    """Seconds, math.inf for ever. zero: none at all may be asked for."""

    def parse(word: str) -> float:
        if forever and word == "forever":
            return math.inf
        length = durations.seconds(word)
        if length is None:
            length = float(word)  # more digits than people write
        if forever and length < 0:
            return math.inf
        if not (0 <= length <= MOST) or (length == 0 and not zero):
            raise ValueError
        return length

    least = "of 0 or more" if zero else "above 0"
    words = '"forever", ' if forever else ""
    return Form(
        what=f'{words}a number of seconds {least} and at most {MOST:,}, or a duration such as "5m"',
        metavar="TIME",
        parse=parse,
        types=(int, float, str),
        write=lambda value: "forever" if math.isinf(value) else _plain(value),
        unit="s",
    )


def switch() -> Form:
    def parse(word: str) -> bool:
        known = _SWITCH.get(word.lower())
        if known is None:
            raise ValueError
        return known

    return Form(what="true or false", metavar="", parse=parse, types=(bool,))


def choice(*choices: str | int) -> Form:
    by_word: Mapping[str, str | int] = {str(choice): choice for choice in choices}

    def parse(word: str) -> str | int:
        if word not in by_word:
            raise ValueError
        return by_word[word]

    kinds = tuple({type(choice) for choice in choices})
    return Form(
        what=" or ".join(by_word),
        metavar="|".join(by_word),
        parse=parse,
        types=kinds,
        words=tuple(by_word),
    )


def text(what: str, metavar: str) -> Form:
    """Anything that can be seen. what: of such texts."""

    def parse(word: str) -> str:
        if not word.strip() or not word.isprintable():
            raise ValueError
        return word

    return Form(what=what, metavar=metavar, parse=parse)


def path() -> Form:
    """Relative ones start where the command was started."""

    def parse(word: str) -> str:
        if not word or "\0" in word:
            raise ValueError
        return os.path.expanduser(word)

    return Form(what="the path of a file", metavar="FILE", parse=parse)


def origins() -> Form:
    def parse(word: str) -> str:
        if word != "*" and not is_origin(word):
            raise ValueError
        return word

    what = (
        "an origin as browsers send it, such as https://chat.example.org (lower case, no path, "
        "no trailing slash, no default port)"
    )
    return Form(what=what, metavar="ORIGIN", parse=parse, many=True)


def host_names() -> Form:
    def parse(word: str) -> str:
        if not is_host_name(word):
            raise ValueError
        return word

    what = "a host name such as llm.example.org, or .example.org for all its subdomains (no port)"
    return Form(what=what, metavar="NAME", parse=parse, many=True)


def address() -> Form:
    """Of a collector; who needs a password for it has the standard's own variable for headers."""

    def parse(word: str) -> str:
        parts = urlsplit(word)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError
        return word

    return Form(
        what="a URL such as http://localhost:4318, without a password",
        metavar="URL",
        parse=parse,
        private=True,
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?", or nothing where nothing known looks like `word`."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _told(value: object) -> str:
    written = repr(value) if not isinstance(value, bool) else str(value).lower()
    return written if len(written) <= _TOLD else f"{written[:_TOLD]}…"
