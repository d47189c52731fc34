"""ByteDance Seed-OSS."""

from hypothesis import given

from app.text.families.seed_oss import Family
from tests.text.families.reading import check_row, check_text, join_content, mixtures, prose
from tests.text.families.rows import llamacpp, roundtrip, select_rows
from tests.text.families.tagged import TOOLS, check_syntax, parse_calls

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("")
MARKERS = (
    *("<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "<function=now>"),
)

TEMPLATE = "ByteDance-Seed-OSS.jinja"

EXCLUDED = {
    "llamacpp-2733-92": "llama.cpp strips line breaks around a value; the template keeps them",
}

CALL = """<seed:tool_call>
<function=get_weather>
<parameter=city>Oslo</parameter>
</function>
</seed:tool_call>"""


def test_real_model_outputs_are_parsed(shared):
    rows = [*roundtrip(shared, TEMPLATE), *llamacpp(shared, TEMPLATE)]
    for row in select_rows(rows, EXCLUDED):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "city>Oslo"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<seed:think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_value_is_all_text_between_its_tags():
    text = CALL.replace("Oslo", "\n Oslo\n\n")
    assert [call.arguments for call in parse_calls(FAMILY, text)] == ['{"city": "\\n Oslo\\n\\n"}']


def test_the_grammar_has_the_syntax_of_the_family(shared):
    rows = roundtrip(shared, TEMPLATE)
    # the family expects JSON, the template prints Python
    check_syntax(FAMILY, [row for row in rows if "True" not in row.output])
