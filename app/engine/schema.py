"""JSON Schemas as documents: read, measured, brought into the words that the engine follows.

Knows: which keywords hold schemas, what each may cost. Must not know: llguidance, tokens, requests.

Whoever sends a schema may be hostile, and compiling one runs in native code that nothing can stop:
there, a long chain of references ends the process, and a large `multipleOf` takes gigabytes. So
what makes a compilation long or deep is counted before it begins.
"""

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, cast
from urllib.parse import unquote

from app.engine.pattern import MOST_REPETITIONS, repetitions

Path = tuple[str, ...]
Schema = dict[str, Any]

# characters of a schema; those of many tools come to a tenth of it
MOST_TEXT = 1 << 18
# levels of a document: what reads it in native code takes 128, and adds some
MOST_LEVELS = 100
# properties, required names, values of an enum, branches, definitions, in all. OpenAI allows 5000
# properties
MOST_ENTRIES = 5000
# Properties of one object that may be left out. Each of them may come next, so with 2000 of them
# and 151,669 tokens a step of the answer takes 0.1 s, in which no other answer of the model goes
# on, and compiling takes 0.5 s; with 5000, 0.5 s and 3 s. The time grows faster than the number.
MOST_OPTIONAL = 2000
# the least common multiple of what numbers must be multiples of, as integers: a table has so many
# rows. 100,000 take 0.3 s and 20 MB
MOST_MULTIPLES = 100_000

_ONE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")


class Refused(Exception):
    """A grammar that cannot be followed. reason: a clause. path: the keyword, from where the
    grammar stood."""

    def __init__(self, reason: str, path: Path = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path


def read(text: str) -> Schema:
    """The document, within all limits. Raises Refused."""
    if len(text) > MOST_TEXT:
        raise Refused(f"it is longer than {MOST_TEXT} characters")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise Refused(_TOO_DEEP) from None
    except ValueError as error:
        raise Refused(f"it is not valid JSON: {error}") from error
    return checked(value)


def checked(value: Any) -> Schema:
    """The parsed document, within all limits. Raises Refused."""
    _check_levels(value)
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise Refused("a schema must be a JSON object")
    document = cast(Schema, value)
    _check_costs(document)
    return document


def evaluated(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas directly in this one that an instance may be held to, with their paths in it."""
    if not isinstance(schema, dict):
        return
    held = cast(Mapping[str, Any], schema)
    for key in _ONE:
        if isinstance(held.get(key), (dict, bool)):
            yield (key,), held[key]
    for key in _LISTS:
        if isinstance(held.get(key), list):
            yield from (((key, str(i)), each) for i, each in enumerate(held[key]))
    for key in _MAPS:
        if isinstance(held.get(key), dict):
            yield from (((key, name), each) for name, each in held[key].items())


def at(document: Any, pointer: str) -> tuple[Path, Any] | None:
    """What a reference within the document (`#/…`) points to; None for any other."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    path = tuple(
        part.replace("~1", "/").replace("~0", "~") for part in unquote(pointer).split("/")
    )[1:]
    for name in path:
        if isinstance(document, dict) and name in document:
            document = cast(Schema, document)[name]
        elif isinstance(document, list) and name.isdecimal() and int(name) < len(document):  # pyright: ignore[reportUnknownArgumentType]
            document = cast(list[Any], document)[int(name)]
        else:
            return None
    return path, document


def everywhere(document: Schema) -> Iterator[tuple[Path, Schema]]:
    """Every schema of the document, definitions too, with its path."""
    todo: list[tuple[Path, Any]] = [((), document)]
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        held = cast(Schema, schema)
        yield path, held
        todo += [((*path, *below), each) for below, each in evaluated(held)]
        for key in _DEFINITIONS:
            if isinstance(held.get(key), dict):
                todo += [((*path, key, name), each) for name, each in held[key].items()]


_TOO_DEEP = f"it is nested deeper than {MOST_LEVELS} levels"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_levels(value: Any) -> None:
    """Without recursion, so that it ends whatever it is given."""
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        each, level = todo.pop()
        if level > MOST_LEVELS:
            raise Refused(_TOO_DEEP)
        if isinstance(each, float) and not math.isfinite(each):
            raise Refused("it contains a number that is too large")
        if isinstance(each, dict):
            todo += [(below, level + 1) for below in cast(Schema, each).values()]
        elif isinstance(each, list):
            todo += [(below, level + 1) for below in cast(list[Any], each)]


def _check_costs(document: Schema) -> None:
    entries, multiple = 0, 1
    for path, schema in everywhere(document):
        for key in (*_LISTS, *_MAPS, *_DEFINITIONS, "required", "enum"):
            if isinstance(schema.get(key), (dict, list)):
                entries += len(schema[key])
        if entries > MOST_ENTRIES:
            raise Refused(f"it has more than {MOST_ENTRIES} properties, values and branches", path)
        if _optional(schema) > MOST_OPTIONAL:
            reason = (
                f"one object has more than {MOST_OPTIONAL} optional properties: make some "
                "required, "
                "or move some to nested objects"
            )
            raise Refused(reason, (*path, "properties") if "properties" in schema else path)
        multiple = math.lcm(multiple, _numerator(schema.get("multipleOf")))
        if multiple > MOST_MULTIPLES:
            reason = (
                f"its multipleOf values need a table of more than {MOST_MULTIPLES} "
                "rows: use fewer digits"
            )
            raise Refused(reason, (*path, "multipleOf"))
        _check_patterns(path, schema)
        _check_count(path, schema)


def _optional(schema: Any, depth: int = 0) -> int:
    """Properties that an object may leave out, as far as this schema and what it is combined with
    by allOf say; references are not followed."""
    if not isinstance(schema, dict) or depth > MOST_LEVELS:
        return 0
    held = cast(Schema, schema)
    properties, required, combined = (held.get(key) for key in ("properties", "required", "allOf"))
    names = set(cast(Schema, properties)) if isinstance(properties, dict) else set[str]()
    if isinstance(required, list):
        names -= {name for name in cast(list[Any], required) if isinstance(name, str)}
    branches = cast(list[Any], combined) if isinstance(combined, list) else []
    return len(names) + sum(_optional(branch, depth + 1) for branch in branches)


def _numerator(multiple: Any) -> int:
    """The integer that a multiple of this is a multiple of, once the point is left out."""
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)):
        return 1
    # what is wrong with zero is said better where it is compiled
    return abs(Fraction(str(multiple)).numerator) or 1


def _check_patterns(path: Path, schema: Schema) -> None:
    named: list[tuple[Path, Any]] = [(("pattern",), schema.get("pattern"))]
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        names = cast(Schema, patterns)
        named += [(("patternProperties", name), name) for name in names]
    for below, pattern in named:
        if isinstance(pattern, str) and repetitions(pattern) > MOST_REPETITIONS:
            reason = f"it has more than {MOST_REPETITIONS} repetitions"
            raise Refused(reason, (*path, *below))


def _check_count(path: Path, schema: Schema) -> None:
    """Names that the schema does not list may be written twice, which makes them one. So only one
    of them can be counted on, behind those that are required."""
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, bool) or not isinstance(least, int):
        return
    certain = len(set(map(str, cast(list[Any], required)))) if isinstance(required, list) else 0
    if least > certain + 1:
        reason = f"it can be at most one more than the number of required properties, {certain}"
        raise Refused(reason, (*path, "minProperties"))
