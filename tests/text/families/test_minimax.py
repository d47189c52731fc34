"""MiniMax M2, of which no template is at hand."""

from hypothesis import given

from app.text.families.minimax import Family
from tests.text.families.reading import check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, llamacpp, mlx_lm
from tests.text.families.tagged import TOOLS, calls_in, check_syntax

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


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    described = [row for row in llamacpp(shared, None) if row.prompt.startswith("]~b]ai")]
    for row in law([*described, *mlx_lm(shared, "minimax_m2")], {}):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, 'city">Oslo'))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_template_is_told_by_its_markers():
    assert FAMILY.matches("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}")
    assert not FAMILY.matches("<tool_call><function=")


def test_several_calls_stand_in_one_pair_of_tags():
    more = CALL.replace("</invoke>", '</invoke>\n<invoke name="now">\n</invoke>')
    assert [(call.name, call.arguments) for call in calls_in(FAMILY, more)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]


def test_its_grammar_is_its_own_syntax(shared):
    rows = [row for row in llamacpp(shared, None) if row.id == "llamacpp-3895-180"]
    check_syntax(FAMILY, rows)
