"""A tool call written as one JSON object."""

import json
from collections.abc import Collection
from itertools import permutations

import pytest
from hypothesis import given

from app.core.requests import Tool
from app.text.syntax.json_calls import CallOutcome, build_call_expression, parse_call_object
from app.text.syntax.output_parser import OutputBuilder, ToolCallArguments, ToolCallStart
from app.text.syntax.reader import Reader, Resumable
from tests.text.families.reading import Call, calls, mixtures
from tests.text.families.walking import arguments_of, spell
from tests.text.syntax.test_reader import run


def called(
    *chunks: str, names: Collection[str] | None = None
) -> tuple[CallOutcome, list[Call], str]:
    """The outcome, the call, and what was left."""
    pieces = OutputBuilder()

    def parse(reader: Reader) -> Resumable[CallOutcome]:
        start = reader.hold()
        outcome = yield from parse_call_object(reader, pieces, names=names)
        if outcome == "none":
            reader.rewind(start)
        return outcome

    outcome, rest = run(chunks, parse)
    return outcome, calls(pieces.drain()), rest


PARTS = ('"name": "f"', '"arguments": {"a": [1, "}"]}', '"id": "c1"', '"type": "function"')


@pytest.mark.parametrize("parts", list(permutations(PARTS)))
def test_its_parts_stand_in_any_order(parts):
    outcome, found, rest = called(f" {{{', '.join(parts)}}} !")
    assert outcome == "whole"
    # an id that comes too late is not told
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
def test_arguments_are_an_object_a_string_that_holds_one_or_nothing(text, arguments):
    for chunks in ((text,), text):
        outcome, found, _ = called(*chunks)
        assert outcome == "whole"
        assert [call.arguments for call in found] == [arguments]


@pytest.mark.parametrize(
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
def test_without_a_name_nothing_was_called(text):
    assert called(text) == ("none", [], text)
    assert called(*text) == ("none", [], text)


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('{"name": "f", "arguments": {"a": oh}}', '{"a": ', "oh}}"),
        ('{"name": "f", "arguments": {"a": 1', '{"a": 1', ""),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}', ""),
        ('{"name": "f", "arguments": {"a": 1}</x>', '{"a": 1}', "</x>"),
        ('{"name": "f", "arguments": {}, "b" 2}', "{}", ', "b" 2}'),
        ('{"name": "f", "arguments": {}, "arguments": {}}', "{}", ', "arguments": {}}'),
        ('{"name": "f", "arguments": "{\\"a\\": ', '"{\\"a\\": ', ""),
        ('{"name": "f", "arguments": "\\ud800"}', '"\\ud800"', "}"),
    ],
)
def test_once_there_is_a_name_nothing_behind_it_is_lost(text, arguments, rest):
    expected = ("broken", [Call(name="f", id=None, arguments=arguments)], rest)
    assert called(text) == expected
    assert called(*text) == expected


def test_where_only_tools_count_other_names_and_other_keys_are_no_calls():
    text = '{"name": "f", "arguments": {}}'
    assert called(text, names={"f"})[0] == "whole"
    assert called(text, names={"g"}) == ("none", [], text)
    for other in ('{"answer": {"name": "f"}}', '{"answer": 1, "name": "f", "arguments": {}}'):
        assert called(other, names={"f"}) == ("none", [], other)


def test_an_answer_with_other_keys_is_known_to_be_no_call_before_it_ends():
    reader = Reader()
    parser = parse_call_object(reader, OutputBuilder(), names={"f"})
    reader.hold()
    reader.push('{"answer": "It is')
    with pytest.raises(StopIteration) as stopped:
        next(parser)
    assert stopped.value.value == "none"


def test_the_name_is_told_as_soon_as_arguments_follow_and_these_as_they_come():
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
def test_any_text_is_read_the_same_however_it_is_cut(text):
    assert called(*text) == called(text)


def test_it_is_spelled_as_it_is_read():
    tool = Tool(name='a"b', description=None, parameters={"type": "object"})
    spelled = build_call_expression(
        tool, spell, arguments_of, before="<", after=">", arguments_key="parameters"
    )
    before, _, rest = spelled.partition(" %json ")
    assert json.loads(before) == '<{"name": "a\\"b", "parameters": '
    assert rest.endswith(spell("}>"))
