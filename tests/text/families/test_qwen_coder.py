"""Qwen3-Coder, and other models with the same call syntax."""

from hypothesis import given

from app.text.families.qwen_coder import Family
from tests.text.families.reading import check_row, check_text, join_content, mixtures, prose
from tests.text.families.rows import llamacpp, mlx_lm, ollama, roundtrip, select_rows
from tests.text.families.tagged import TOOLS, add_default_tools, check_syntax, parse_calls

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

EXCLUDED = {
    "llamacpp-1691-1": "llama.cpp was asked to leave reasoning in the content",
    "llamacpp-2141-29": "llama.cpp was asked to leave reasoning in the content",
    "llamacpp-1845-10": "llama.cpp keeps a repeated tag of the prompt in the reasoning",
    "llamacpp-1894-13": "llama.cpp keeps the line break before a call in the content",
    "llamacpp-1915-14": "llama.cpp keeps the line break before a call in the content",
    "llamacpp-1937-15": "llama.cpp keeps the line break before a call in the content",
    "llamacpp-2011-18": "llama.cpp keeps the line break before a call in the content",
    "llamacpp-2234-36": "llama.cpp includes the line break after the reasoning in it",
    "ollama-qwen3coder-274": "ollama never parses a value without a schema as JSON",
}

CALL = """<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>"""


def test_real_model_outputs_are_parsed(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *ollama(shared, "nemotron", name="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"),
        *ollama(shared, "qwen3-coder", name="Qwen3-Coder.jinja"),
        *mlx_lm(shared, "qwen3_coder"),
    ]
    for row in add_default_tools(select_rows(rows, EXCLUDED)):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "city>\nOslo\n"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_call_without_the_outer_tag_must_name_a_tool():
    untagged = CALL.removeprefix("<tool_call>\n")
    assert [call.name for call in parse_calls(FAMILY, untagged)] == ["get_weather"]
    other = untagged.replace("get_weather", "map")
    assert join_content(check_text(FAMILY, other, tools=TOOLS)) == other


def test_the_grammar_has_the_syntax_of_the_family(shared):
    rows = roundtrip(shared, *TEMPLATES)
    # Step writes no line break between calls
    check_syntax(FAMILY, [row for row in rows if "</tool_call><tool_call>" not in row.output])
