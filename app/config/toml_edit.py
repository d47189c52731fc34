"""Writes the defaults of a model into the configuration file, and keeps all other lines of it.

Knows: the lines of a TOML file. Must not know: the meaning of a value, when defaults change.

The file belongs to the operator, with comments, an order and spellings such as "8K". Only the lines
of changed keys are replaced. TOML's own parser finds the lines: a line begins a table or a key if
the lines before it are complete. The result is parsed again before it is written.
"""

import errno
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.config.options import Option, list_default_values
from app.config.value_types import InvalidOptionValue
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelDefaults

_ANY_TABLE = re.compile(r"\s*\[")
_DEFAULTS_TABLE = re.compile(r"\s*\[\[\s*[\"']?defaults[\"']?\s*\]\]")
_KEY = re.compile(r"\s*[\w\"'-]+\s*=")

# a file that is a mount point, or is in a folder that cannot be written, is written in place
_NOT_REPLACEABLE = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)


class ConfigFile:
    """The configuration file of a running server."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def save_defaults(self, defaults: ModelDefaults) -> None:
        """Writes the defaults of one model. Raises AppError(INVALID) if the file cannot be read,
        edited or written; it is then unchanged."""
        try:
            path = self._path.resolve()
            before = path.read_bytes().decode()
            after = edit_defaults(before, defaults)
            if after != before:
                _write(path, after.encode())
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise _edit_error(f"cannot be written: {why}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise _edit_error(f"is not valid TOML: {error}") from error


def edit_defaults(text: str, defaults: ModelDefaults) -> str:
    """Returns the text of a file with these defaults of a model, and no others for it. Raises
    AppError(INVALID) for a file that can only be edited by hand, and TOMLDecodeError."""
    document = tomllib.loads(text)
    # lines are separated by \n only; the \r of a file from Windows is part of each line
    lines = text.split("\n")
    tables: list[Mapping[str, Any]] = document.get("defaults", [])
    starts = _find_tables(lines)
    own = [start for start in starts if _DEFAULTS_TABLE.match(lines[start])]
    index = next((n for n, table in enumerate(tables) if table.get("name") == defaults.name), None)
    if len(own) != len(tables):
        raise _edit_error("can only be edited by hand: write the defaults as [[defaults]] tables")
    if index is None:
        edited = lines if defaults.is_empty else _append_table(lines, defaults)
    else:
        end = next((start for start in starts if start > own[index]), len(lines))
        table = _edit_table(lines[own[index] : end], tables[index], defaults)
        edited = [*lines[: own[index]], *table, *lines[end:]]
    result = "\n".join(edited)
    _check(document, result, index, defaults)
    return result


def _find_tables(lines: Sequence[str]) -> Sequence[int]:
    """Returns the lines that begin a table."""
    return [n for n, line in enumerate(lines) if _ANY_TABLE.match(line) and _parses(lines[:n])]


def _append_table(lines: Sequence[str], defaults: ModelDefaults) -> Sequence[str]:
    end = "\r" if any(line.endswith("\r") for line in lines) else ""
    result = list(lines)
    while result and not result[-1].strip():
        result.pop()
    added = [*([""] if result else []), "[[defaults]]"]
    added += [_format(option, value) for option, value in list_default_values(defaults)]
    if result and end:
        result[-1] = result[-1].removesuffix("\r") + end
    return [*result, *(f"{line}{end}" for line in added), ""]


def _edit_table(
    lines: Sequence[str], table: Mapping[str, Any], defaults: ModelDefaults
) -> Sequence[str]:
    """Returns the lines of a table with new values. lines: its header, its keys, and all lines
    until the next table."""
    if defaults.is_empty:
        return _remove_keys(lines[1:])
    wanted = {option.field: (option, value) for option, value in list_default_values(defaults)}
    result, last = [lines[0]], 1
    index = 1
    while index < len(lines):
        length = _key_length(lines, index)
        block = lines[index : index + length] if length else [lines[index]]
        index += len(block)
        if not length:
            result.append(block[0])
            continue
        [key] = tomllib.loads(_join(block))
        if key not in wanted:
            continue
        option, value = wanted.pop(key)
        result += (
            block if _is_equal(option, table[key], value) else [_replace(block, option, value)]
        )
        last = len(result)
    end = "\r" if lines[0].endswith("\r") else ""
    added = [f"{_format(option, value)}{end}" for option, value in wanted.values()]
    return [*result[:last], *added, *result[last:]]


def _remove_keys(lines: Sequence[str]) -> Sequence[str]:
    """Returns the comments and the empty lines."""
    result: list[str] = []
    index = 0
    while index < len(lines):
        length = _key_length(lines, index)
        if not length:
            result.append(lines[index])
        index += max(length, 1)
    return result


def _key_length(lines: Sequence[str], place: int) -> int:
    """Returns the number of lines of a key and its value; 0 if the line does not begin with a
    key."""
    if not _KEY.match(lines[place]):
        return 0
    lengths = range(1, len(lines) - place + 1)
    return next((length for length in lengths if _parses(lines[place : place + length])), 0)


def _replace(block: Sequence[str], option: Option, value: Any) -> str:
    """Returns the line of a key with a new value, the same indentation, and the comment that
    follows the value."""
    indent = block[0][: len(block[0]) - len(block[0].lstrip())]
    end = "\r" if block[-1].endswith("\r") else ""
    line = f"{indent}{_format(option, value)}"
    last = block[-1].removesuffix("\r")
    marks = [match.start() for match in re.finditer("#", last)]
    mark = next((n for n in marks if _parses([*block[:-1], last[:n]])), None)
    return f"{line}{end}" if mark is None else f"{line}  {last[mark:]}{end}"


def _format(option: Option, value: Any) -> str:
    # imported here, because only a server that changes defaults needs it
    import tomli_w

    def write(item: object) -> str:
        return tomli_w.dumps({"x": item}).removeprefix("x = ").rstrip("\n")

    given = option.value_type.to_toml(value)
    # in one line, which the library does not do
    text = f"[{', '.join(map(write, given))}]" if option.value_type.is_list else write(given)
    return f"{option.field} = {text}"


def _is_equal(option: Option, written: object, value: Any) -> bool:
    """Returns whether a file contains the value, perhaps in a different spelling."""
    try:
        return option.value_type.from_toml(written) == value
    except InvalidOptionValue:
        return False


def _parses(lines: Sequence[str]) -> bool:
    try:
        tomllib.loads(_join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def _join(lines: Sequence[str]) -> str:
    """Returns complete lines: a \\r without a \\n does not end a line."""
    return "".join(f"{line}\n" for line in lines)


def _check(
    before: Mapping[str, Any], text: str, index: int | None, defaults: ModelDefaults
) -> None:
    """Raises AppError(INVALID) unless the text is the old one except for the defaults of the
    model."""
    after = tomllib.loads(text)
    other_tables = [dict(table) for n, table in enumerate(before.get("defaults", ())) if n != index]
    remaining = [table for table in after.get("defaults", ()) if table.get("name") != defaults.name]
    own_tables = [
        table for table in after.get("defaults", ()) if table.get("name") == defaults.name
    ]
    wanted = list_default_values(defaults)
    is_written = [dict(table).keys() for table in own_tables] == (
        [] if defaults.is_empty else [{option.field for option, _ in wanted}]
    ) and all(
        _is_equal(option, own_tables[0][option.field], value)
        for option, value in wanted
        if own_tables
    )
    rest = ({**before, "defaults": None}, {**after, "defaults": None})
    if other_tables != remaining or not is_written or rest[0] != rest[1]:
        raise _edit_error("can only be edited by hand, because of its layout")


def _write(path: Path, content: bytes) -> None:
    """Replaces a file, so that no reader sees a partial file."""
    mode = path.stat().st_mode & 0o7777
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        if error.errno not in _NOT_REPLACEABLE:
            raise
        _write_in_place(path, content)
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(name)
        if error.errno not in _NOT_REPLACEABLE:
            raise
        _write_in_place(path, content)


def _write_in_place(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _edit_error(why: str) -> AppError:
    return AppError(ErrorKind.INVALID, f"the configuration file {why}")
