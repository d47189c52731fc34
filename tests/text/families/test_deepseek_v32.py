"""DeepSeek V3.2."""

from hypothesis import given

from app.text.families.deepseek_v32 import Family
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import llamacpp, select_rows
from tests.text.families.tagged import TOOLS, check_syntax, parse_calls

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


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(llamacpp(shared, TEMPLATE), {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, 'city" string="true">Oslo'))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    check_prose(FAMILY, CALL, tools=())


def test_the_attribute_gives_the_type_where_the_schema_does_not():
    text = CALL.replace("city", "other").replace("Oslo", "12")
    assert [call.arguments for call in parse_calls(FAMILY, text)] == ['{"other": "12"}']
    text = text.replace('string="true"', 'string="false"')
    assert [call.arguments for call in parse_calls(FAMILY, text)] == ['{"other": 12}']


def test_the_schema_overrides_the_attribute():
    text = CALL.replace("Oslo", "12").replace('string="true"', 'string="false"')
    assert [call.arguments for call in parse_calls(FAMILY, text)] == ['{"city": "12"}']
    text = CALL.replace("city", "days").replace("Oslo", "12")
    assert [call.arguments for call in parse_calls(FAMILY, text)] == ['{"days": 12}']


def test_the_grammar_has_the_syntax_of_the_family(shared):
    check_syntax(FAMILY, [row for row in llamacpp(shared, TEMPLATE) if row.calls])
