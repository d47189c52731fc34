"""A tool call written as one JSON object."""

import json
from collections.abc import Collection
from itertools import permutations

import pytest
from hypothesis import given

from app.core.requests import Tool
from app.text.syntax.json_calls import (
    CallOutcome,
    build_call_expression,
    parse_call_object,
    parse_calls,
)
from app.text.syntax.output_parser import OutputBuilder, ToolCallArguments, ToolCallStart
from app.text.syntax.reader import Reader, Resumable
from tests.rows import rows
from tests.text.families.reading import Call, collect_calls, mixtures
from tests.text.families.walking import arguments_of, spell
from tests.text.syntax.test_reader import run


def parse_call(
    *chunks: str, names: Collection[str] | None = None, several: bool = False
) -> tuple[CallOutcome, list[Call], str]:
    """The outcome, the calls, and the rest of the text. several: whether there may be several."""
    pieces = OutputBuilder()

    def parse(reader: Reader) -> Resumable[CallOutcome]:
        start = reader.hold()
        if several:
            outcome = yield from parse_calls(reader, pieces)
        else:
            outcome = yield from parse_call_object(reader, pieces, names=names)
        if outcome == "none":
            reader.rewind(start)
        return outcome

    outcome, rest = run(chunks, parse)
    return outcome, collect_calls(pieces.drain()), rest


PARTS = ('"name": "f"', '"arguments": {"a": [1, "}"]}', '"id": "c1"', '"type": "function"')


@rows("parts", list(permutations(PARTS)))
def test_the_fields_may_come_in_any_order(parts):
    outcome, found, rest = parse_call(f" {{{', '.join(parts)}}} !")
    assert outcome == "complete"
    # an id after the arguments is ignored
    first = parts.index('"id": "c1"') < parts.index('"arguments": {"a": [1, "}"]}')
    late_name = parts.index('"name": "f"') > parts.index('"arguments": {"a": [1, "}"]}')
    assert found == [
        Call(name="f", id="c1" if first or late_name else None, arguments='{"a": [1, "}"]}')
    ]
    assert rest == " !"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"arguments": "{\\"a\\": 1}", "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "id": 7, "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": {"a": 1},}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
    ],
)
def test_arguments_are_an_object_a_string_with_an_object_or_absent(text, arguments):
    for chunks in ((text,), text):
        outcome, found, _ = parse_call(*chunks)
        assert outcome == "complete"
        assert [call.arguments for call in found] == [arguments]


@rows(
    "text",
    [
        "",
        "f",
        "[]",
        "{",
        "{}",
        '{"name"',
        '{"name": "f"',
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"arguments": {}, "arguments": {}, "name": "f"}',
        '{"arguments": oh, "name": "f"}',
        '{"name": "\\udc00", "arguments": {}}',
    ],
)
def test_an_object_without_a_name_is_not_a_call(text):
    assert parse_call(text) == ("none", [], text)
    assert parse_call(*text) == ("none", [], text)


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('{"name": "f", "arguments": {"a": oh}', '{"a": oh}', ""),
        ('{"name": "f", "arguments": {"a": oh', '{"a": oh', ""),
        ('{"name": "f", "arguments": {"a": 1', '{"a": 1', ""),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}', ""),
        ('{"name": "f", "arguments": {"a": 1}</x>', '{"a": 1}', "</x>"),
        ('{"name": "f", "arguments": {}, "b" 2}', "{}", ', "b" 2}'),
        ('{"name": "f", "arguments": {}, "arguments": {}}', "{}", ', "arguments": {}}'),
        ('{"name": "f", "arguments": "{\\"a\\": ', '"{\\"a\\": ', ""),
        ('{"name": "f", "arguments": "\\ud800"}', '"\\ud800"', "}"),
    ],
)
def test_no_text_after_the_name_is_lost(text, arguments, rest):
    expected = ("broken", [Call(name="f", id=None, arguments=arguments)], rest)
    assert parse_call(text) == expected
    assert parse_call(*text) == expected


def test_invalid_arguments_end_at_their_own_brace():
    """The call took the brace after its own."""
    for invalid in ("{oh}", '{"a": [{1: "}"}], oh}', '{"a" "\\""}'):
        text = f'{{"name": "f", "arguments": {invalid}, "id": "7"}}!'
        expected = ("complete", [Call(name="f", id=None, arguments=invalid)], "!")
        assert parse_call(text) == parse_call(*text) == expected


def test_several_calls_may_follow_each_other():
    call = '{"name": "f", "arguments": {}}'
    for text in (f"{call}{call}", f"{call},\n{call}", f"[{call}, {call}]", f"{call};[{call}]"):
        found = parse_call(f"{text} rest", several=True)
        assert [call.arguments for call in found[1]] == ["{}", "{}"]
        assert (found[0], found[2]) == ("complete", " rest")


def test_with_given_names_other_names_and_other_keys_are_not_calls():
    text = '{"name": "f", "arguments": {}}'
    assert parse_call(text, names={"f"})[0] == "complete"
    assert parse_call(text, names={"g"}) == ("none", [], text)
    for other in ('{"answer": {"name": "f"}}', '{"answer": 1, "name": "f", "arguments": {}}'):
        assert parse_call(other, names={"f"}) == ("none", [], other)


def test_an_unknown_key_ends_the_parse_before_the_object_ends():
    reader = Reader()
    parser = parse_call_object(reader, OutputBuilder(), names={"f"})
    reader.hold()
    reader.push('{"answer": "It is')
    with pytest.raises(StopIteration) as stopped:
        next(parser)
    assert stopped.value.value == "none"


def test_the_name_and_the_arguments_are_streamed():
    reader, pieces = Reader(), OutputBuilder()
    parser = parse_call_object(reader, pieces)
    reader.hold()
    reader.push('{"name": "f", "arguments":')
    next(parser)
    assert pieces.drain() == [ToolCallStart(name="f")]
    for chunk in (' {"a"', ': "b', "c"):
        reader.push(chunk)
        next(parser)
    assert pieces.drain() == [ToolCallArguments(text=text) for text in ('{"a"', ': "b', "c")]


@given(mixtures('{"name": "f", ', '"arguments": {', '"id": '))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    assert parse_call(*text) == parse_call(text)


def test_a_built_call_has_the_syntax_that_is_parsed():
    tool = Tool(name='a"b', description=None, parameters={"type": "object"})
    expression = build_call_expression(
        tool, spell, arguments_of, before="<", after=">", arguments_key="parameters"
    )
    before, _, rest = expression.partition(" %json ")
    assert json.loads(before) == '<{"name": "a\\"b", "parameters": '
    assert rest.endswith(spell("}>"))
