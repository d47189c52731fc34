"""Expressions in Lark: what they produce, asked of llguidance."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from app.grammar.lark import (
    LiteralWriter,
    escape_regex,
    join_alternatives,
    quote,
    regex_literal,
    strip_literal_prefix,
)

GUIDE = LLTokenizer("byte")


def produces(expression: str, text: str) -> bool:
    matcher = LLMatcher(GUIDE, f"start: WHOLE\nWHOLE: {expression}\n", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


Texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(Texts)
@example('a"b\\c\n/d')
@example("\x7f")
def test_a_quoted_text_is_that_text(text: str) -> None:
    assert produces(quote(text), text)


@given(Texts)
@example("(a|b)*[c]/$^.\\n")
def test_an_escaped_text_is_a_pattern_of_itself(text: str) -> None:
    assert produces(f"/{escape_regex(text)}/", text)
    assert not produces(f"/{escape_regex(text)}/", text + "x")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/", "\\/"), ("a\nb", "a\nb"), (r"[/]+", "//")],
)
def test_a_pattern_keeps_its_meaning_between_slashes(pattern: str, text: str) -> None:
    assert produces(regex_literal(pattern), text)


def test_added_tokens_stand_as_tokens() -> None:
    ids = {"<call>": 300, "<call>\n": 301, "word": 302}
    spell = LiteralWriter(ids.get)
    assert spell("<call>{") == '<[300]> "{"'
    assert spell("a <call>\nword") == '"a " <[301]> "word"'
    assert spell("") == ""


@pytest.mark.parametrize("ids", [{}, {"<call>": 300}])
def test_what_an_expression_begins_with_can_be_left_out(ids: dict[str, int]) -> None:
    spell = LiteralWriter(ids.get)
    assert strip_literal_prefix(spell('<call>{"a"'), spell("<call>")) == quote('{"a"')
    assert strip_literal_prefix(f"{spell('<call>')} rule", spell("<call>")) == "rule"


def test_alternatives_keep_apart() -> None:
    assert join_alternatives(['"a" "b"', '"c"']) == '("a" "b") | ("c")'
