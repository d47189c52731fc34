"""LongCat, of which no template is at hand."""

from hypothesis import given

from app.text.families.longcat import Family
from tests.text.families.reading import check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, mlx_lm
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


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    for row in law(mlx_lm(shared, "longcat"), {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "<longcat_arg_key>city</longcat_arg_key>"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<longcat_think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_template_is_told_by_its_markers():
    assert FAMILY.matches("{{ '<longcat_tool_call>' }}")
    assert not FAMILY.matches("<tool_call><arg_key>")


def test_reasoning_is_marked_as_the_template_marks_it():
    assert FAMILY.reasoning_tags("<longcat_tool_call>") is None
    assert TAGS is not None
    text = "<longcat_think>Where?</longcat_think>There."
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == "There."


def test_its_grammar_is_its_own_syntax(shared):
    rows = [row for row in mlx_lm(shared, "longcat") if row.id == "mlxlm-18"]
    check_syntax(FAMILY, rows)
