"""Preparation of Lark and GBNF grammars for the compiler."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.grammar.llguidance_backend import MAX_GRAMMAR_LENGTH, prepare_lark
from app.grammar.schema import UnsupportedGrammarError
from tests.rows import rows

OVER_LINES = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
COMPACT = {"item_separator": ",[ ]?", "key_separator": ":[ ]?", "whitespace_flexible": False}


def extract_schemas(text: str) -> list[dict[str, object]]:
    """The schemas of a prepared grammar, whose only braces are those of schemas."""
    decoder, schemas, end = json.JSONDecoder(), list[dict[str, object]](), 0
    while (start := text.find("%json {", end)) >= 0:
        value, end = decoder.raw_decode(text, start + len("%json "))
        schemas.append(value)
    return schemas


@pytest.mark.parametrize(("compact", "space"), [(False, OVER_LINES), (True, COMPACT)])
def test_white_space_is_bounded_in_every_schema_despite_its_own_options(
    compact: bool, space: dict[str, object]
) -> None:
    text = prepare_lark(
        'start: a "x" b\n'
        'a: %json {"type": "object", "x-guidance": {"lenient": true}}\n'
        'b: "y" %json{"const": "%json {}"} "z"\n'
        "c: %json true\n",
        compact=compact,
    )
    schemas = extract_schemas(text.replace('"%json {}"', '"other"').replace("%json{", "%json {"))
    assert len(schemas) == 3
    for schema in schemas:
        assert schema["x-guidance"] == {**space, "lenient": False}


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json { not one"',
        'start: /%json {"a/ "b" // %json {\n',
        "start: <%json> # %json {",
        'start: "\\"%json {" </think> "%json {"\n',
        'start: "/" /"/ "a" %regex {"substring_chars": "%json"}',
    ],
)
def test_text_that_only_looks_like_a_schema_is_unchanged(text: str) -> None:
    assert prepare_lark(text) == text


@given(st.text('"/<>#%{}\\ \nja', max_size=40))
def test_text_without_schemas_is_unchanged(text: str) -> None:
    assume("%json" not in text)
    assert prepare_lark(text) == text


@rows(
    ("text", "reason"),
    [
        ("start: %json {", "not valid JSON"),
        ("start: %json [1]", "JSON object"),
        # rejected by Python's parser or, from 3.13 on, by the check of the parsed value
        ("start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000, "nested"),
        ('start: %json {"multipleOf": 1000003}', "table"),
        ("start: /(a{101}){100}/", "more than 10000 repetitions"),
        ('start: a\na[temperature=0.5]: "x"', "the rule option temperature is not supported"),
        ("start: a 'x'\na[capture, stop = \"x\"]: /.*/", "the rule option stop is not supported"),
        ("start: " + "a " * MAX_GRAMMAR_LENGTH, "longer than"),
        ("root ::= " + "a " * MAX_GRAMMAR_LENGTH, "longer than"),
        ("root ::= missing", "'missing' not found"),
        ('root ::= "a', "not valid GBNF"),
        ('root ::= "\\ud800"', "not a character"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
        ('other ::= "a"', "root"),
        ("start: " + "%json {} " * MAX_GRAMMAR_LENGTH, "longer than"),
        ("start: " + "%json {} " * (4 * MAX_GRAMMAR_LENGTH), "including schemas"),
    ],
)
def test_an_unsupported_grammar_is_rejected_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UnsupportedGrammarError) as caught:
        prepare_lark(text)
    assert reason in caught.value.reason


def test_schemas_do_not_count_towards_the_grammar_length() -> None:
    large = json.dumps({"const": "a" * MAX_GRAMMAR_LENGTH})
    assert prepare_lark(f"start: %json {large}\n")


@pytest.mark.parametrize(
    "text",
    [
        '"' * MAX_GRAMMAR_LENGTH,
        '"\\' * (MAX_GRAMMAR_LENGTH // 2),
        "<" * MAX_GRAMMAR_LENGTH,
        "/a\n" * (MAX_GRAMMAR_LENGTH // 3),
    ],
    ids=["quotes", "escapes", "angles", "slashes"],
)
def test_hostile_text_is_prepared_in_linear_time(text: str) -> None:
    """Each of these took seconds with a scanner that tries every pattern at every position."""
    assert prepare_lark(text) == text
