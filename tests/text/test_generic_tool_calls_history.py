"""Calls of earlier turns, rendered in the content of those turns."""

from pathlib import Path

import pytest

from app.core.errors import AppError
from app.core.requests import Message, ToolCall
from app.text.families import harmony
from app.text.family import ChatFamily, load_families
from app.text.generic_tool_calls import inline_tool_calls
from app.text.syntax.output_parser import ToolCallArguments, ToolCallStart
from tests.text.families.rows import template
from tests.text.templates import USER, WEATHER, build_prompt, calls, make_prompt_builder, result

HERMES = load_families()["hermes"]
GRANITE = load_families()["granite"]
LFM2 = load_families()["lfm2"]
MISTRAL_V13 = load_families()["mistral_v13"]
QWEN_CODER = load_families()["qwen_coder"]
GIGACHAT_31 = load_families()["gigachat_31"]
TWO = (
    ToolCall(id="a", name="get_weather", arguments='{"city": "Os\\"lo", "in": [1, null, true]}'),
    ToolCall(id="b", name="now", arguments=""),
)


@pytest.mark.parametrize("family", [HERMES, GRANITE, LFM2, MISTRAL_V13])
def test_rendered_calls_are_parsed_back(family: ChatFamily) -> None:
    text = family.render_calls(TWO)
    assert text is not None
    parser = family.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    pieces = [*parser.feed(text), *parser.flush()]
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == [
        "get_weather",
        "now",
    ]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolCallArguments))
    assert arguments == f"{TWO[0].arguments}{{}}"


def test_calls_are_rendered_in_the_syntax_of_the_model() -> None:
    assert load_families()["deepseek_v31"].render_calls(TWO[1:]) == (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert LFM2.render_calls(TWO) == (
        '<|tool_call_start|>[get_weather(city="Os\\"lo", in=[1, None, True]), now()]'
        "<|tool_call_end|>"
    )


@pytest.mark.parametrize("family", [harmony.Family(), QWEN_CODER, GIGACHAT_31])
def test_calls_that_a_family_cannot_render_become_json_text(family: ChatFamily) -> None:
    """A header is not content, values between tags are not JSON, or a turn has only one call."""
    assert family.render_calls(TWO) is None
    turns = inline_tool_calls(
        [USER, calls("Oslo", "Rome"), result("Oslo")], family, keep_results=True
    )
    assert [turn.role for turn in turns] == ["user", "assistant", "user"]
    assert (turns[1].content or "").startswith('{"name": "get_weather"')


def test_text_before_the_calls_stays_before_them() -> None:
    history = [USER, calls("Oslo", content="Let me see."), result("Oslo")]
    turns = inline_tool_calls(history, HERMES, keep_results=True)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert (turns[1].content or "").startswith("Let me see.\n<tool_call>\n")
    assert not turns[1].tool_calls


def test_arguments_that_are_not_an_object_are_rejected_with_their_param() -> None:
    call = ToolCall(id="a", name="now", arguments="[1]")
    turn = Message(role="assistant", content=None, tool_calls=(call,))
    with pytest.raises(AppError) as caught:
        inline_tool_calls([USER, turn], LFM2, keep_results=True)
    assert caught.value.param == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("name", "call", "expected_result"),
    [
        (
            "LFM2-8B-A1B.jinja",
            '<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|><|im_end|>',
            "<|im_start|>tool\n<|tool_response_start|>sun over olsO<|tool_response_end|>",
        ),
        (
            "ibm-granite-granite-3.3-2B-Instruct.jinja",
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|end_of_text|>',
            "<|start_of_role|>tool<|end_of_role|>sun over olsO",
        ),
        (
            "hfjinja-HuggingFaceTB_SmolLM3-3B.jinja",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
            "<|im_start|>user\nsun over olsO",
        ),
    ],
)
def test_templates_without_tool_calls_get_them_in_the_content(
    shared: Path, name: str, call: str, expected_result: str
) -> None:
    """After calls rendered as plain JSON, the model continued with plain JSON, which its family
    does not parse: the second call of a conversation became text."""
    builder = make_prompt_builder(template(shared, name))
    prompt = build_prompt(builder, USER, calls("Oslo"), result("Oslo"), tools=(WEATHER,)).text
    assert call in prompt
    assert expected_result in prompt
    assert prompt.index(call) < prompt.index(expected_result)
