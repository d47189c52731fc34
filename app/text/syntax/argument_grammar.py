"""Builds grammars for arguments that are written as name-value pairs instead of a JSON object.

    city="Oslo", days=3

Knows: the JSON Schema keywords for objects that such a list can satisfy, its Lark rules. Must not
know: the notation of names and values in a family.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

MakePair = Callable[[str, Any], str | None]
"""Returns the expression for a parameter's name and schema. Returns None if it cannot be
expressed."""

# keywords that do not constrain a value, or that are satisfied by every list of pairs
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$schema")
)
_KEYWORDS = _ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
}

_DEFINITIONS = ("$defs", "definitions")
_TYPES = ["null", "boolean", "number", "string", "array", "object"]


def has_only_keywords(schema: Mapping[str, Any], *keywords: str) -> bool:
    """Returns whether only these keywords constrain the value."""
    return _ANNOTATIONS.issuperset(schema.keys() - set(keywords))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentGrammar:
    """The grammar of a list of pairs. expression: the expression for the whole list, which may be
    empty. rules: the rules that the expression refers to."""

    expression: str
    rules: tuple[str, ...]


def build_argument_grammar(
    schema: Mapping[str, Any], prefix: str, *, separator: str, pair: MakePair
) -> ArgumentGrammar | None:
    """Builds a grammar of pairs in the order of the schema. Optional pairs may be omitted. Returns
    None if such a list cannot satisfy the schema, or if a pair cannot be expressed. prefix: the
    prefix of the rule names. separator: the expression between two pairs.

        some_i: pair_i more_i+1 | some_i+1      the list has not begun yet
        more_i: (between pair_i)? more_i+1      the list has begun
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not _KEYWORDS.issuperset(schema) or schema.get("type", "object") != "object":
        return None
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    properties = cast(Mapping[str, Any], properties)
    required = cast(list[Any], required)
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    rules: list[str] = []
    some, more = "", ""
    for index, (name, value) in reversed(list(enumerate(properties.items()))):
        expression = pair(name, value)
        if expression is None:
            return None
        rule = f"{prefix}{index}"
        rules.append(f"{rule}: {expression}")
        if name in required:
            some = f"{rule} {more}"
            more = f"{separator} {rule} {more}"
        else:
            some = f"({rule} {more} | {some})" if some else f"({rule} {more})?"
            more = f"({separator} {rule})? {more}"
        rules += [f"{rule}some: {some}", f"{rule}more: {more}"]
        some, more = f"{rule}some", f"{rule}more"
    return ArgumentGrammar(expression=some, rules=tuple(rules))


def extract_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Extracts a part of a schema as a separate schema, with the definitions that it refers to.
    Returns None if it contains other references."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping) or not all(map(_is_definition, _find_references(schema))):
        return None
    schema = cast(Mapping[str, Any], schema)
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    if not all(_is_definition(reference) for reference in _find_references(definitions)):
        return None
    return {"type": _TYPES, **schema, **(definitions if any(_find_references(schema)) else {})}


def _find_references(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in cast(Mapping[str, Any], value).items():
            if key in ("$ref", "$dynamicRef", "$id", "$anchor"):
                yield inner
            yield from _find_references(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _find_references(inner)


def _is_definition(reference: Any) -> bool:
    return isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))
