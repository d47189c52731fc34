"""Schemas as zod 4 and pydantic 2 write them: each is honored, or rejected by the name of the
keyword."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import AppError
from app.core.requests import JsonSchema
from app.grammar.library_keywords import _LOOK_AROUND
from app.grammar.schema_rewrite import rewrite_schema
from tests import tiny
from tests.engine.harness import grammar_compiler
from tests.grammar.library_schemas import FILE
from tests.grammar.test_llguidance_backend import accepts
from tests.rows import rows

LIBRARIES: dict[str, dict[str, list[Any]]] = json.loads(FILE.read_text("utf-8"))
SCHEMAS = [
    (library, name, schema)
    for library, types in LIBRARIES.items()
    for name, schemas in types.items()
    for schema in schemas
]

# types whose values no grammar of this kind describes, with the rejected keyword
REJECTED = {
    ("zod", "jwt"): "format",
    ("zod", "never"): "not",
    ("pydantic", "IPv4Network"): "format",
    ("pydantic", "IPv6Network"): "format",
    ("pydantic", "IPv6Interface"): "format",
    ("pydantic", "IPvAnyNetwork"): "format",
    ("pydantic", "IPvAnyInterface"): "format",
    ("pydantic", "PostgresDsn"): "format",
    ("pydantic", "MongoDsn"): "format",
    ("pydantic", "NatsDsn"): "format",
    ("pydantic", "Pattern"): "format",
    ("pydantic", "set"): "uniqueItems",
    ("pydantic", "short set"): "uniqueItems",
    ("pydantic", "dict by date"): "propertyNames",
}


def compile_schema(schema: Any) -> None:
    grammar = JsonSchema(text=json.dumps(schema), param="schema")
    grammar_compiler().compile(grammar, frozenset({tiny.END}))


@rows(("library", "name", "schema"), SCHEMAS, ids=str)
def test_each_type_is_honored_or_rejected_by_the_name_of_its_keyword(
    library: str, name: str, schema: Any
):
    keyword = REJECTED.get((library, name))
    if keyword is None:
        compile_schema(schema)
        return
    with pytest.raises(AppError) as caught:
        compile_schema(schema)
    assert (caught.value.param or "").endswith(f".{keyword}")


def test_each_rejected_type_is_listed():
    assert REJECTED.keys() <= {(library, name) for library, name, _ in SCHEMAS}


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
UUID = "123e4567-e89b-42d3-a456-426614174000"


@rows(
    ("schema", "accepted", "rejected"),
    [
        (RECORD | {"propertyNames": {"type": "string"}}, ['{"x":1}'], ['{"x":"y"}']),
        (
            RECORD | {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"]},
            ['{"a":1}', '{"a":1,"b":2}'],
            ["{}", '{"b":2}', '{"a":1,"c":2}', '{"a":"x"}'],
        ),
        (RECORD | {"propertyNames": {"enum": ["a", [], 1]}}, ["{}", '{"a":1}'], ['{"1":1}']),
        (RECORD | {"propertyNames": {"const": "a"}}, ["{}", '{"a":1}'], ['{"b":1}']),
        (
            RECORD | {"propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}},
            ['{"a":1,"b":2}'],
            ['{"c":1}'],
        ),
        (
            RECORD | {"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a", "b"]}}},
            ['{"b":1}'],
            ['{"c":1}'],
        ),
        (
            {"properties": {"a": {"const": 1}}, "propertyNames": {"enum": ["a", "b"]}},
            ['{"a":1}', '{"b":[]}'],
            ['{"a":2}', '{"c":1}'],
        ),
        (RECORD | {"propertyNames": {"pattern": r"^k\d$"}}, ['{"k1":1}'], ['{"k":1}', '{"k1":""}']),
        (RECORD | {"propertyNames": {"minLength": 2}}, ['{"ab":1}'], ['{"a":1}']),
        (
            RECORD | {"propertyNames": {"minLength": 1, "maxLength": 2}},
            ['{"ab":1}'],
            ['{"":1}', '{"abc":1}'],
        ),
        (
            {"type": "string", "format": "starts_with", "pattern": "^a.*"},
            ['"ab"'],
            ['"b"'],
        ),
        ({"type": "string", "format": "binary"}, ['"é"'], ["1"]),
        ({"type": "string", "format": "uuid4"}, [f'"{UUID}"'], [f'"{UUID.replace("-42", "-12")}"']),
        ({"type": "string", "format": "base64"}, ['"QUI="', '""'], ['"QUI"', '"="']),
        ({"type": "string", "format": "ipvanyaddress"}, ['"1.2.3.4"', '"::1"'], ['"1.2.3"']),
        ({"type": "string", "format": "ipv4interface"}, ['"1.2.3.4/24"'], ['"1.2.3.4/33"']),
        ({"type": "string", "format": "fraction"}, ['"-1/3"', '"0.5"'], ['"1/0"']),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
        (
            {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
            ["-123456.5", "1000000000000000000"],
            ["1" + "0" * 39],
        ),
    ],
    ids=str,
)
def test_a_keyword_allows_exactly_its_values(schema: Any, accepted: list[str], rejected: list[str]):
    grammar = JsonSchema(text=json.dumps(schema))
    for text in accepted:
        assert accepts(grammar, text), text
    for text in rejected:
        assert not accepts(grammar, text), text


@rows(
    "schema",
    [
        RECORD | {"propertyNames": {"type": "integer"}},
        RECORD | {"propertyNames": {"format": "date"}},
        RECORD | {"propertyNames": {"maxLength": 3}},
        RECORD | {"propertyNames": {"minLength": 10**9}},
        RECORD | {"propertyNames": {"enum": ["a"]}, "required": ["b"]},
        RECORD | {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}},
        RECORD | {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        RECORD | {"propertyNames": {"enum": [f"n{n}" for n in range(1001)]}},
        RECORD | {"propertyNames": {"enum": "a"}},
        {"type": "string", "format": "jwt"},
        {"type": "number", "minimum": 1e30},
    ],
)
def test_what_cannot_be_rewritten_is_left_to_be_rejected(schema: Any):
    rewritten = rewrite_schema(schema)
    assert {name: rewritten[name] for name in schema} == schema


DATES = [pattern for pattern in _LOOK_AROUND if pattern.startswith("^P")]
HOSTS = [pattern for pattern in _LOOK_AROUND if "253" in pattern]


@pytest.mark.parametrize(
    ("pattern", "letters"), [(DATES[0], "PTWYMDHS.,01"), (HOSTS[0], "a0-.")], ids=["date", "host"]
)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_pattern_without_look_around_matches_the_same_texts(
    pattern: str, letters: str, data: Any
):
    pieces = st.sampled_from(["P", "T", "1Y", "2M", "3D", "4H", "5M", "6.7S", "8W", *letters])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    equivalent = _LOOK_AROUND[pattern]["pattern"]
    assert bool(re.search(equivalent, text)) == bool(re.search(pattern, text)), text
