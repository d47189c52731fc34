"""Families with calls in JSON after a marker: what holds for each, and what is special."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.families.json_calls import FAMILIES
from app.text.family import find_family
from tests.rows import rows
from tests.text.families.reading import (
    Call,
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
    read,
)
from tests.text.families.rows import Row, llamacpp, mlx_lm, ollama, roundtrip, select_rows, template
from tests.text.families.walking import (
    NOW,
    TOOLS,
    WEATHER,
    Walk,
    check_spelling,
    check_walks,
)

TAGS = ReasoningTags(open="<think>", close="</think>")
HERMES_TEMPLATES = (
    "Bielik-11B-v3.0-Instruct.jinja",
    "MiMo-VL.jinja",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
    "Qwen-QwQ-32B.jinja",
    "Qwen-Qwen2.5-7B-Instruct.jinja",
    "Qwen-Qwen3-0.6B.jinja",
    "Reka-Edge.jinja",
    "ortx-qwen2.5.jinja",
    "ortx-qwen3.jinja",
)
FIREFUNCTION_TEMPLATE = "fireworks-ai-llama-3-firefunction-v2.jinja"
GIGACHAT_TEMPLATE = "GigaChat3.1-10B-A1.8B.jinja"
END_OF_TURN = "<SPECIAL_12>"  # Nemotron's stop token, which is not part of the answer
JAMBA_CALLS = """<tool_calls>[
{"name": "get_weather", "arguments": {"city": "Oslo"}},
{"name": "now", "arguments": {}}
]</tool_calls>"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """load_rows: outputs of real models. excluded: IDs of rows whose expectation does not apply,
    with the reason. markers: of calls and reasoning. tags: None if no model of the family reasons.
    select_grammar_rows: the rows that the grammar accepts from `begin` on."""

    load_rows: Callable[[Path], Iterable[Row]] = lambda shared: ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    markers: tuple[str, ...]
    tags: ReasoningTags | None = None
    select_grammar_rows: Callable[[Path], list[Row]] | None = None
    begin: str = ""


CASES = {
    "firefunction": Case(
        load_rows=lambda shared: llamacpp(shared, FIREFUNCTION_TEMPLATE),
        markers=("functools",),
        select_grammar_rows=lambda shared: [
            row for row in llamacpp(shared, FIREFUNCTION_TEMPLATE) if row.calls
        ],
        begin=" functools",
    ),
    "gigachat_31": Case(
        load_rows=lambda shared: (
            *roundtrip(shared, GIGACHAT_TEMPLATE),
            *llamacpp(shared, GIGACHAT_TEMPLATE),
        ),
        excluded={
            "GigaChat3.1-10B-A1.8B/parallel": "the template writes only the first of two calls"
        },
        markers=("<|function_call|>",),
        select_grammar_rows=lambda shared: roundtrip(shared, GIGACHAT_TEMPLATE),
        begin="<|function_call|>",
    ),
    "hermes": Case(
        load_rows=lambda shared: (
            *roundtrip(shared, *HERMES_TEMPLATES),
            *llamacpp(shared, *HERMES_TEMPLATES),
            *mlx_lm(shared, "json_tools"),
            *ollama(shared, "qwen3 hermes"),
        ),
        excluded={"llamacpp-3840-173": "llama.cpp reformats the arguments and adds a space"},
        markers=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        tags=TAGS,
        select_grammar_rows=lambda shared: [
            row for row in roundtrip(shared, *HERMES_TEMPLATES) if "Reka" not in row.id
        ],
        begin="<tool_call>",
    ),
    "jamba": Case(markers=("<tool_calls>", "</tool_calls>")),
    "nemotron_v2": Case(
        load_rows=lambda shared: [
            replace(row, output=row.output.removesuffix(END_OF_TURN))
            for row in llamacpp(shared, None)
            if row.id == "llamacpp-3908-181"
        ],
        markers=("<TOOLCALL>", "</TOOLCALL>", "<think>", "</think>"),
        tags=TAGS,
    ),
}


# families with separate files, because they differ in more than the text around calls
OTHERS = {"apriel", "gigachat", "granite"}


def test_each_family_has_a_case() -> None:
    assert CASES.keys() | OTHERS == FAMILIES.keys()
    for name in OTHERS:
        assert Path(__file__).with_name(f"test_{name}.py").exists()


@rows("name", [name for name in CASES if name != "jamba"])
def test_real_model_outputs_are_parsed(shared, name):
    for row in select_rows(CASES[name].load_rows(shared), CASES[name].excluded):
        check_row(FAMILIES[name], row)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_parsing_does_not_depend_on_chunk_boundaries(name, data):
    case = CASES[name]
    text = data.draw(mixtures(*case.markers))
    in_reasoning = case.tags is not None and data.draw(st.booleans())
    check_text(
        FAMILIES[name],
        text,
        tools=[WEATHER],
        tags=case.tags,
        in_reasoning=in_reasoning,
        syntax=case.markers,
    )


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_text_without_markers_is_unchanged(name, data):
    text = data.draw(prose(*CASES[name].markers))
    check_prose(FAMILIES[name], text, tools=[WEATHER], tags=CASES[name].tags)


@rows("name", CASES)
def test_grammar_output_is_parsed_as_valid_calls(name):
    check_walks(FAMILIES[name], TOOLS)


@rows("name", [name for name, case in CASES.items() if case.select_grammar_rows])
def test_the_grammar_accepts_template_output(shared, name):
    case = CASES[name]
    assert case.select_grammar_rows is not None
    check_spelling(FAMILIES[name], case.select_grammar_rows(shared), begin=case.begin)


@rows(
    ("name", "output"),
    [
        ("jamba", JAMBA_CALLS),
        (
            "nemotron_v2",
            '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
        ),
    ],
)
def test_the_grammar_accepts_calls_of_models_without_rows(name, output):
    assert Walk(FAMILIES[name], [WEATHER, NOW]).accepts(output)


@rows("text", ["import functools\n", "functools[0]", "functools[{}]"])
def test_the_marker_of_firefunction_alone_begins_no_call(text):
    check_prose(FAMILIES["firefunction"], text, tools=[WEATHER])


def test_the_template_of_jamba_is_recognized(shared):
    name = "hfjinja-ai21labs_AI21-Jamba-Large-1.6.jinja"
    assert FAMILIES["jamba"].matches(template(shared, name))


def test_calls_of_jamba_are_parsed():
    pieces = check_text(FAMILIES["jamba"], f" Let me see.\n{JAMBA_CALLS}\n", tools=[WEATHER])
    assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
        ("get_weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert join_content(pieces) == " Let me see."


def test_templates_of_nemotron_are_recognized():
    assert FAMILIES["nemotron_v2"].matches("{{ '<TOOLCALL>[' }}")
    assert not FAMILIES["nemotron_v2"].matches("{{ '<tool_call>' }}")


def test_the_template_of_granite_4_is_recognized_as_hermes():
    """It has the roles of Granite 3, but other calls."""
    template = """{{- '<|start_of_role|>assistant<|end_of_role|>' + content.val }}
        {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
    assert find_family(template) is FAMILIES["hermes"]


def test_the_name_is_streamed_before_the_arguments():
    parser = FAMILIES["hermes"].build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    pieces = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert collect_calls(pieces) == [Call(name="get_weather", id=None, arguments="")]
    assert collect_calls([*pieces, *parser.feed('{"city": "Os')])[0].arguments == '{"city": "Os'


def test_a_marker_within_a_string_does_not_end_the_call():
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>!'
    pieces = check_text(FAMILIES["hermes"], text, tools=[WEATHER])
    assert [call.arguments for call in collect_calls(pieces)] == [
        '{"a": "</tool_call><tool_call>"}'
    ]
    assert join_content(pieces) == "!"


@rows(
    "text",
    [
        "<tool_call>",
        "a <tool_call> b",
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>{"arguments": {"city": "Oslo"}}</tool_call>',
        '<tool_call>{"name": ["get_weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", oh </tool_call>',
        '<tool_call>{"name": "get_weather"',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
)
def test_a_call_without_a_name_is_text(text):
    check_prose(FAMILIES["hermes"], text, tools=[WEATHER])


@rows(
    ("rest", "arguments", "expected_content"),
    [
        ('{"city": Oslo}}</tool_call> done', '{"city": Oslo}', "done"),
        ('{"city": "Oslo"', '{"city": "Oslo"', ""),
        ('{"city": "Oslo"}, oops}</tool_call>', '{"city": "Oslo"}, oops}', ""),
        ('{"city": 1 <tool_call>{"name": "now"}', '{"city": 1 ', ""),
    ],
)
def test_invalid_arguments_are_passed_through(rest, arguments, expected_content):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {rest}'
    pieces = check_text(FAMILIES["hermes"], text, tools=[WEATHER])
    assert collect_calls(pieces)[0].arguments == arguments
    assert join_content(pieces) == expected_content


def test_without_tools_calls_of_hermes_are_text():
    check_prose(
        FAMILIES["hermes"], '<tool_call>{"name": "f", "arguments": {}}</tool_call>', tools=[]
    )


def test_calls_in_reasoning_are_not_parsed():
    text = '<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\nNo.'
    pieces = read(FAMILIES["hermes"], [text], tools=[WEATHER], tags=TAGS)
    assert join_reasoning(pieces) == '<tool_call>{"name": "f"}</tool_call>'
    assert join_content(pieces) == "No."
    assert not collect_calls(pieces)
