"""gpt-oss."""

import pytest
from hypothesis import given

from app.text.families.harmony import Family
from tests.text.families.reading import (
    calls,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, Walk, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

LEFT_OUT = {
    "openai-gpt-oss-120b/parallel": "the template renders the first call only",
    "llamacpp-4205-231": "not split there: reasoning is asked to stay in the content",
    "llamacpp-4310-240": "a call of a tool that was not offered is dropped there",
    "llamacpp-4319-241": "a call of a tool that was not offered is dropped there",
}

CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|>"
FINAL = "<|channel|>final<|message|>It rains.<|return|>"
NEXT = "<|start|>assistant"


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    template = "openai-gpt-oss-120b.jinja"
    rows = [*roundtrip(shared, template), *llamacpp(shared, template)]
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


@given(mixtures(*FAMILY.markers, "analysis", "final", "to=", "functions.now", "assistant", CALL))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*FAMILY.markers, "to="))
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_one_answer_may_think_and_talk_between_its_calls():
    said = "<|channel|>commentary<|message|>I will look.<|end|>"
    text = NEXT.join((THOUGHT, said, CALL, THOUGHT, CALL, FINAL))
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert reasoning(pieces) == "Look it up." * 2
    assert content(pieces) == "I will look.It rains."
    assert [call.arguments for call in calls(pieces)] == ['{"city": "Oslo"}'] * 2


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        "<|channel|>commentary to=get_weather code<|message|>",
        "<|channel|>analysis to=functions.get_weather <|constrain|>json<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>",
    ],
)
def test_a_header_may_be_written_in_any_order(header):
    pieces = check_text(FAMILY, f'{header}{{"city": "Oslo"}}', tools=TOOLS)
    assert [(call.name, call.arguments) for call in calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}')
    ]


def test_a_tool_that_was_not_offered_is_called_by_its_whole_name():
    text = "<|channel|>commentary to=browser.search<|message|>{}"
    assert [call.name for call in calls(check_text(FAMILY, text, tools=TOOLS))] == [
        "browser.search"
    ]


def test_without_tools_calls_are_text():
    text = CALL.removesuffix("<|call|>")
    pieces = check_text(FAMILY, f"{THOUGHT}{NEXT}{CALL}", tools=(), tags=TAGS)
    assert content(pieces) == f"{NEXT}{text}"
    assert reasoning(pieces) == "Look it up."


def test_what_the_prompt_began_is_reasoning():
    text = f"Look it up.<|end|>{NEXT}{FINAL}"
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)
    assert reasoning(pieces) == "Look it up."
    assert content(pieces) == "It rains."


def test_a_message_that_lacks_its_end_is_ended_by_the_next_one():
    text = f"{THOUGHT.removesuffix('<|end|>')}{NEXT}{FINAL}"
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert (reasoning(pieces), content(pieces)) == ("Look it up.", "It rains.")


def test_a_header_that_the_end_cut_is_not_shown():
    for text in ("<|channel|>", "<|channel|>analysis", "<|channel|>commentary to=functions.get_w"):
        pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
        assert (content(pieces), calls(pieces)) == ("", [])


def test_what_only_looks_like_a_header_stays_text():
    text = "<|channel|> is a token that begins " + "a word " * 12
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_arguments_that_are_broken_are_handed_on_as_they_are():
    text = CALL.replace('"Oslo"', "Oslo") + NEXT + FINAL
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": Oslo}']
    assert content(pieces) == "It rains."


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, CALL.replace("Oslo", "<|call|>"), tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == ['{"city": "<|call|>"}']


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))


def test_its_grammar_accepts_the_documented_spelling():
    assert Walk(FAMILY, TOOLS).accepts(CALL.removesuffix("<|call|>"))


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.now<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.now json<|message|>",
        "<|channel|>commentary to=functions.now<|message|>",
    ],
)
def test_its_grammar_accepts_the_recipient_where_the_template_puts_it_and_no_type(header):
    assert Walk(FAMILY, (WEATHER, NOW)).accepts(f"{header}{{}}")
    pieces = check_text(FAMILY, f"{header}{{}}", tools=(WEATHER, NOW))
    assert [call.name for call in calls(pieces)] == ["now"]

    assert TAGS is not None
    thought = f"{TAGS.open}Look it up.{TAGS.close}{FAMILY.reasoning_separator}"
    assert f"{thought}{FAMILY.content_prefix}It rains." == f"{THOUGHT}{NEXT}{FINAL}".removesuffix(
        "<|return|>"
    )
    for text, said in (
        (f"{thought}{FAMILY.content_prefix}It rains.", "It rains."),
        (thought + CALL, ""),
    ):
        pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
        assert (reasoning(pieces), content(pieces)) == ("Look it up.", said)
