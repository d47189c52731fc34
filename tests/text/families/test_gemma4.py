"""Gemma 4."""

from dataclasses import replace

import pytest
from hypothesis import given

from app.text.families.gemma4 import Family
from tests.text.families.reading import (
    calls,
    check_row,
    check_text,
    content,
    mixtures,
    prose,
    reasoning,
)
from tests.text.families.rows import ANY, law, llamacpp, mlx_lm, ollama, roundtrip
from tests.text.families.walking import FORMS, NOW, TYPES, WEATHER, Walk, arguments_of, check_walks
from tests.text.families.walking import spell as spelled

FAMILY = Family()
TOOLS = (WEATHER, NOW)
TAGS = FAMILY.reasoning_tags("<|channel>")

TEMPLATES = ("ollama-gemma4_e2b_chat_template.jinja", "ortx-gemma-4.jinja")
LEFT_OUT = {
    "llamacpp-2466-59": "not split there: reasoning is asked to stay in the content",
    "ollama-gemma4-88": "every number is a float there",
    "ollama-gemma4-110": "thoughts that were switched off are dropped there",
}

CALL = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'


def test_outputs_of_real_models_are_read_however_they_are_cut(shared):
    rows = [
        *roundtrip(shared, *TEMPLATES),
        *llamacpp(shared, "google-gemma-4-31B-it.jinja"),
        *ollama(shared, "gemma4", name=TEMPLATES[0]),
        *mlx_lm(shared, "gemma4"),
    ]
    for row in law(rows, LEFT_OUT):
        # ollama reads calls of tools that nobody offered
        check_row(FAMILY, replace(row, tools=row.tools or (ANY,), tagged=True, in_reasoning=False))


@given(mixtures(*FAMILY.markers, CALL, "call:now{", "city:", "}", "thought\n"))
def test_any_text_is_read_the_same_however_it_is_cut(text):
    check_text(FAMILY, text, tools=TOOLS, tags=TAGS, syntax=FAMILY.markers)
    check_text(FAMILY, text, tools=(), tags=TAGS, in_reasoning=True)


@given(prose("<"))
def test_text_without_markers_is_left_as_it_is(text):
    assert content(check_text(FAMILY, text, tools=TOOLS, tags=TAGS)) == text


def test_without_tools_calls_are_text():
    assert content(check_text(FAMILY, CALL, tools=())) == CALL


def test_a_prompt_may_have_opened_the_channel():
    assert TAGS is not None
    assert FAMILY.ends_in_reasoning("<|turn>model\n<|channel>thought\n", TAGS)
    assert not FAMILY.ends_in_reasoning("<|turn>model\n<|channel>thought\n<channel|>", TAGS)
    text = f"Look it up.\n<channel|>{CALL}<|channel>thought\nSo.<channel|>Done."
    pieces = check_text(FAMILY, text, tools=TOOLS, tags=TAGS, in_reasoning=True)
    assert (reasoning(pieces), content(pieces)) == ("Look it up.So.", "Done.")
    assert [call.name for call in calls(pieces)] == ["get_weather"]


def test_a_thought_that_begins_like_the_label_is_kept():
    pieces = check_text(FAMILY, "<|channel>thoughtful<channel|>", tools=TOOLS, tags=TAGS)
    assert reasoning(pieces) == "thoughtful"


@pytest.mark.parametrize(
    ("written", "read"),
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
def test_values_are_what_their_quotes_and_the_schema_say(written, read):
    text = f"<|tool_call>call:get_weather{written}<tool_call|>"
    pieces = check_text(FAMILY, text, tools=TOOLS)
    assert [call.arguments for call in calls(pieces)] == [read]
    assert content(pieces) == ""


def test_what_is_no_call_stays_text():
    text = "<|tool_call>get_weather{}"
    assert content(check_text(FAMILY, text, tools=TOOLS)) == text


def test_arguments_that_are_broken_are_handed_on_as_they_are():
    for broken, read in (("city:", '"city": '), ("city:Oslo", '"city": "Oslo"'), ("Oslo", "Oslo")):
        text = f"<|tool_call>call:get_weather{{{broken}<tool_call|>Done, and done."
        pieces = check_text(FAMILY, text, tools=TOOLS)
        assert [call.arguments for call in calls(pieces)] == [f"{{{read}"]
        assert content(pieces) == "Done, and done."


def test_what_its_grammar_produces_are_calls_that_satisfy_their_schemas():
    check_walks(FAMILY, (WEATHER, NOW, TYPES), endings=('<|"|>',))


def test_a_form_of_strings_is_left_to_json():
    assert FAMILY.build_tool_call_grammar((FORMS,), spelled, arguments_of) is None


def test_its_grammar_accepts_what_the_template_writes(shared):
    rows = roundtrip(shared, *TEMPLATES)
    walk = Walk(FAMILY, rows[0].tools)
    for row in rows:
        if "write_file" not in row.output:  # the template sorts the keys
            assert walk.accepts(row.output.removesuffix("<|tool_response>")), row.output
