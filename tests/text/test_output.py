"""From tokens to deltas: text, log-probabilities, and the number of visible tokens."""

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
from app.text.family import load_families
from app.text.output import ChoiceOutputProcessor, OutputOptions
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.text.templates import WEATHER

TOKENIZER = Tokenizer(tiny.tokenizer())
Text = st.text(st.sampled_from("abé🎉"), max_size=12)
Stops = st.lists(st.text(st.sampled_from("abé🎉"), min_size=1, max_size=3), max_size=3)


def process_text(
    text: str | bytes, *stops: str, logprobs: bool = False
) -> tuple[ChoiceOutputProcessor, list[Any]]:
    """The processor and its deltas for text, with a byte per token, until it stops."""
    processor = ChoiceOutputProcessor(
        TOKENIZER, choice=0, prompt_ids=(65,), options=OutputOptions(stop_strings=stops)
    )
    raw = text.encode() if isinstance(text, str) else text
    return processor, feed_all(processor, raw, logprobs=logprobs)


def feed_all(
    processor: ChoiceOutputProcessor, raw: Iterable[int], *, logprobs: bool = False
) -> list[Any]:
    deltas: list[Any] = []
    for id in raw:
        logprob = -0.25 if logprobs else None
        deltas += processor.feed(Token(job_id="a", id=id, timestamp_ns=0, logprob=logprob))
        if processor.stopped:
            return deltas
    return deltas + processor.flush()


def join_text(deltas: list[Any]) -> str:
    return "".join(delta.text for delta in deltas)


@given(text=Text, stops=Stops)
def test_the_answer_is_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    cuts = [position for stop in stops if (position := text.find(stop)) >= 0]
    processor, deltas = process_text(text, *stops)
    assert join_text(deltas) == text[: min(cuts, default=len(text))]
    assert processor.stopped == bool(cuts)
    assert processor.visible_tokens == len(join_text(deltas).encode())


@given(text=Text, stops=Stops)
def test_each_visible_token_has_its_logprob_once(text: str, stops: list[str]) -> None:
    _, deltas = process_text(text, *stops, logprobs=True)
    token_bytes = [entry.token_bytes for delta in deltas for entry in delta.logprobs]
    assert b"".join(token_bytes) == join_text(deltas).encode()


def test_no_delta_is_empty() -> None:
    _, deltas = process_text("aé🎉", logprobs=False)
    assert all(delta.text for delta in deltas)


@pytest.mark.parametrize(("raw", "text"), [(b"a\xf0\x9f", "a\ufffd"), (b"\xff", "\ufffd")])
def test_invalid_bytes_are_emitted_at_the_end_with_their_logprobs(raw: bytes, text: str) -> None:
    _, deltas = process_text(raw, logprobs=True)
    assert join_text(deltas) == text
    assert b"".join(entry.token_bytes for delta in deltas for entry in delta.logprobs) == raw


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a日"}}\n</tool_call>'
HERMES = load_families()["hermes"]
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


def make_hermes_processor(
    *stops: str, in_reasoning: bool = False, choice: int = 0, **options: Any
) -> ChoiceOutputProcessor:
    """A processor for a model with reasoning and tool calls."""
    return ChoiceOutputProcessor(
        TOKENIZER,
        choice=choice,
        prompt_ids=(65,),
        options=OutputOptions(stop_strings=stops, **options),
        parser=HERMES.build_parser(tools=[WEATHER], tags=THINK, in_reasoning=in_reasoning),
    )


def fold_deltas(deltas: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """The content, the reasoning, and the calls with their arguments."""
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


def collect_token_ids(deltas: list[Any]) -> list[int]:
    return [id for delta in deltas if isinstance(delta, TextDelta) for id in delta.token_ids]


def tokenize_by_pieces(text: str, positions: list[int]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer with a token for each piece of the text, and the token ids of the text."""
    ends = sorted({position % (len(text) + 1) for position in positions} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    inner = tiny.tokenizer()
    inner.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys(pieces)])
    tokenizer = Tokenizer(inner)
    return tokenizer, [tokenizer.added_token_to_id(piece) or 0 for piece in pieces]


@given(segments=Segments, stops=Ends, positions=st.lists(st.integers(0, 500), max_size=8))
def test_an_answer_does_not_depend_on_token_boundaries(
    segments: list[str], stops: list[str], positions: list[int]
) -> None:
    text = "".join(segments)
    one = make_hermes_processor(*stops)
    bytewise = fold_deltas(feed_all(one, text.encode()))
    tokenizer, ids = tokenize_by_pieces(text, positions)
    two = ChoiceOutputProcessor(
        tokenizer,
        choice=0,
        prompt_ids=(65,),
        options=OutputOptions(stop_strings=tuple(stops)),
        parser=HERMES.build_parser(tools=[WEATHER], tags=THINK, in_reasoning=False),
    )
    assert fold_deltas(feed_all(two, ids)) == bytewise
    assert (one.stopped, one.matched_stop, one.num_tool_calls) == (
        two.stopped,
        two.matched_stop,
        two.num_tool_calls,
    )


@given(segments=Segments, stops=Ends, parallel=st.booleans())
def test_tokens_are_emitted_once_in_order_and_not_after_the_end(
    segments: list[str], stops: list[str], parallel: bool
) -> None:
    raw = "".join(segments).encode()
    processor = make_hermes_processor(*stops, return_token_ids=True, parallel_tool_calls=parallel)
    deltas = feed_all(processor, raw, logprobs=True)
    ids = collect_token_ids(deltas)
    assert ids == list(raw[: len(ids)])
    assert ids == [
        entry.token_bytes[0] for d in deltas if isinstance(d, TextDelta) for entry in d.logprobs
    ]
    assert len(ids) == (processor.visible_tokens if processor.stopped else len(raw))


@given(segments=Segments, stops=Ends)
def test_a_stop_string_ends_only_content(segments: list[str], stops: list[str]) -> None:
    raw = "".join(segments).encode()
    free, processor = make_hermes_processor(), make_hermes_processor(*stops)
    full, stopped = fold_deltas(feed_all(free, raw)), fold_deltas(feed_all(processor, raw))
    assert full[0].startswith(stopped[0])
    assert full[1].startswith(stopped[1])
    if not processor.stopped:
        assert stopped == full
    else:
        assert processor.matched_stop in stops
        assert full[2][: len(stopped[2])] == stopped[2]


class TestStopStringPositions:
    def test_a_stop_string_in_reasoning_is_ignored(self) -> None:
        processor = make_hermes_processor("stop")
        assert fold_deltas(feed_all(processor, b"<think>stop</think>go stop on")) == (
            "go ",
            "stop",
            [],
        )
        assert processor.matched_stop == "stop"

    def test_a_stop_string_in_a_call_is_ignored(self) -> None:
        processor = make_hermes_processor("city")
        content, _, calls = fold_deltas(feed_all(processor, CALL.encode()))
        assert (content, calls, processor.stopped) == (
            "",
            [("get_weather", '{"city": "a日"}')],
            False,
        )

    def test_a_stop_string_does_not_span_a_call(self) -> None:
        processor = make_hermes_processor("ab")
        content, _, calls = fold_deltas(feed_all(processor, f"a{CALL}b".encode()))
        assert (content, len(calls), processor.stopped) == ("ab", 1, False)

    def test_tokens_before_a_stop_string_include_the_reasoning(self) -> None:
        processor = make_hermes_processor("!")
        feed_all(processor, b"<think>hm</think>\n\nyes! no")
        assert processor.visible_tokens == len(b"<think>hm</think>\n\nyes")
        assert processor.reasoning_tokens == len(b"<think>hm")

    def test_a_stop_string_within_min_tokens_is_ignored(self) -> None:
        processor = make_hermes_processor("a", min_tokens=3)
        assert fold_deltas(feed_all(processor, b"aabbab"))[0] == "aabb"


def test_a_stop_string_of_the_model_ends_reasoning_and_calls_too() -> None:
    for text in ("<think>so<end>more", f"{CALL[:60]}<end>more", "some<end>more"):
        processor = make_hermes_processor(model_stops=("<end>",))
        deltas = feed_all(processor, text.encode())
        assert processor.stopped
        assert processor.matched_stop is None
        assert "more" not in repr(fold_deltas(deltas))
        assert processor.visible_tokens == text.index("<end>")


def test_a_second_call_ends_an_answer_without_parallel_calls() -> None:
    processor = make_hermes_processor(parallel_tool_calls=False, return_token_ids=True)
    raw = f"Look. {CALL}\n{CALL} done".encode()
    deltas = feed_all(processor, raw)
    assert fold_deltas(deltas) == ("Look.", "", [("get_weather", '{"city": "a日"}')])
    assert processor.stopped
    assert processor.matched_stop is None
    first = len(f"Look. {CALL}".encode())
    assert first <= processor.visible_tokens <= first + 1  # the line break belongs to neither call


def test_a_second_call_is_cut_off_with_long_tokens_too() -> None:
    """Even if the token with the name of the second call contains the full call."""
    text = f"{CALL}\n{CALL}"
    tokenizer, ids = tokenize_by_pieces(text, [len(CALL), len(CALL) + 1])
    processor = ChoiceOutputProcessor(
        tokenizer,
        choice=0,
        prompt_ids=(65,),
        options=OutputOptions(return_token_ids=True, parallel_tool_calls=False),
        parser=HERMES.build_parser(tools=[WEATHER], tags=None, in_reasoning=False),
    )
    assert tokenizer.added_token_to_id(CALL) == ids[-1]
    deltas = feed_all(processor, ids)
    assert len(fold_deltas(deltas)[2]) == 1
    assert len(collect_token_ids(deltas)) == processor.visible_tokens < len(ids)


def test_special_tokens_are_parsed_only_as_markers() -> None:
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(inner)
    begin, end = (tokenizer.added_token_to_id(text) or 0 for text in ("<think>", "</think>"))
    raw = [begin, *b"hm", end, *b"yes", tiny.BOS]

    def read(visible: frozenset[int]) -> tuple[str, str, list[tuple[str, str]]]:
        processor = ChoiceOutputProcessor(
            tokenizer,
            choice=0,
            prompt_ids=(65,),
            options=OutputOptions(visible_special_ids=visible),
            parser=HERMES.build_parser(tools=[], tags=THINK, in_reasoning=False),
        )
        return fold_deltas(feed_all(processor, raw))

    assert read(frozenset({begin, end})) == ("yes", "hm", [])
    assert read(frozenset()) == ("hmyes", "", [])


def test_duplicate_call_ids_are_replaced() -> None:
    processor = make_hermes_processor(make_call_id=lambda _: "same")
    deltas = feed_all(processor, f"{CALL}\n{CALL}".encode())
    ids = [delta.id for delta in deltas if isinstance(delta, ToolCallDelta) and delta.id]
    assert ids[0] == "same"
    assert len(set(ids)) == 2


@given(text=Text, stops=Stops)
def test_the_stop_string_may_be_a_part_of_the_output(text: str, stops: list[str]) -> None:
    before, _ = process_text(text, *stops)
    options = OutputOptions(stop_strings=tuple(stops), include_stop=True)
    made = ChoiceOutputProcessor(TOKENIZER, choice=0, prompt_ids=(65,), options=options)
    deltas = feed_all(made, text.encode())
    assert made.matched_stop == before.matched_stop
    cut = join_text(process_text(text, *stops)[1])
    assert join_text(deltas) == cut + (made.matched_stop or "")
    assert made.visible_tokens == len(join_text(deltas).encode())


def test_the_stop_token_may_be_a_part_of_the_output() -> None:
    texts: list[str] = []
    for include in (False, True):
        options = OutputOptions(include_stop=include)
        made = ChoiceOutputProcessor(TOKENIZER, choice=0, prompt_ids=(65,), options=options)
        deltas = made.feed(Token(job_id="a", id=ord("x"), timestamp_ns=0))
        texts.append(join_text([*deltas, *made.flush(ord("."))]))
    assert texts == ["x", "x."]
