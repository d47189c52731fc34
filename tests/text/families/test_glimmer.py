"""Muse Glimmer."""

from hypothesis import given

from app.text.families.glimmer import Family
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
)
from tests.text.families.rows import roundtrip, select_rows
from tests.text.families.tagged import TOOLS, check_syntax

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("")
MARKERS = (
    *("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<atem:function_calls>"),
    *("</atem:function_calls>", '<atem:invoke name="', "</atem:invoke>"),
    *('<atem:parameter name="', "</atem:parameter>", '<atem:invoke name="now">'),
)

TEMPLATE = "ollama-glimmer_chat_template.jinja"
NEXT = "<|eom|><|start|>assistant"

CALL = """<atem:function_calls>
<atem:invoke name="get_weather">
<atem:parameter name="city">Oslo</atem:parameter>
</atem:invoke>
</atem:function_calls>"""


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(roundtrip(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "assistant to=self"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS,))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_messages_to_self_are_reasoning_and_may_repeat():
    text = (
        f" to=self<|message|>Where?{NEXT} to=get_weather<|message|>{CALL}"
        f"{NEXT} to=self<|message|>There.{NEXT} to=user<|message|>Wait.<|eot|>"
    )
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "Where?There."
    assert join_content(pieces) == "Wait."
    assert [call.arguments for call in collect_calls(pieces)] == ['{"city": "Oslo"}']


def test_a_call_ends_a_message_of_reasoning():
    pieces = check_text(FAMILY, f" to=self<|message|>Hm. {CALL}", tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "Hm."
    assert [call.name for call in collect_calls(pieces)] == ["get_weather"]


def test_messages_to_the_user_are_content_with_or_without_a_header():
    for begin in ("", " to=user<|message|>", "<|message|>", FAMILY.content_prefix):
        pieces = check_text(FAMILY, f"{begin}Hello<|eot|>", tools=TOOLS, tags=TAGS)
        assert join_content(pieces) == "Hello"


def test_an_invalid_header_is_text():
    text = "<|start|>user Hello"
    check_prose(FAMILY, text, tools=TOOLS, tags=TAGS)


def test_the_grammar_has_the_syntax_of_the_family(shared):
    check_syntax(FAMILY, roundtrip(shared, TEMPLATE), begin=" to=")
