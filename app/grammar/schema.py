"""Parses JSON Schemas and limits the cost of their compilation.

Knows: the keywords that contain schemas, the cost limits of keywords. Must not know: llguidance,
tokens, requests.

Schemas are untrusted, and are compiled by native code that cannot be interrupted. A long chain of
references would crash the process, and a large `multipleOf` would take gigabytes of memory.
Therefore, everything that makes a compilation slow or deeply nested is limited before the
compilation starts, including bounded repetitions in regular expressions (`count_repetitions`).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, cast
from urllib.parse import unquote

# This number of repetitions takes 10 ms for each token. With ten times as many, native code fails
# in the middle of an output, because the grammar is too complex.
MAX_REPETITIONS = 10_000

_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(|\)|\{(\d*)(,?)(\d*)\}", re.DOTALL)

# The maximum number of characters of a schema. The schemas of many tools take 10 % of it.
MAX_SCHEMA_LENGTH = 1 << 18
# The maximum nesting depth of a document. The native parser allows 128 levels, including some that
# it adds itself.
MAX_LEVELS = 100
# The maximum number of properties, required names, enum values, branches and definitions in total.
# OpenAI allows 5000 properties.
MAX_ENTRIES = 5000
# The maximum number of optional properties of one object, any of which may come next. With 2000
# properties and 151,669 tokens, a step takes 0.1 s, which delays all other outputs of the model,
# and compilation takes 0.5 s. With 5000 properties, a step takes 0.5 s and compilation takes 3 s.
# The time grows faster than linearly.
MAX_OPTIONAL_PROPERTIES = 2000
# The maximum least common multiple of all `multipleOf` values as integers. It determines the number
# of rows of a table; 100,000 rows take 0.3 s and 20 MB.
MAX_MULTIPLE = 100_000

_SCHEMA_KEYWORDS = (
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
_SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "dependentSchemas")
_DEFINITION_KEYWORDS = ("$defs", "definitions")

_TOO_DEEP = f"it is nested deeper than {MAX_LEVELS} levels"


def count_repetitions(pattern: str) -> int:
    """Returns the largest product of nested bounded repetitions, which is 15 for `((ab){3}c){5}`.
    `{3,5}` and `{,5}` count as 5, and `{3,}` counts as 3. `*` and `+` do not count."""
    # the product within each open group, and the product of the last group or item
    groups, last, largest, end = [1], 1, 1, 0
    for part in _REGEX_PARTS.finditer(pattern):
        if part.start() > end:
            last = 1
        end = part.end()
        match part[0][0]:
            case "(":
                groups.append(1)
                continue
            case ")" if len(groups) > 1:
                last = groups.pop()
            case "{":
                count = part[3] or part[1]
                # a number of nine digits is larger than any limit
                last *= max(1, int(count[:9] or 0))
            case _:
                last = 1
                continue
        groups[-1] = max(groups[-1], last)
        largest = max(largest, last)
    return largest


SchemaPath = tuple[str, ...]
Schema = dict[str, Any]


class UnsupportedGrammarError(Exception):
    """An invalid or unsupported grammar. reason: a clause. path: the path of the keyword, relative
    to the grammar."""

    def __init__(self, reason: str, path: SchemaPath = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path


def parse_schema(text: str) -> Schema:
    """Parses a document and checks all limits. Raises UnsupportedGrammarError."""
    if len(text) > MAX_SCHEMA_LENGTH:
        raise UnsupportedGrammarError(f"it is longer than {MAX_SCHEMA_LENGTH} characters")
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise UnsupportedGrammarError(_TOO_DEEP) from None
    except ValueError as error:
        raise UnsupportedGrammarError(f"it is not valid JSON: {error}") from error
    return check_schema(value)


def check_schema(value: Any) -> Schema:
    """Checks all limits of a parsed document, and returns the document. Raises
    UnsupportedGrammarError."""
    _check_levels(value)
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise UnsupportedGrammarError("a schema must be a JSON object")
    document = cast(Schema, value)
    _check_costs(document)
    return document


def iter_subschemas(schema: Any) -> Iterator[tuple[SchemaPath, Any]]:
    """Yields the direct subschemas that apply to instances, with their relative paths."""
    if not isinstance(schema, dict):
        return
    mapping = cast(Mapping[str, Any], schema)
    for key in _SCHEMA_KEYWORDS:
        if isinstance(mapping.get(key), (dict, bool)):
            yield (key,), mapping[key]
    for key in _SCHEMA_LIST_KEYWORDS:
        if isinstance(mapping.get(key), list):
            yield from (((key, str(i)), subschema) for i, subschema in enumerate(mapping[key]))
    for key in _SCHEMA_MAP_KEYWORDS:
        if isinstance(mapping.get(key), dict):
            yield from (((key, name), subschema) for name, subschema in mapping[key].items())


def resolve_pointer(document: Any, pointer: str) -> tuple[SchemaPath, Any] | None:
    """Returns the path and the value that a reference within the document (`#/…`) points to.
    Returns None for any other reference."""
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


def walk_schemas(document: Schema) -> Iterator[tuple[SchemaPath, Schema]]:
    """Yields every schema of the document with its path, including definitions."""
    todo: list[tuple[SchemaPath, Any]] = [((), document)]
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        mapping = cast(Schema, schema)
        yield path, mapping
        todo += [((*path, *below), subschema) for below, subschema in iter_subschemas(mapping)]
        for key in _DEFINITION_KEYWORDS:
            if isinstance(mapping.get(key), dict):
                todo += [
                    ((*path, key, name), subschema) for name, subschema in mapping[key].items()
                ]


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_levels(value: Any) -> None:
    """Checks the nesting depth iteratively, so that the check never exceeds Python's stack."""
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        subschema, level = todo.pop()
        if level > MAX_LEVELS:
            raise UnsupportedGrammarError(_TOO_DEEP)
        if isinstance(subschema, float) and not math.isfinite(subschema):
            raise UnsupportedGrammarError("it contains a number that is too large")
        if isinstance(subschema, dict):
            todo += [(below, level + 1) for below in cast(Schema, subschema).values()]
        elif isinstance(subschema, list):
            todo += [(below, level + 1) for below in cast(list[Any], subschema)]


def _check_costs(document: Schema) -> None:
    entries, multiple = 0, 1
    for path, schema in walk_schemas(document):
        for key in (
            *_SCHEMA_LIST_KEYWORDS,
            *_SCHEMA_MAP_KEYWORDS,
            *_DEFINITION_KEYWORDS,
            "required",
            "enum",
        ):
            if isinstance(schema.get(key), (dict, list)):
                entries += len(schema[key])
        if entries > MAX_ENTRIES:
            raise UnsupportedGrammarError(
                f"it has more than {MAX_ENTRIES} properties, values and branches", path
            )
        if _count_optional(schema) > MAX_OPTIONAL_PROPERTIES:
            reason = (
                f"one object has more than {MAX_OPTIONAL_PROPERTIES} optional properties: "
                "make some required, or move some to nested objects"
            )
            raise UnsupportedGrammarError(
                reason, (*path, "properties") if "properties" in schema else path
            )
        multiple = math.lcm(multiple, _numerator(schema.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            reason = (
                f"its multipleOf values need a table of more than {MAX_MULTIPLE} rows: "
                "use fewer digits"
            )
            raise UnsupportedGrammarError(reason, (*path, "multipleOf"))
        _check_patterns(path, schema)
        _check_min_properties(path, schema)


def _count_optional(schema: Any, depth: int = 0) -> int:
    """Returns the number of optional properties of an object, as declared by this schema and the
    branches of its allOf. References are not followed."""
    if not isinstance(schema, dict) or depth > MAX_LEVELS:
        return 0
    mapping = cast(Schema, schema)
    properties, required, combined = (
        mapping.get(key) for key in ("properties", "required", "allOf")
    )
    names = set(cast(Schema, properties)) if isinstance(properties, dict) else set[str]()
    if isinstance(required, list):
        names -= {name for name in cast(list[Any], required) if isinstance(name, str)}
    branches = cast(list[Any], combined) if isinstance(combined, list) else []
    return len(names) + sum(_count_optional(branch, depth + 1) for branch in branches)


def _numerator(multiple: Any) -> int:
    """Returns the value as an integer, without its decimal point. Returns 1 if it is not a
    number."""
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)):
        return 1
    # zero is rejected during compilation, with a better message
    return abs(Fraction(str(multiple)).numerator) or 1


def _check_patterns(path: SchemaPath, schema: Schema) -> None:
    named: list[tuple[SchemaPath, Any]] = [(("pattern",), schema.get("pattern"))]
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        names = cast(Schema, patterns)
        named += [(("patternProperties", name), name) for name in names]
    for below, pattern in named:
        if isinstance(pattern, str) and count_repetitions(pattern) > MAX_REPETITIONS:
            reason = f"it has more than {MAX_REPETITIONS} repetitions"
            raise UnsupportedGrammarError(reason, (*path, *below))


def _check_min_properties(path: SchemaPath, schema: Schema) -> None:
    """Rejects an unsupported `minProperties`. A model may write the same additional property twice,
    but it counts only once. Therefore, at most one property in addition to the required properties
    can be guaranteed."""
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, bool) or not isinstance(least, int):
        return
    num_required = (
        len(set(map(str, cast(list[Any], required)))) if isinstance(required, list) else 0
    )
    if least > num_required + 1:
        reason = (
            f"it can be at most one more than the number of required properties, {num_required}"
        )
        raise UnsupportedGrammarError(reason, (*path, "minProperties"))
