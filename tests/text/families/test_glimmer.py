"""Muse Glimmer."""

from hypothesis import given

from app.text.families.glimmer import Family
from tests.text.families.reading import (
    calls,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import law, roundtrip
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


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    for row in law(roundtrip(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "assistant to=self"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS,))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_what_goes_to_itself_is_reasoning_and_may_come_again():
    text = (
        f" to=self<|message|>Where?{NEXT} to=get_weather<|message|>{CALL}"
        f"{NEXT} to=self<|message|>There.{NEXT} to=user<|message|>Wait.<|eot|>"
    )
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS)
    assert reasoning(pieces) == "Where?There."
    assert content(pieces) == "Wait."
    assert [call.arguments for call in calls(pieces)] == ['{"city": "Oslo"}']


def test_reasoning_holds_no_calls():
    pieces = check_text(FAMILY, f" to=self<|message|>{CALL}", tools=TOOLS, tags=TAGS)
    assert (reasoning(pieces), calls(pieces)) == (CALL, [])


def test_what_it_says_to_the_user_is_text_with_or_without_a_header():
    for begin in ("", " to=user<|message|>", "<|message|>", FAMILY.content_prefix):
        pieces = check_text(FAMILY, f"{begin}Hello<|eot|>", tools=TOOLS, tags=TAGS)
        assert content(pieces) == "Hello"


def test_a_header_that_is_none_stays_text():
    text = "<|start|>user Hello"
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_its_grammar_is_its_own_syntax(shared):
    check_syntax(FAMILY, roundtrip(shared, TEMPLATE), begin=" to=")
