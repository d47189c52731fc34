"""From tokens to what a client is shown: text, log-probabilities, and how much of it was seen."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.jobs import Token
from app.text.answer import Answer, Reading
from app.text.tokenizer import Tokenizer
from tests import tiny

TOKENIZER = Tokenizer(tiny.tokenizer())
Text = st.text(st.sampled_from("abé🎉"), max_size=12)
Stops = st.lists(st.text(st.sampled_from("abé🎉"), min_size=1, max_size=3), max_size=3)


def answer(text: str | bytes, *stops: str, logprobs: bool = False) -> tuple[Answer, list[Any]]:
    """The answer and its deltas, a byte a token, fed until it stops."""
    made = Answer(TOKENIZER, choice=0, prompt=(65,), reading=Reading(asked=stops))
    raw = text.encode() if isinstance(text, str) else text
    return made, fed(made, raw, logprobs=logprobs)


def fed(made: Answer, raw: bytes, *, logprobs: bool = False) -> list[Any]:
    deltas: list[Any] = []
    for id in raw:
        score = -0.25 if logprobs else None
        deltas += made.feed(Token(job="a", id=id, at=0, logprob=score))
        if made.stopped:
            return deltas
    return deltas + made.flush()


def joined(deltas: list[Any]) -> str:
    return "".join(delta.text for delta in deltas)


@given(text=Text, stops=Stops)
def test_the_answer_is_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    cuts = [place for stop in stops if (place := text.find(stop)) >= 0]
    made, deltas = answer(text, *stops)
    assert joined(deltas) == text[: min(cuts, default=len(text))]
    assert made.stopped == bool(cuts)
    assert made.visible_tokens == len(joined(deltas).encode())


@given(text=Text, stops=Stops)
def test_each_token_in_sight_has_its_logprob_told_once(text: str, stops: list[str]) -> None:
    _, deltas = answer(text, *stops, logprobs=True)
    told = [entry.raw for delta in deltas for entry in delta.logprobs]
    assert b"".join(told) == joined(deltas).encode()


def test_no_delta_is_empty() -> None:
    _, deltas = answer("aé🎉", logprobs=False)
    assert all(delta.text for delta in deltas)


@pytest.mark.parametrize(("raw", "text"), [(b"a\xf0\x9f", "a\ufffd"), (b"\xff", "\ufffd")])
def test_broken_bytes_are_told_at_the_end_with_their_logprobs(raw: bytes, text: str) -> None:
    _, deltas = answer(raw, logprobs=True)
    assert joined(deltas) == text
    assert b"".join(entry.raw for delta in deltas for entry in delta.logprobs) == raw
