"""Generic tool calls, for templates without tool support: tools rendered as text, and parsing."""

import json

from hypothesis import given

from app.core.requests import Message
from app.grammar.constraint import ReasoningTags
from app.text.families import glimmer
from app.text.generic_tool_calls import GenericFamily, render_tools_as_text
from app.text.syntax.output_parser import Content, Reasoning, ToolCallStart
from tests.text.families.reading import (
    check_prose,
    check_text,
    collect_calls,
    join_content,
    mixtures,
    prose,
)
from tests.text.families.samples import SAMPLES, load_family
from tests.text.families.walking import TOOLS, check_walks
from tests.text.templates import CLOCK, SYSTEM, USER, WEATHER, calls, result

FAMILY = GenericFamily()
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


def roles(messages: list[Message]) -> list[str]:
    return [message.role for message in messages]


def test_tools_are_in_the_system_message() -> None:
    system, user = render_tools_as_text([SYSTEM, USER], [WEATHER, CLOCK])
    assert system.content is not None
    assert system.content.startswith("Be brief.\n\n")
    tools = [line for line in system.content.splitlines() if line.startswith('{"name": "get_')]
    assert [json.loads(line)["name"] for line in tools] == ["get_weather", "get_time"]
    assert user == USER


def test_a_missing_system_message_is_added() -> None:
    assert roles(render_tools_as_text([USER], [WEATHER])) == ["system", "user"]


def test_calls_are_rendered_in_the_requested_format() -> None:
    turns = render_tools_as_text([USER, calls("Oslo", content="Let me see.")], [WEATHER])
    assert turns[-1].content == f"Let me see.\n{CALL}"
    assert turns[-1].tool_calls == ()


def test_a_rendered_call_is_parsed_as_that_call() -> None:
    text = render_tools_as_text([USER, calls("Oslo")], [WEATHER])[-1].content or ""
    parser = FAMILY.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    pieces = parser.feed(text) + parser.flush()
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == ["get_weather"]


def test_results_and_the_next_user_message_are_one_turn() -> None:
    history = [USER, calls("Rome", "Bonn"), result("Rome"), result("Bonn"), USER]
    turns = render_tools_as_text(history, [])
    assert roles(turns) == ["user", "assistant", "user"]
    assert turns[-1].content == ("Result: sun over emoR\nResult: sun over nnoB\nWeather in Oslo?")


def test_a_result_with_a_name_names_its_function() -> None:
    message = Message(role="tool", name="get_weather", content="sun", tool_call_id="a")
    assert render_tools_as_text([message], [])[0].content == "Result of get_weather: sun"


def test_reasoning_before_calls_is_parsed_with_any_tags() -> None:
    """Glimmer's tag begins with a space, and a message header follows the reasoning."""
    tags = ReasoningTags(open=" to=self<|message|>", close="<|eom|>")
    parser = GenericFamily(glimmer.Family()).build_parser(
        tools=[WEATHER], tags=tags, in_reasoning=False
    )
    text = f" to=self<|message|>Hm.<|eom|><|start|>assistant{CALL}"
    pieces = parser.feed(text) + parser.flush()
    assert [piece.text for piece in pieces if isinstance(piece, Reasoning)] == ["Hm."]
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == ["get_weather"]
    assert not any(isinstance(piece, Content) for piece in pieces)


@given(mixtures(CALL, '{"name": "', "\n", '"arguments": {'))
def test_parsing_does_not_depend_on_chunk_boundaries(text: str) -> None:
    check_text(FAMILY, text, tools=[WEATHER], syntax=(CALL, "{", "}"))


@given(prose("{", '{"name": "get_weather"'))
def test_text_without_calls_is_unchanged(text: str) -> None:
    check_prose(FAMILY, text, tools=[WEATHER])


def test_grammar_output_is_parsed_as_valid_calls() -> None:
    check_walks(FAMILY, TOOLS)


def test_a_code_block_around_calls_is_removed() -> None:
    pieces = check_text(FAMILY, f"Sure:\n```json\n{CALL}\n{CALL}\n```\nDone.", tools=[WEATHER])
    assert len([piece for piece in pieces if isinstance(piece, ToolCallStart)]) == 2
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert content == "Sure:\n\nDone."


def test_calls_in_the_syntax_of_the_model_are_also_parsed() -> None:
    """The templates of DeepSeek V3.1 and R1 list no tools, but the models were trained to call."""
    family = GenericFamily(load_family("deepseek_v31"))
    text = f"Sure. {SAMPLES['deepseek_v31']}\n{CALL}"
    pieces = check_text(family, text, tools=[WEATHER])
    assert [call.name for call in collect_calls(pieces)] == ["get_weather", "get_weather"]
    assert join_content(pieces) == "Sure."
    assert collect_calls(check_text(family, text, tools=())) == []


def test_other_code_blocks_are_unchanged() -> None:
    check_prose(FAMILY, f"```json\n{{}}\n```\n```\ntext {CALL}\n```", tools=[WEATHER])


def test_with_a_trigger_calls_are_parsed_only_after_it() -> None:
    family = GenericFamily(trigger="<call>")
    pieces = check_text(family, f"{CALL}\n<call>{CALL}\n<call> no", tools=[WEATHER])
    assert len([piece for piece in pieces if isinstance(piece, ToolCallStart)]) == 1
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert content == f"{CALL}\n\n<call> no"
