"""MiniMax M2. Its template is not in the test data."""

from hypothesis import given

from app.text.families.minimax import Family
from tests.text.families.reading import check_row, check_text, join_content, mixtures, prose
from tests.text.families.rows import llamacpp, mlx_lm, select_rows
from tests.text.families.tagged import TOOLS, check_syntax, parse_calls

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("</think>")
MARKERS = (
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>"),
    *('<parameter name="', "</parameter>", '<invoke name="now">'),
)

CALL = """<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>"""


def test_real_model_outputs_are_parsed(shared):
    rows = [row for row in llamacpp(shared, None) if row.prompt.startswith("]~b]ai")]
    for row in select_rows([*rows, *mlx_lm(shared, "minimax_m2")], {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, 'city">Oslo'))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_template_is_recognized_by_its_markers():
    assert FAMILY.matches("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}")
    assert not FAMILY.matches("<tool_call><function=")


def test_one_pair_of_tags_may_contain_several_calls():
    text = CALL.replace("</invoke>", '</invoke>\n<invoke name="now">\n</invoke>')
    assert [(call.name, call.arguments) for call in parse_calls(FAMILY, text)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]


def test_the_grammar_has_the_syntax_of_the_family(shared):
    rows = [row for row in llamacpp(shared, None) if row.id == "llamacpp-3895-180"]
    check_syntax(FAMILY, rows)
