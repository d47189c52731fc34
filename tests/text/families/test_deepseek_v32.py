"""DeepSeek V3.2."""

from hypothesis import given

from app.text.families.deepseek_v32 import Family
from tests.text.families.reading import check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, llamacpp
from tests.text.families.tagged import TOOLS, calls_in, check_syntax

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("</think>")
MARKERS = (
    *(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>",
    ),
    *('<｜DSML｜parameter name="', "</｜DSML｜parameter>", '<｜DSML｜invoke name="now">'),
)

TEMPLATE = "deepseek-ai-DeepSeek-V3.2.jinja"

CALL = """<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    for row in law(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, 'city" string="true">Oslo'))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_the_attribute_tells_text_from_json_where_the_schema_does_not():
    text = CALL.replace("city", "other").replace("Oslo", "12")
    assert [call.arguments for call in calls_in(FAMILY, text)] == ['{"other": "12"}']
    text = text.replace('string="true"', 'string="false"')
    assert [call.arguments for call in calls_in(FAMILY, text)] == ['{"other": 12}']


def test_the_schema_has_the_last_word():
    text = CALL.replace("Oslo", "12").replace('string="true"', 'string="false"')
    assert [call.arguments for call in calls_in(FAMILY, text)] == ['{"city": "12"}']
    text = CALL.replace("city", "days").replace("Oslo", "12")
    assert [call.arguments for call in calls_in(FAMILY, text)] == ['{"days": 12}']


def test_its_grammar_is_its_own_syntax(shared):
    check_syntax(FAMILY, [row for row in llamacpp(shared, TEMPLATE) if row.calls])
