"""Lists and mappings in any notation."""

import pytest

from app.text.syntax.nested_values import Notation, parse_nested_value
from app.text.syntax.reader import Reader
from tests.rows import rows


def parse_letter_key(reader):
    key = yield from reader.peek()
    if not key.isalpha():
        return None
    reader.take(2)
    return f'"{key}"'


def parse_digit(reader, write, path):
    """Writes the digit with its path."""
    character = yield from reader.peek()
    if not character.isdigit():
        return False
    reader.take(1)
    write("/".join("-" if key is None else key for key in path) + "=" + character)
    return True


NOTATION = Notation(
    list_brackets={"[": "]", "<": ">"}, parse_key=parse_letter_key, parse_scalar=parse_digit
)


@rows(
    ("text", "expected", "complete"),
    [
        ("1", "=1", True),
        ("[1,<2>,]", "[-=1, [-/-=2]]", True),
        ("{a:1,b:{c:[2]}}", '{"a": a=1, "b": {"c": [b/c/-=2]}}', True),
        (" [ ] ", "[]", True),
        ("<>", "[]", True),
        ("{}", "{}", True),
        ("[,]", "[", False),
        ("[1 2]", "[-=1", False),
        ("[1,?]", "[-=1", False),
        ("{a:?}", '{"a": ', False),
        ("{?}", "{", False),
        ("[1>", "[-=1", False),
        ("[1", "[-=1", False),
    ],
)
def test_brackets_become_those_of_json(text, expected, complete):
    reader, pieces = Reader(), []
    reader.push(text)
    reader.end()
    steps = parse_nested_value(NOTATION, reader, pieces.append)
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    assert ("".join(pieces), stopped.value.value) == (expected, complete)
