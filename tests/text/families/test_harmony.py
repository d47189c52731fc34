"""gpt-oss."""

import pytest
from hypothesis import given

from app.text.families.harmony import Family
from tests.rows import rows
from tests.text.families.reading import (
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, Walk, check_walks

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("")

EXCLUDED = {
    "openai-gpt-oss-120b/parallel": "the template renders only the first call",
    "llamacpp-4205-231": "llama.cpp was asked to leave reasoning in the content",
    "llamacpp-4310-240": "llama.cpp drops calls of unknown tools",
    "llamacpp-4319-241": "llama.cpp drops calls of unknown tools",
}

CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|>"
FINAL = "<|channel|>final<|message|>It rains.<|return|>"
NEXT = "<|start|>assistant"


def test_real_model_outputs_are_parsed(shared):
    template = "openai-gpt-oss-120b.jinja"
    rows = [*roundtrip(shared, template), *llamacpp(shared, template)]
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


@given(mixtures(*FAMILY.markers, "analysis", "final", "to=", "functions.now", "assistant", CALL))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*FAMILY.markers, "to="))
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_reasoning_and_content_may_come_between_calls():
    commentary = "<|channel|>commentary<|message|>I will look.<|end|>"
    text = NEXT.join((THOUGHT, commentary, CALL, THOUGHT, CALL, FINAL))
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "Look it up." * 2
    assert join_content(pieces) == "I will look.It rains."
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "Oslo"}'] * 2


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
def test_header_fields_may_come_in_any_order(header):
    pieces = check_text(FAMILY, f'{header}{{"city": "Oslo"}}', tools=TOOLS)
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}')
    ]


def test_an_unknown_tool_keeps_its_full_name():
    text = "<|channel|>commentary to=browser.search<|message|>{}"
    assert [call.name for call in collect_calls(check_text(FAMILY, text, tools=TOOLS))] == [
        "browser.search"
    ]


def test_without_tools_calls_are_text():
    pieces = check_text(FAMILY, f"{THOUGHT}{NEXT}{CALL}", tools=(), tags=TAGS)
    assert join_content(pieces) == '{"city": "Oslo"}'
    assert join_reasoning(pieces) == "Look it up."


def test_reasoning_that_the_prompt_opened_is_parsed():
    text = f"Look it up.<|end|>{NEXT}{FINAL}"
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)
    assert join_reasoning(pieces) == "Look it up."
    assert join_content(pieces) == "It rains."


def test_the_next_message_ends_one_without_an_end_marker():
    text = f"{THOUGHT.removesuffix('<|end|>')}{NEXT}{FINAL}"
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert (join_reasoning(pieces), join_content(pieces)) == ("Look it up.", "It rains.")


def test_a_truncated_header_is_not_shown():
    for text in ("<|channel|>", "<|channel|>analysis", "<|channel|>commentary to=functions.get_w"):
        pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
        assert (join_content(pieces), collect_calls(pieces)) == ("", [])


@rows(
    ("text", "expected_content", "expected_reasoning"),
    [
        ("<|channel|> is a token that begins a header", "is a token that begins a header", ""),
        ("<|channel|>final The answer is 42.", "The answer is 42.", ""),
        (f"<|channel|>analysis {'I think ' * 9}<|end|>{NEXT}{FINAL}", "It rains.", "I think " * 9),
        (f"{NEXT} I think.<|end|>{NEXT}{FINAL}", "I think.It rains.", ""),
        (f"<|channel|>analysis<|end|>{NEXT}{FINAL}", "It rains.", ""),
        ("<|channel|>final <|constrain|>JSON<|message|>{}", "{}", ""),
        ("<|channel|>commentary to=all <json> code<|message|>Hi", "Hi", ""),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi", "Hi", "Hm."),
        ("<|constrain|>json<|message|>{}<|message|>!", "{}!", ""),
    ],
)
def test_headers_without_a_known_form_are_not_shown(text, expected_content, expected_reasoning):
    """Their markers and channels were part of the content."""
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert join_content(pieces) == expected_content
    assert join_reasoning(pieces) == expected_reasoning.strip()


def test_a_call_of_a_tool_in_the_analysis_channel_is_reasoning_without_tools():
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    pieces = check_text(FAMILY, text, tools=(), tags=TAGS)
    assert (join_content(pieces), join_reasoning(pieces)) == ("", "print(1)")


def test_invalid_arguments_are_passed_through():
    text = CALL.replace('"Oslo"', "Oslo") + NEXT + FINAL
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": Oslo}']
    assert join_content(pieces) == "It rains."


def test_a_marker_within_an_argument_does_not_end_the_call():
    pieces = check_text(FAMILY, CALL.replace("Oslo", "<|call|>"), tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "<|call|>"}']


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES, FORMS))


def test_the_grammar_accepts_the_documented_spelling():
    assert Walk(FAMILY, TOOLS).accepts(CALL.removesuffix("<|call|>"))


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.now<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.now json<|message|>",
        "<|channel|>commentary to=functions.now<|message|>",
    ],
)
def test_the_grammar_accepts_the_recipient_of_the_template_and_a_missing_type(header):
    assert Walk(FAMILY, (WEATHER, NOW)).accepts(f"{header}{{}}")
    pieces = check_text(FAMILY, f"{header}{{}}", tools=(WEATHER, NOW))
    assert [call.name for call in collect_calls(pieces)] == ["now"]

    assert TAGS is not None
    reasoning = f"{TAGS.open}Look it up.{TAGS.close}{FAMILY.reasoning_separator}"
    assert f"{reasoning}{FAMILY.content_prefix}It rains." == f"{THOUGHT}{NEXT}{FINAL}".removesuffix(
        "<|return|>"
    )
    for text, expected in (
        (f"{reasoning}{FAMILY.content_prefix}It rains.", "It rains."),
        (reasoning + CALL, ""),
    ):
        pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
        assert (join_reasoning(pieces), join_content(pieces)) == ("Look it up.", expected)
