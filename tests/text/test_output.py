"""From tokens to what a client is shown: text, log-probabilities, and how much of it was seen."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from app.core.events import ReasoningDelta, TextDelta, ToolCallDelta
from app.core.jobs import Token
from app.grammar.constraint import ReasoningTags
from app.text.families.hermes import Family
from app.text.output import ChoiceOutputProcessor, OutputOptions
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.text.templates import WEATHER

TOKENIZER = Tokenizer(tiny.tokenizer())
Text = st.text(st.sampled_from("abé🎉"), max_size=12)
Stops = st.lists(st.text(st.sampled_from("abé🎉"), min_size=1, max_size=3), max_size=3)


def answer(
    text: str | bytes, *stops: str, logprobs: bool = False
) -> tuple[ChoiceOutputProcessor, list[Any]]:
    """The answer and its deltas, a byte a token, fed until it stops."""
    made = ChoiceOutputProcessor(
        TOKENIZER, choice=0, prompt_ids=(65,), options=OutputOptions(stop_strings=stops)
    )
    raw = text.encode() if isinstance(text, str) else text
    return made, fed(made, raw, logprobs=logprobs)


def fed(made: ChoiceOutputProcessor, raw: Iterable[int], *, logprobs: bool = False) -> list[Any]:
    deltas: list[Any] = []
    for id in raw:
        score = -0.25 if logprobs else None
        deltas += made.feed(Token(job_id="a", id=id, timestamp_ns=0, logprob=score))
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
    told = [entry.token_bytes for delta in deltas for entry in delta.logprobs]
    assert b"".join(told) == joined(deltas).encode()


def test_no_delta_is_empty() -> None:
    _, deltas = answer("aé🎉", logprobs=False)
    assert all(delta.text for delta in deltas)


@pytest.mark.parametrize(("raw", "text"), [(b"a\xf0\x9f", "a\ufffd"), (b"\xff", "\ufffd")])
def test_broken_bytes_are_told_at_the_end_with_their_logprobs(raw: bytes, text: str) -> None:
    _, deltas = answer(raw, logprobs=True)
    assert joined(deltas) == text
    assert b"".join(entry.token_bytes for delta in deltas for entry in delta.logprobs) == raw


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a日"}}\n</tool_call>'
THINK = ReasoningTags(open="<think>", close="</think>")
Ends = st.lists(st.text(st.sampled_from("ab日🎉"), min_size=1, max_size=3), max_size=3)
Segments = st.lists(
    st.one_of(
        st.just(CALL),
        st.text(st.sampled_from("ab日🎉 \n"), min_size=1, max_size=6),
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</", "<tool"]),
    ),
    max_size=6,
)


def hermes(
    *stops: str, in_reasoning: bool = False, choice: int = 0, **options: Any
) -> ChoiceOutputProcessor:
    """An answer of a model that reasons and calls."""
    return ChoiceOutputProcessor(
        TOKENIZER,
        choice=choice,
        prompt_ids=(65,),
        options=OutputOptions(stop_strings=stops, **options),
        parser=Family().build_parser(tools=[WEATHER], tags=THINK, in_reasoning=in_reasoning),
    )


def folded(deltas: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with their arguments."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case TextDelta():
                content += delta.text
            case ReasoningDelta():
                reasoning += delta.text
            case ToolCallDelta(name=str(name)):
                assert delta.call_index == len(calls)
                assert delta.id
                calls.append((name, delta.arguments))
            case ToolCallDelta():
                name, arguments = calls[delta.call_index]
                calls[delta.call_index] = (name, arguments + delta.arguments)
            case _:
                raise AssertionError(delta)
    return content, reasoning, calls


def told_ids(deltas: list[Any]) -> list[int]:
    return [id for delta in deltas if isinstance(delta, TextDelta) for id in delta.token_ids]


def wide(text: str, places: list[int]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer that has each piece of the text as a token, and the text in these tokens."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    inner = tiny.tokenizer()
    inner.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys(pieces)])
    made = Tokenizer(inner)
    return made, [made.added_token_to_id(piece) or 0 for piece in pieces]


@given(segments=Segments, stops=Ends, places=st.lists(st.integers(0, 500), max_size=8))
def test_an_answer_is_the_same_however_it_is_cut_into_tokens(
    segments: list[str], stops: list[str], places: list[int]
) -> None:
    text = "".join(segments)
    one = hermes(*stops)
    bytewise = folded(fed(one, text.encode()))
    tokenizer, ids = wide(text, places)
    two = ChoiceOutputProcessor(
        tokenizer,
        choice=0,
        prompt_ids=(65,),
        options=OutputOptions(stop_strings=tuple(stops)),
        parser=Family().build_parser(tools=[WEATHER], tags=THINK, in_reasoning=False),
    )
    assert folded(fed(two, ids)) == bytewise
    assert (one.stopped, one.matched_stop, one.num_tool_calls) == (
        two.stopped,
        two.matched_stop,
        two.num_tool_calls,
    )


@given(segments=Segments, stops=Ends, parallel=st.booleans())
def test_tokens_are_told_once_and_in_order_and_none_behind_the_end(
    segments: list[str], stops: list[str], parallel: bool
) -> None:
    raw = "".join(segments).encode()
    made = hermes(*stops, return_token_ids=True, parallel_tool_calls=parallel)
    deltas = fed(made, raw, logprobs=True)
    ids = told_ids(deltas)
    assert ids == list(raw[: len(ids)])
    assert ids == [
        entry.token_bytes[0] for d in deltas if isinstance(d, TextDelta) for entry in d.logprobs
    ]
    assert len(ids) == (made.visible_tokens if made.stopped else len(raw))


@given(segments=Segments, stops=Ends)
def test_a_stop_string_ends_content_and_nothing_else(segments: list[str], stops: list[str]) -> None:
    raw = "".join(segments).encode()
    free, made = hermes(), hermes(*stops)
    all_of_it, ended = folded(fed(free, raw)), folded(fed(made, raw))
    assert all_of_it[0].startswith(ended[0])
    assert all_of_it[1].startswith(ended[1])
    if not made.stopped:
        assert ended == all_of_it
    else:
        assert made.matched_stop in stops
        assert all_of_it[2][: len(ended[2])] == ended[2]


class TestWhereAStopStringStands:
    def test_in_reasoning_it_ends_nothing(self) -> None:
        made = hermes("stop")
        assert folded(fed(made, b"<think>stop</think>go stop on")) == ("go ", "stop", [])
        assert made.matched_stop == "stop"

    def test_in_a_call_it_ends_nothing(self) -> None:
        made = hermes("city")
        content, _, calls = folded(fed(made, CALL.encode()))
        assert (content, calls, made.stopped) == (
            "",
            [("get_weather", '{"city": "a日"}')],
            False,
        )

    def test_it_does_not_reach_over_a_call(self) -> None:
        made = hermes("ab")
        content, _, calls = folded(fed(made, f"a{CALL}b".encode()))
        assert (content, len(calls), made.stopped) == ("ab", 1, False)

    def test_tokens_before_it_are_counted_with_the_reasoning(self) -> None:
        made = hermes("!")
        fed(made, b"<think>hm</think>\n\nyes! no")
        assert made.visible_tokens == len(b"<think>hm</think>\n\nyes")
        assert made.reasoning_tokens == len(b"<think>hm")

    def test_in_the_first_tokens_it_ends_nothing(self) -> None:
        made = hermes("a", min_tokens=3)
        assert folded(fed(made, b"aabbab"))[0] == "aabb"


def test_the_models_own_end_ends_reasoning_and_calls_too() -> None:
    for text in ("<think>so<end>more", f"{CALL[:60]}<end>more", "some<end>more"):
        made = hermes(model_stops=("<end>",))
        deltas = fed(made, text.encode())
        assert made.stopped
        assert made.matched_stop is None
        assert "more" not in repr(folded(deltas))
        assert made.visible_tokens == text.index("<end>")


def test_a_second_call_ends_an_answer_that_may_hold_one() -> None:
    made = hermes(parallel_tool_calls=False, return_token_ids=True)
    raw = f"Look. {CALL}\n{CALL} done".encode()
    deltas = fed(made, raw)
    assert folded(deltas) == ("Look.", "", [("get_weather", '{"city": "a日"}')])
    assert made.stopped
    assert made.matched_stop is None
    first = len(f"Look. {CALL}".encode())
    assert first <= made.visible_tokens <= first + 1  # the line break is no part of either


def test_a_second_call_is_cut_off_where_tokens_are_wide_too() -> None:
    """However much of it the token that brought its name brought with it."""
    text = f"{CALL}\n{CALL}"
    tokenizer, ids = wide(text, [len(CALL), len(CALL) + 1])
    made = ChoiceOutputProcessor(
        tokenizer,
        choice=0,
        prompt_ids=(65,),
        options=OutputOptions(return_token_ids=True, parallel_tool_calls=False),
        parser=Family().build_parser(tools=[WEATHER], tags=None, in_reasoning=False),
    )
    assert tokenizer.added_token_to_id(CALL) == ids[-1]
    deltas = fed(made, ids)
    assert len(folded(deltas)[2]) == 1
    assert len(told_ids(deltas)) == made.visible_tokens < len(ids)


def test_special_tokens_are_read_where_they_mark_something_and_never_else() -> None:
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(inner)
    begin, end = (tokenizer.added_token_to_id(text) or 0 for text in ("<think>", "</think>"))
    raw = [begin, *b"hm", end, *b"yes", tiny.BOS]

    def read(visible: frozenset[int]) -> tuple[str, str, list[tuple[str, str]]]:
        made = ChoiceOutputProcessor(
            tokenizer,
            choice=0,
            prompt_ids=(65,),
            options=OutputOptions(visible_special_ids=visible),
            parser=Family().build_parser(tools=[], tags=THINK, in_reasoning=False),
        )
        return folded(fed(made, raw))

    assert read(frozenset({begin, end})) == ("yes", "hm", [])
    assert read(frozenset()) == ("hmyes", "", [])


def test_ids_that_a_family_gives_twice_are_given_once() -> None:
    made = hermes(make_call_id=lambda _: "same")
    deltas = fed(made, f"{CALL}\n{CALL}".encode())
    ids = [delta.id for delta in deltas if isinstance(delta, ToolCallDelta) and delta.id]
    assert ids[0] == "same"
    assert len(set(ids)) == 2
