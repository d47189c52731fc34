"""ByteDance Seed-OSS."""

from hypothesis import given

from app.text.families.seed_oss import Family
from tests.text.families.reading import check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, llamacpp, roundtrip
from tests.text.families.tagged import TOOLS, calls_in, check_syntax

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("")
MARKERS = (
    *("<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "<function=now>"),
)

TEMPLATE = "ByteDance-Seed-OSS.jinja"

LEFT_OUT = {
    "llamacpp-2733-92": "line ends beside a value are no part of it there; the template keeps them",
}

CALL = """<seed:tool_call>
<function=get_weather>
<parameter=city>Oslo</parameter>
</function>
</seed:tool_call>"""


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)]
    for row in law(rows, LEFT_OUT):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "city>Oslo"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<seed:think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_value_is_all_that_stands_between_its_tags():
    text = CALL.replace("Oslo", "\n Oslo\n\n")
    assert [call.arguments for call in calls_in(FAMILY, text)] == ['{"city": "\\n Oslo\\n\\n"}']


def test_its_grammar_is_its_own_syntax(shared):
    rows = roundtrip(shared, TEMPLATE)
    # JSON is asked for, where the template prints Python
    check_syntax(FAMILY, [row for row in rows if "True" not in row.output])
