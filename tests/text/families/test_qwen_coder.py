"""Qwen3-Coder, and whoever writes calls as it does."""

from hypothesis import given

from app.text.families.qwen_coder import Family
from tests.text.families.reading import check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, llamacpp, mlx_lm, ollama, roundtrip
from tests.text.families.tagged import TOOLS, calls_in, check_syntax, offered

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("</think>")
MARKERS = (
    *("<tool_call>", "</tool_call>", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "<function=now>"),
)

TEMPLATES = (
    "Qwen3-Coder.jinja",
    "Qwen3.5-4B.jinja",
    "ollama-qwen38_chat_template.jinja",
    "StepFun3.5-Flash.jinja",
    "stepfun-ai-Step-3.5-Flash.jinja",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
)

LEFT_OUT = {
    "llamacpp-1691-1": "not split there: reasoning is asked to stay in the content",
    "llamacpp-2141-29": "not split there: reasoning is asked to stay in the content",
    "llamacpp-1845-10": "a tag that repeats the prompt's is a part of the reasoning there",
    "llamacpp-1894-13": "the line end before a call is a part of the content there",
    "llamacpp-1915-14": "the line end before a call is a part of the content there",
    "llamacpp-1937-15": "the line end before a call is a part of the content there",
    "llamacpp-2011-18": "the line end before a call is a part of the content there",
    "llamacpp-2234-36": "the line end behind reasoning is a part of it there",
    "ollama-qwen3coder-274": "a value that no schema speaks of is never read as JSON there",
}

CALL = """<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>"""


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *ollama(shared, "nemotron", name="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"),
        *ollama(shared, "qwen3-coder", name="Qwen3-Coder.jinja"),
        *mlx_lm(shared, "qwen3_coder"),
    ]
    for row in offered(law(rows, LEFT_OUT)):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "city>\nOslo\n"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_call_without_the_outer_tag_must_be_one_of_the_tools():
    bare = CALL.removeprefix("<tool_call>\n")
    assert [call.name for call in calls_in(FAMILY, bare)] == ["get_weather"]
    other = bare.replace("get_weather", "map")
    assert content(check_text(FAMILY, other, tools=TOOLS)) == other


def test_its_grammar_is_its_own_syntax(shared):
    rows = roundtrip(shared, *TEMPLATES)
    # Step writes no line end between calls
    check_syntax(FAMILY, [row for row in rows if "</tool_call><tool_call>" not in row.output])
