"""GLM 4.5 and later, and Laguna."""

from hypothesis import given

from app.text.families.glm import Family
from tests.text.families.reading import check_row, check_text, join_content, mixtures, prose
from tests.text.families.rows import llamacpp, mlx_lm, ollama, roundtrip, select_rows
from tests.text.families.tagged import TOOLS, add_default_tools, check_syntax

FAMILY = Family()
TAGS = FAMILY.reasoning_tags("</think>")
MARKERS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "<tool_call>now",
)

TEMPLATES = (
    "GLM-4.6.jinja",
    "GLM-4.7-Flash.jinja",
    "GLM-5.2.jinja",
    "ollama-laguna_v2_chat_template.jinja",
    "ollama-laguna_v8_chat_template.jinja",
)

EXCLUDED = {
    "ollama-glm46-135": "ollama ends a value at text that looks like the tag of the next key",
    "ollama-glm46-136": "ollama ends a value at text that looks like the tag of the next key",
    "mlxlm-13": "mlx-lm repairs a call with invalid syntax",
}

CALL = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>"""


def test_real_model_outputs_are_parsed(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *ollama(shared, "glm", name="GLM-4.6.jinja"),
        *mlx_lm(shared, "glm47"),
    ]
    for row in add_default_tools(select_rows(rows, EXCLUDED)):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "<arg_key>city</arg_key>"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert join_content(check_text(FAMILY, CALL, tools=())) == CALL


def test_prose_after_the_marker_is_not_a_name():
    text = "Write <tool_call> before a call.\n<arg_key> follows."
    assert join_content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_the_grammar_has_the_syntax_of_the_family(shared):
    check_syntax(FAMILY, roundtrip(shared, *TEMPLATES))
