"""Reads and writes the configuration file: TOML 1.0 (toml.io), one key per setting.

Knows: the line of each key. Must not know: the other sources of settings.

    port = 8080                 the settings, without sections

    [[models]]                  then the models, each with its own settings
    name = "org/name"
    pinned = true

    [[defaults]]                and the defaults of served models
    name = "org/name"
    temperature = 0.6

If no model has its own settings, `models = ["org/name", …]` is sufficient.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from app.config.options import (
    CONFIG_VARIABLE,
    DEFAULT_OPTIONS,
    MODEL_OPTIONS,
    OPTIONS,
    Option,
    SourcedValue,
    SourcedValues,
    build_defaults,
    find_option_by_other_name,
    list_default_values,
)
from app.config.value_types import InvalidOptionValue
from app.core.errors import AppError, ErrorKind, suggest
from app.core.model_files import ModelDefaults
from app.core.settings import ModelSettings, Settings

_OPTIONS_BY_KEY = {option.field: option for option in OPTIONS}
_TABLE_OPTIONS = {
    "models": {option.field: option for option in MODEL_OPTIONS},
    "defaults": {option.field: option for option in DEFAULT_OPTIONS},
}

_TABLE_LINE = re.compile(r"\s*\[\[?\s*[\"']?([\w-]+)")
_KEY_LINE = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]")

TomlKey = tuple[str, int | None, str]
"""(name of the array of tables, or ""; index in it, or None at the top level; key, or "" for the
table itself)."""


def read_toml_file(path: str) -> SourcedValues:
    """Reads a configuration file. Raises AppError(INVALID) for an unreadable or invalid file. The
    message contains the line number if it is known."""
    # imported here to avoid the import cost if there is no file
    import tomllib

    try:
        written = Path(path).read_bytes().decode("utf-8")
        # the values are untyped; their types are checked below
        document: Mapping[str, object] = tomllib.loads(written)
    except OSError as error:
        reason = f"{error.strerror or error} (--config or {CONFIG_VARIABLE} names this file)"
        raise _config_error(_make_printable(path), reason, path) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _config_error(_make_printable(path), f"is not valid TOML: {error}", path) from None
    return _TomlReader(path, written).read(document)


class _TomlReader:
    """Converts a parsed file to settings, and tracks the line number of each key."""

    def __init__(self, path: str, text: str) -> None:
        self._path = _make_printable(path)
        self._lines = _find_key_lines(text)

    def read(self, document: Mapping[str, object]) -> SourcedValues:
        given: dict[str, SourcedValue] = {}
        for key, value in document.items():
            if key in _TABLE_OPTIONS:
                make = ModelSettings if key == "models" else _build_defaults
                tables = tuple(make(**fields) for fields in self._read_tables(key, value))
                location = self._locate((key, 0, ""), ("", None, key))
                given[key] = SourcedValue(value=tables, source=location)
            elif key in _OPTIONS_BY_KEY:
                location = self._locate(("", None, key))
                given[key] = SourcedValue(
                    value=_convert(_OPTIONS_BY_KEY[key].from_toml, value, location, key),
                    source=location,
                )
            else:
                raise self._unknown_key_error(key, value)
        return given

    def _read_tables(self, array: str, value: object) -> Iterator[Mapping[str, Any]]:
        """Yields the fields of each table of an array. A string in `models` is a name."""
        if not isinstance(value, list):
            names = ", or a list of names" if array == "models" else ""
            location = self._locate(("", None, array), (array, 0, ""))
            raise _config_error(location, f"must be [[{array}]] tables{names}", array)
        for index, item in enumerate(cast("Sequence[object]", value)):
            table = {"name": item} if isinstance(item, str) and array == "models" else item
            if not isinstance(table, dict) or "name" not in table:
                location = self._locate((array, index, ""), ("", None, array))
                table_key = _table_key(array, index)
                raise _config_error(
                    location, f"{table_key} needs a name", _table_key(array, index, "name")
                )
            yield self._read_table(array, index, cast("Mapping[str, object]", table))

    def _read_table(self, array: str, index: int, table: Mapping[str, object]) -> Mapping[str, Any]:
        fields: dict[str, Any] = {}
        options = _TABLE_OPTIONS[array]
        for key, value in table.items():
            location = self._locate((array, index, key), (array, index, ""), ("", None, array))
            table_key = _table_key(array, index, key)
            if key not in options:
                raise _config_error(
                    location,
                    f"{table_key}: unknown key"
                    + (
                        f"; it is a server setting: move it above the first [[{array}]]"
                        if key in _OPTIONS_BY_KEY
                        else _suggest(key, options)
                    ),
                    table_key,
                )
            # Option.from_toml is not used: here "default" may be the name of a model, and a missing
            # key already means the default
            fields[key] = _convert(options[key].value_type.from_toml, value, location, table_key)
        return fields

    def _unknown_key_error(self, key: str, value: object) -> AppError:
        location = self._locate(("", None, key))
        if isinstance(value, dict) and key not in _OPTIONS_BY_KEY:
            inside = [
                name for name in cast("Mapping[str, object]", value) if name in _OPTIONS_BY_KEY
            ]
            why = (
                "; settings are top-level keys, without sections"
                if inside
                else _suggest(key, _OPTIONS_BY_KEY)
            )
            return _config_error(location, f"[{key}]: unknown section{why}", key)
        near = _suggest(key, [*_OPTIONS_BY_KEY, *_TABLE_OPTIONS])
        return _config_error(location, f"{key}: unknown key{near}", key)

    def _locate(self, *keys: TomlKey) -> str:
        """Returns the path, followed by the first known line number among `keys`."""
        for key in keys:
            if line := self._lines.get(key):
                return f"{self._path}:{line}"
        return self._path


def render_toml(settings: Settings, sources: Mapping[str, str]) -> str:
    """Renders a file with every setting, including settings that equal the default.

    sources: a description of each setting's source, which is added as a comment.
    """
    # imported here, because only `mlxrunner config --toml` needs it
    import tomli_w

    def line(option: Option, value: Any) -> str:
        return tomli_w.dumps({option.field: option.to_toml(value)}).rstrip("\n")

    lines = [
        f"{line(option, getattr(settings, option.field))}  # {sources[option.field]}"
        for option in OPTIONS
    ]
    for model in settings.models:
        lines += ["", f"[[models]]  # {sources['models']}"]
        lines += [line(option, value) for option, value in iter_model_overrides(model)]
    for defaults in settings.defaults:
        lines += ["", f"[[defaults]]  # {sources['defaults']}"]
        lines += [line(option, value) for option, value in list_default_values(defaults)]
    return "\n".join(lines) + "\n"


def iter_model_overrides(model: ModelSettings) -> Iterator[tuple[Option, Any]]:
    """Yields the options of a model that differ from their defaults, with their values."""
    for option in MODEL_OPTIONS:
        value = getattr(model, option.field)
        if value != option.default:
            yield option, value


def _suggest(key: str, known: Collection[str]) -> str:
    """Suggests the key that has this name in another server, or a similar one."""
    foreign = find_option_by_other_name(key)
    if foreign is not None and foreign.field in known:
        return f"; did you mean {foreign.field}?"
    return suggest(key, known)


def _find_key_lines(text: str) -> Mapping[TomlKey, int]:
    """Returns the line number of each key. A key that seems to occur on two lines is omitted,
    because one of the lines must be part of a multi-line string."""
    numbers: dict[TomlKey, int] = {}
    doubtful: set[TomlKey] = set()
    array, index = "", None
    counts = dict.fromkeys(_TABLE_OPTIONS, -1)
    for number, line in enumerate(text.split("\n"), 1):
        if table := _TABLE_LINE.match(line):
            if table[1] in counts:
                counts[table[1]] += 1
                array, index, key = table[1], counts[table[1]], ""
            else:
                array, index, key = "", None, table[1]
        elif assigned := _KEY_LINE.match(line):
            key = assigned[1]
        else:
            continue
        if (array, index, key) in numbers:
            doubtful.add((array, index, key))
        numbers[array, index, key] = number
    return {key: number for key, number in numbers.items() if key not in doubtful}


def _convert(from_toml: Callable[[object], Any], value: object, location: str, key: str) -> Any:
    try:
        return from_toml(value)
    except InvalidOptionValue as problem:
        raise _config_error(location, f"{key}: {problem}", key) from None


def _build_defaults(**values: Any) -> ModelDefaults:
    return build_defaults(values)


def _table_key(array: str, index: int, key: str = "") -> str:
    return f"{array}[{index}]" + (f".{key}" if key else "")


def _make_printable(path: str) -> str:
    """Replaces characters that are not allowed in a line or a comment."""
    return "".join(letter if letter.isprintable() else "?" for letter in path)


def _config_error(location: str, reason: str, param: str) -> AppError:
    return AppError(ErrorKind.INVALID, f"{location}: {reason}", param=param)
