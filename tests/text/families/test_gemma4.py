"""Gemma 4."""

from dataclasses import replace

from hypothesis import given

from app.text.families.gemma import FAMILIES
from tests.rows import rows
from tests.text.families.reading import (
    check_prose,
    check_row,
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    mixtures,
    prose,
)
from tests.text.families.rows import ANY, llamacpp, mlx_lm, ollama, roundtrip, select_rows
from tests.text.families.walking import (
    FORMS,
    NOW,
    TYPES,
    WEATHER,
    Walk,
    arguments_of,
    check_walks,
    spell,
)

FAMILY = FAMILIES["gemma4"]
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("<|channel>")

TEMPLATES = ("ollama-gemma4_e2b_chat_template.jinja", "ortx-gemma-4.jinja")
EXCLUDED = {
    "llamacpp-2466-59": "llama.cpp was asked to leave reasoning in the content",
    "ollama-gemma4-88": "ollama parses every number as a float",
    "ollama-gemma4-110": "ollama drops reasoning that was disabled",
}

CALL = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'


def test_real_model_outputs_are_parsed(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, "google-gemma-4-31B-it.jinja"),
        *ollama(shared, "gemma4", name=TEMPLATES[0]),
        *mlx_lm(shared, "gemma4"),
    ]
    for row in select_rows(rows, EXCLUDED):
        # ollama also parses calls to unknown tools
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,), tagged=True, in_reasoning=False))


@given(mixtures(*FAMILY.markers, CALL, "call:now{", "city:", "}", "thought\n"))
def test_parsing_does_not_depend_on_chunk_boundaries(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_unchanged(text):
    assert join_content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    check_prose(FAMILY, CALL, tools=())


def test_a_prompt_may_have_opened_the_channel():
    assert TAGS is not None
    assert FAMILY.ends_in_reasoning("<|turn>model\n<|channel>thought\n", TAGS)
    assert not FAMILY.ends_in_reasoning("<|turn>model\n<|channel>thought\n<channel|>", TAGS)
    text = f"Look it up.\n<channel|>{CALL}<|channel>thought\nSo.<channel|>Done."
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)
    assert (join_reasoning(pieces), join_content(pieces)) == ("Look it up.So.", "Done.")
    assert [call.name for call in collect_calls(pieces)] == ["get_weather"]


def test_reasoning_that_begins_like_the_label_is_kept():
    pieces = check_text(FAMILY, "<|channel>thoughtful<channel|>", tools=TOOLS, tags=TAGS)
    assert join_reasoning(pieces) == "thoughtful"


@rows(
    ("raw", "expected"),
    [
        ("{city:Oslo}", '{"city": "Oslo"}'),
        ("{city:New York, days:3}", '{"city": "New York", "days": 3}'),
        ("{city:42}", '{"city": "42"}'),
        ("{days:42}", '{"days": 42}'),
        ("{unknown:42,other:a b,last:None}", '{"unknown": 42, "other": "a b", "last": null}'),
        ('{<|"|>city<|"|>:"say \\"hi\\""}', '{"city": "say \\"hi\\""}'),
        ('{city:<|"|>a"b\\n<|"|>}', '{"city": "a\\"b\\\\n"}'),
        ('{city:<|"|><tool_call|>}<|"|>}', '{"city": "<tool_call|>}"}'),
        ("{}", "{}"),
        ("{city:[1,[true,{a:null}]]}", '{"city": [1, [true, {"a": null}]]}'),
    ],
)
def test_values_are_typed_by_their_quotes_and_the_schema(raw, expected):
    text = f"<|tool_call>call:get_weather{raw}<tool_call|>"
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in collect_calls(pieces)] == [expected]
    assert join_content(pieces) == ""


def test_an_invalid_call_is_text():
    text = "<|tool_call>get_weather{}"
    check_prose(FAMILY, text, tools=TOOLS)


def test_invalid_arguments_are_passed_through():
    for broken, expected in (
        ("city:", '"city": '),
        ("city:Oslo", '"city": "Oslo"'),
        ("Oslo", "Oslo"),
    ):
        text = f"<|tool_call>call:get_weather{{{broken}<tool_call|>Done, and done."
        pieces = check_text(FAMILY, text, tools=TOOLS)
        assert [call.arguments for call in collect_calls(pieces)] == [f"{{{expected}"]
        assert join_content(pieces) == "Done, and done."


def test_grammar_output_is_parsed_as_valid_calls():
    check_walks(FAMILY, (WEATHER, NOW, TYPES), endings=('<|"|>',))


def test_string_patterns_are_left_to_json():
    assert FAMILY.build_tool_call_grammar((FORMS,), spell, arguments_of) is None


def test_the_grammar_accepts_template_output(shared):
    rows = roundtrip(shared, *TEMPLATES)
    walk = Walk(FAMILY, rows[0].tools)
    for row in rows:
        if "write_file" not in row.output:  # the template sorts the keys
            assert walk.accepts(row.output.removesuffix("<|tool_response>")), row.output
