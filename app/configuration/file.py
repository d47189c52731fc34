"""A configuration file, read and written: TOML 1.0 (toml.io), one key for each setting.

Knows: where in the file a key stands. Must not know: the other sources.

    port = 8080                 the settings, without sections

    [[models]]                  then the models, each with what holds for it alone
    name = "org/name"
    pinned = true

Where there is nothing to say of the models, `models = ["org/name", …]` does.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from app.configuration.forms import Misread, nearest
from app.configuration.option import Option
from app.configuration.options import MODEL_OPTIONS, OPTIONS
from app.configuration.sources import Found, Given
from app.core.errors import AppError, Kind
from app.core.settings import ModelSettings, Settings

_TOP = {option.field: option for option in OPTIONS}
_OF_A_MODEL = {option.field: option for option in MODEL_OPTIONS}

_TABLE = re.compile(r"\s*\[\[?\s*[\"']?([\w-]+)")
_KEY = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]")

Key = tuple[int | None, str]
"""A model's place among the models, None at the top; and a key there, "" for the table itself."""


def from_file(path: str) -> Given:
    """Raises AppError(INVALID) for a file that cannot be read, with the line where it is known."""
    # only who has a file pays for it
    import tomllib

    try:
        written = Path(path).read_bytes().decode("utf-8")
        # a document's values, whose types are looked at one by one
        document: Mapping[str, object] = tomllib.loads(written)
    except OSError as error:
        raise _refused(_shown(path), error.strerror or str(error), path) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _refused(_shown(path), f"is not valid TOML: {error}", path) from None
    return _Reader(path, written).read(document)


class _Reader:
    """One file, of which the places are known."""

    def __init__(self, path: str, written: str) -> None:
        self._path = _shown(path)
        self._lines = _lines(written)

    def read(self, document: Mapping[str, object]) -> Given:
        given: dict[str, Found] = {}
        for key, value in document.items():
            if key == "models":
                models = tuple(self._models(value))
                given[key] = Found(value=models, place=self._place(_first(self._lines)))
            elif key in _TOP:
                place = self._place((None, key))
                given[key] = Found(value=_taken(_TOP[key].take, value, place, key), place=place)
            else:
                raise self._unknown(key, value)
        return given

    def _models(self, value: object) -> Iterator[ModelSettings]:
        if not isinstance(value, list):
            wanted = "must be [[models]] tables, or a list of names"
            raise _refused(self._place((None, "models"), (0, "")), wanted, "models")
        for index, item in enumerate(cast("Sequence[object]", value)):
            table = {"name": item} if isinstance(item, str) else item
            if not isinstance(table, dict) or "name" not in table:
                place = self._place((index, ""), (None, "models"))
                raise _refused(place, f"{_path(index)} needs a name", _path(index, "name"))
            yield self._model(index, cast("Mapping[str, object]", table))

    def _model(self, index: int, table: Mapping[str, object]) -> ModelSettings:
        fields: dict[str, Any] = {}
        for key, value in table.items():
            place = self._place((index, key), (index, ""), (None, "models"))
            if key not in _OF_A_MODEL:
                raise _refused(
                    place,
                    f"{_path(index, key)}: unknown key"
                    + (
                        "; it is a server setting: move it above the first [[models]]"
                        if key in _TOP
                        else nearest(key, _OF_A_MODEL)
                    ),
                    _path(index, key),
                )
            # a model may well be called "default", and what is not said of it needs no word
            take = _OF_A_MODEL[key].form.take
            fields[key] = _taken(take, value, place, _path(index, key))
        return ModelSettings(**fields)

    def _unknown(self, key: str, value: object) -> AppError:
        place = self._place((None, key))
        if isinstance(value, dict) and key not in _TOP:
            inside = [known for known in cast("Mapping[str, object]", value) if known in _TOP]
            why = (
                "; settings are top-level keys, without sections" if inside else nearest(key, _TOP)
            )
            return _refused(place, f"[{key}]: unknown section{why}", key)
        near = nearest(key, [*_TOP, "models"])
        return _refused(place, f"{key}: unknown key{near}", key)

    def _place(self, *keys: Key) -> str:
        """The line of the first of `keys` that has one."""
        for key in keys:
            if line := self._lines.get(key):
                return f"{self._path}:{line}"
        return self._path


def written(settings: Settings, places: Mapping[str, str]) -> str:
    """A file that says what `settings` do, however little of it differs from the defaults.
    places: where each was said, for comments."""
    # only `mlxrunner config --toml` needs it
    import tomli_w

    def line(option: Option, value: Any) -> str:
        return tomli_w.dumps({option.field: option.give(value)}).rstrip("\n")

    lines = [
        f"{line(option, getattr(settings, option.field))}  # {places[option.field]}"
        for option in OPTIONS
    ]
    for model in settings.models:
        lines += ["", f"[[models]]  # {places['models']}"]
        lines += [line(option, value) for option, value in said(model)]
    return "\n".join(lines) + "\n"


def said(model: ModelSettings) -> Iterator[tuple[Option, Any]]:
    """What is said of it beyond what holds for all."""
    for option in MODEL_OPTIONS:
        value = getattr(model, option.field)
        if value != option.default:
            yield option, value


def _lines(written: str) -> Mapping[Key, int]:
    """Where each key stands. Two lines that look like one key are none: one of them is part of a
    text."""
    found: dict[Key, int] = {}
    doubtful: set[Key] = set()
    index, models = None, -1
    for number, line in enumerate(written.split("\n"), 1):
        if table := _TABLE.match(line):
            if table[1] == "models":
                models += 1
                index, key = models, ""
            else:
                index, key = None, table[1]
        elif assigned := _KEY.match(line):
            key = assigned[1]
        else:
            continue
        if (index, key) in found:
            doubtful.add((index, key))
        found[index, key] = number
    return {key: number for key, number in found.items() if key not in doubtful}


def _taken(take: Callable[[object], Any], value: object, place: str, key: str) -> Any:
    try:
        return take(value)
    except Misread as problem:
        raise _refused(place, f"{key}: {problem}", key) from None


def _first(lines: Mapping[Key, int]) -> Key:
    """Where models begin."""
    return (0, "") if (0, "") in lines else (None, "models")


def _path(index: int, key: str = "") -> str:
    return f"models[{index}]" + (f".{key}" if key else "")


def _shown(path: str) -> str:
    """As it may stand in one line, and in a comment."""
    return "".join(letter if letter.isprintable() else "?" for letter in path)


def _refused(place: str, why: str, param: str) -> AppError:
    return AppError(Kind.INVALID, f"{place}: {why}", param=param)
