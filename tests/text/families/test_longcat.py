"""LongCat. Its template is not in the test data."""

from hypothesis import given

from app.text.families.longcat import Family
from tests.text.families.reading import check_row, check_text, join_content, mixtures, prose
from tests.text.families.rows import mlx_lm, select_rows
from tests.text.families.tagged import TOOLS, check_syntax

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("</longcat_think>")
MARKERS = (
    *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>"),
    *("<longcat_arg_value>", "</longcat_arg_value>", "<longcat_tool_call>now"),
)

CALL = """<longcat_tool_call>get_weather
<longcat_arg_key>city</longcat_arg_key>
<longcat_arg_value>Oslo</longcat_arg_value>
</longcat_tool_call>"""


def test_real_model_outputs_are_parsed(shared):
    for row in select_rows(mlx_lm(shared, "longcat"), {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "<longcat_arg_key>city</longcat_arg_key>"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<longcat_think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_template_is_recognized_by_its_markers():
    assert FAMILY.matches("{{ '<longcat_tool_call>' }}")
    assert not FAMILY.matches("<tool_call><arg_key>")


def test_the_reasoning_tags_are_those_of_the_template():
    assert FAMILY.reasoning_tags("<longcat_tool_call>") is None
    assert TAGS is not None
    text = "<longcat_think>Where?</longcat_think>There."
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == "There."


def test_the_grammar_has_the_syntax_of_the_family(shared):
    rows = [row for row in mlx_lm(shared, "longcat") if row.id == "mlxlm-18"]
    check_syntax(FAMILY, rows)
