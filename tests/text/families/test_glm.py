"""GLM 4.5 and later, and Laguna."""

from hypothesis import given

from app.text.families.glm import Family
from tests.text.families.reading import check_row, check_text, content, mixtures, prose
from tests.text.families.rows import law, llamacpp, mlx_lm, ollama, roundtrip
from tests.text.families.tagged import TOOLS, check_syntax, offered

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

LEFT_OUT = {
    "ollama-glm46-135": "a value may hold what looks like the next key's tag; there it may not",
    "ollama-glm46-136": "a value may hold what looks like the next key's tag; there it may not",
    "mlxlm-13": "a repair of what is no call in this syntax",
}

CALL = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>"""


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, *TEMPLATES),
        *ollama(shared, "glm", name="GLM-4.6.jinja"),
        *mlx_lm(shared, "glm47"),
    ]
    for row in offered(law(rows, LEFT_OUT)):
        check_row(FAMILY, row)


@given(mixtures(*MARKERS, CALL, "<arg_key>city</arg_key>"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=(*MARKERS, "<think>"))
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_prose_behind_the_marker_is_no_name():
    text = "Write <tool_call> before a call.\n<arg_key> follows."
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_its_grammar_is_its_own_syntax(shared):
    check_syntax(FAMILY, roundtrip(shared, *TEMPLATES))
