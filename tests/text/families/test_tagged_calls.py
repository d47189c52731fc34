"""Families with calls in tags: what holds for each, and what is special."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.families.tagged_calls import FAMILIES
from tests.rows import rows
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.rows import Row, llamacpp, mlx_lm, ollama, roundtrip, select_rows
from tests.text.families.samples import SAMPLES
from tests.text.families.tagged import TOOLS, add_default_tools, check_syntax, parse_calls

GLM_TEMPLATES = (
    "GLM-4.6.jinja",
    "GLM-4.7-Flash.jinja",
    "GLM-5.2.jinja",
    "ollama-laguna_v2_chat_template.jinja",
    "ollama-laguna_v8_chat_template.jinja",
)
QWEN_TEMPLATES = (
    "Qwen3-Coder.jinja",
    "Qwen3.5-4B.jinja",
    "ollama-qwen38_chat_template.jinja",
    "StepFun3.5-Flash.jinja",
    "stepfun-ai-Step-3.5-Flash.jinja",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """load_rows: outputs of real models. excluded: IDs of rows whose expectation does not apply,
    with the reason. select_grammar_rows: the rows that the grammar accepts. template: the part of a
    template that names the reasoning tags. marks: the parts of the syntax besides the outer tags.
    parameter: the start of a parameter, without its tag."""

    load_rows: Callable[[Path], Iterable[Row]]
    excluded: Mapping[str, str] = field(default_factory=dict)
    select_grammar_rows: Callable[[Path], list[Row]]
    template: str = "</think>"
    marks: tuple[str, ...]
    parameter: str


DSML_MARKS = (
    *('<｜DSML｜invoke name="', "</｜DSML｜invoke>", '<｜DSML｜invoke name="now">'),
    *('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
)
FUNCTION_MARKS = ("<function=", "</function>", "<parameter=", "</parameter>", "<function=now>")
_KEPT_LINE_BREAK = "llama.cpp keeps the line break before a call in the content"
_KEPT_REASONING = "llama.cpp was asked to leave reasoning in the content"
_OLLAMA_VALUE_END = "ollama ends a value at text that looks like the tag of the next key"


def _minimax_rows(shared: Path) -> list[Row]:
    return [row for row in llamacpp(shared, None) if row.prompt.startswith("]~b]ai")]


CASES = {
    "deepseek_v32": Case(
        load_rows=lambda shared: llamacpp(shared, "deepseek-ai-DeepSeek-V3.2.jinja"),
        select_grammar_rows=lambda shared: [
            row for row in llamacpp(shared, "deepseek-ai-DeepSeek-V3.2.jinja") if row.calls
        ],
        marks=DSML_MARKS,
        parameter='city" string="true">Oslo',
    ),
    "deepseek_v4": Case(
        load_rows=lambda shared: roundtrip(shared, "deepseek-ai-DeepSeek-V4.jinja"),
        select_grammar_rows=lambda shared: roundtrip(shared, "deepseek-ai-DeepSeek-V4.jinja"),
        marks=DSML_MARKS,
        parameter='city" string="true">Oslo',
    ),
    "glm": Case(
        load_rows=lambda shared: (
            *roundtrip(shared, *GLM_TEMPLATES),
            *llamacpp(shared, *GLM_TEMPLATES),
            *ollama(shared, "glm", name="GLM-4.6.jinja"),
            *mlx_lm(shared, "glm47"),
        ),
        excluded={
            "ollama-glm46-135": _OLLAMA_VALUE_END,
            "ollama-glm46-136": _OLLAMA_VALUE_END,
            "mlxlm-13": "mlx-lm repairs a call with invalid syntax",
        },
        select_grammar_rows=lambda shared: roundtrip(shared, *GLM_TEMPLATES),
        marks=(
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<tool_call>now",
        ),
        parameter="<arg_key>city</arg_key>",
    ),
    # its template is not in the test data
    "longcat": Case(
        load_rows=lambda shared: mlx_lm(shared, "longcat"),
        select_grammar_rows=lambda shared: [
            row for row in mlx_lm(shared, "longcat") if row.id == "mlxlm-18"
        ],
        template="</longcat_think>",
        marks=(
            *("<longcat_arg_key>", "</longcat_arg_key>"),
            *("<longcat_arg_value>", "</longcat_arg_value>", "<longcat_tool_call>now"),
        ),
        parameter="<longcat_arg_key>city</longcat_arg_key>",
    ),
    # its template is not in the test data
    "minimax": Case(
        load_rows=lambda shared: (*_minimax_rows(shared), *mlx_lm(shared, "minimax_m2")),
        select_grammar_rows=lambda shared: [
            row for row in _minimax_rows(shared) if row.id == "llamacpp-3895-180"
        ],
        marks=(
            *('<invoke name="', "</invoke>", '<invoke name="now">'),
            *('<parameter name="', "</parameter>"),
        ),
        parameter='city">Oslo',
    ),
    "qwen_coder": Case(
        load_rows=lambda shared: (
            *roundtrip(shared, *QWEN_TEMPLATES),
            *llamacpp(shared, *QWEN_TEMPLATES),
            *ollama(shared, "nemotron", name="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"),
            *ollama(shared, "qwen3-coder", name="Qwen3-Coder.jinja"),
            *mlx_lm(shared, "qwen3_coder"),
        ),
        excluded={
            "llamacpp-1691-1": _KEPT_REASONING,
            "llamacpp-2141-29": _KEPT_REASONING,
            "llamacpp-1845-10": "llama.cpp keeps a repeated tag of the prompt in the reasoning",
            "llamacpp-1894-13": _KEPT_LINE_BREAK,
            "llamacpp-1915-14": _KEPT_LINE_BREAK,
            "llamacpp-1937-15": _KEPT_LINE_BREAK,
            "llamacpp-2011-18": _KEPT_LINE_BREAK,
            "llamacpp-2234-36": "llama.cpp includes the line break after the reasoning in it",
            "ollama-qwen3coder-274": "ollama never parses a value without a schema as JSON",
        },
        # Step writes no line break between calls
        select_grammar_rows=lambda shared: [
            row
            for row in roundtrip(shared, *QWEN_TEMPLATES)
            if "</tool_call><tool_call>" not in row.output
        ],
        marks=FUNCTION_MARKS,
        parameter="city>\nOslo\n",
    ),
    "seed_oss": Case(
        load_rows=lambda shared: (
            *roundtrip(shared, "ByteDance-Seed-OSS.jinja"),
            *llamacpp(shared, "ByteDance-Seed-OSS.jinja"),
        ),
        excluded={
            "llamacpp-2733-92": "llama.cpp strips line breaks around a value; the template keeps "
            "them"
        },
        # the family expects JSON, the template prints Python
        select_grammar_rows=lambda shared: [
            row for row in roundtrip(shared, "ByteDance-Seed-OSS.jinja") if "True" not in row.output
        ],
        template="</seed:think>",
        marks=FUNCTION_MARKS,
        parameter="city>Oslo",
    ),
}


def list_markers(name: str) -> tuple[str, ...]:
    tags = FAMILIES[name].call_tags
    return (tags.before, tags.after, *CASES[name].marks)


def test_each_family_has_a_case() -> None:
    assert CASES.keys() == FAMILIES.keys()


@rows("name", CASES)
def test_real_model_outputs_are_parsed(shared, name):
    case = CASES[name]
    for row in add_default_tools(select_rows(case.load_rows(shared), case.excluded)):
        check_row(FAMILIES[name], row)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_parsing_does_not_depend_on_chunk_boundaries(name, data):
    family, case, markers = FAMILIES[name], CASES[name], list_markers(name)
    text = data.draw(mixtures(*markers, SAMPLES[name], case.parameter))
    tags = family.reasoning_tags(case.template)
    assert tags is not None
    check_text(family, text, tools=TOOLS, tags=tags, syntax=(*markers, tags.open))
    check_text(family, text, tools=TOOLS, tags=tags, in_reasoning=True)


@pytest.mark.parametrize("name", CASES)
@given(text=prose("<"))
def test_text_without_markers_is_unchanged(name, text):
    family = FAMILIES[name]
    tags = family.reasoning_tags(CASES[name].template)
    assert join_content(check_text(family, text, tools=TOOLS, tags=tags)) == text


@rows("name", CASES)
def test_without_tools_calls_are_text(name):
    check_prose(FAMILIES[name], SAMPLES[name], tools=())


@rows("name", CASES)
def test_the_grammar_has_the_syntax_of_the_family(shared, name):
    check_syntax(FAMILIES[name], CASES[name].select_grammar_rows(shared))


@rows("name", ["deepseek_v32", "deepseek_v4"])
def test_the_attribute_gives_the_type_where_the_schema_does_not(name):
    text = SAMPLES[name].replace("city", "other").replace("Oslo", "12")
    calls = parse_calls(FAMILIES[name], text)
    assert [call.arguments for call in calls] == ['{"other": "12"}']
    text = text.replace('string="true"', 'string="false"')
    calls = parse_calls(FAMILIES[name], text)
    assert [call.arguments for call in calls] == ['{"other": 12}']


@rows("name", ["deepseek_v32", "deepseek_v4"])
def test_the_schema_overrides_the_attribute(name):
    call = SAMPLES[name].replace("Oslo", "12")
    text = call.replace('string="true"', 'string="false"')
    assert [found.arguments for found in parse_calls(FAMILIES[name], text)] == ['{"city": "12"}']
    text = call.replace("city", "days")
    assert [found.arguments for found in parse_calls(FAMILIES[name], text)] == ['{"days": 12}']


def test_prose_after_the_marker_of_glm_is_not_a_name():
    text = "Write <tool_call> before a call.\n<arg_key> follows."
    assert join_content(check_text(FAMILIES["glm"], text, tools=TOOLS)) == text


@rows(
    ("name", "template", "other"),
    [
        ("longcat", "{{ '<longcat_tool_call>' }}", "<tool_call><arg_key>"),
        (
            "minimax",
            "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
            "<tool_call><function=",
        ),
    ],
)
def test_a_template_is_recognized_by_its_markers(name, template, other):
    assert FAMILIES[name].matches(template)
    assert not FAMILIES[name].matches(other)


def test_the_reasoning_tags_are_those_of_the_template():
    family = FAMILIES["longcat"]
    assert family.reasoning_tags("<longcat_tool_call>") is None
    tags = family.reasoning_tags("</longcat_think>")
    text = "<longcat_think>Where?</longcat_think>There."
    assert join_content(check_text(family, text, tools=TOOLS, tags=tags)) == "There."


def test_one_pair_of_tags_of_minimax_may_contain_several_calls():
    text = SAMPLES["minimax"].replace("</invoke>", '</invoke>\n<invoke name="now">\n</invoke>')
    assert [(call.name, call.arguments) for call in parse_calls(FAMILIES["minimax"], text)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]


def test_a_call_without_the_outer_tag_must_name_a_tool():
    family = FAMILIES["qwen_coder"]
    untagged = SAMPLES["qwen_coder"].removeprefix("<tool_call>\n")
    assert [call.name for call in parse_calls(family, untagged)] == ["get_weather"]
    other = untagged.replace("get_weather", "map")
    assert join_content(check_text(family, other, tools=TOOLS)) == other


def test_a_value_of_seed_oss_is_all_text_between_its_tags():
    text = SAMPLES["seed_oss"].replace("Oslo", "\n Oslo\n\n")
    calls = parse_calls(FAMILIES["seed_oss"], text)
    assert [call.arguments for call in calls] == ['{"city": "\\n Oslo\\n\\n"}']
