"""Lark expressions: the texts that they produce, according to llguidance."""

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
    matcher = LLMatcher(GUIDE, f"start: TEXT\nTEXT: {expression}\n", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


Texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(Texts)
@example('a"b\\c\n/d')
@example("\x7f")
def test_a_quoted_text_produces_that_text(text: str) -> None:
    assert produces(quote(text), text)


@given(Texts)
@example("(a|b)*[c]/$^.\\n")
def test_an_escaped_text_matches_only_itself(text: str) -> None:
    assert produces(f"/{escape_regex(text)}/", text)
    assert not produces(f"/{escape_regex(text)}/", text + "x")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/", "\\/"), ("a\nb", "a\nb"), (r"[/]+", "//")],
)
def test_a_pattern_keeps_its_meaning_between_slashes(pattern: str, text: str) -> None:
    assert produces(regex_literal(pattern), text)


def test_added_tokens_are_written_as_token_ids() -> None:
    ids = {"<call>": 300, "<call>\n": 301, "word": 302}
    write = LiteralWriter(ids.get)
    assert write("<call>{") == '<[300]> "{"'
    assert write("a <call>\nword") == '"a " <[301]> "word"'
    assert write("") == ""


@pytest.mark.parametrize("ids", [{}, {"<call>": 300}])
def test_a_literal_prefix_can_be_stripped(ids: dict[str, int]) -> None:
    write = LiteralWriter(ids.get)
    assert strip_literal_prefix(write('<call>{"a"'), write("<call>")) == quote('{"a"')
    assert strip_literal_prefix(f"{write('<call>')} rule", write("<call>")) == "rule"


def test_alternatives_are_parenthesized() -> None:
    assert join_alternatives(['"a" "b"', '"c"']) == '("a" "b") | ("c")'
