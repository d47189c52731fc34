"""Calls in words: told to models that know of none, and read back."""

import json

from hypothesis import given

from app.core.requests import Message
from app.grammar.constraint import ReasoningTags
from app.text.generic_tool_calls import GenericFamily, render_tools_as_text
from app.text.syntax.output_parser import Content, Reasoning, ToolCallStart
from tests.text.families.reading import check_prose, check_text, mixtures, prose
from tests.text.families.walking import TOOLS, check_walks
from tests.text.templates import CLOCK, SYSTEM, USER, WEATHER, calls, result

FAMILY = GenericFamily()
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


def roles(messages: list[Message]) -> list[str]:
    return [message.role for message in messages]


def test_tools_stand_in_the_system_message() -> None:
    system, user = render_tools_as_text([SYSTEM, USER], [WEATHER, CLOCK])
    assert system.content is not None
    assert system.content.startswith("Be brief.\n\n")
    shown = [line for line in system.content.splitlines() if line.startswith('{"name": "get_')]
    assert [json.loads(line)["name"] for line in shown] == ["get_weather", "get_time"]
    assert user == USER


def test_without_a_system_message_there_is_one_then() -> None:
    assert roles(render_tools_as_text([USER], [WEATHER])) == ["system", "user"]


def test_calls_are_written_as_the_model_is_asked_to_write_them() -> None:
    turns = render_tools_as_text([USER, calls("Oslo", content="Let me see.")], [WEATHER])
    assert turns[-1].content == f"Let me see.\n{CALL}"
    assert turns[-1].tool_calls == ()


def test_what_is_told_of_a_call_is_read_as_that_call() -> None:
    written = render_tools_as_text([USER, calls("Oslo")], [WEATHER])[-1].content or ""
    parser = FAMILY.build_parser(tools=[WEATHER], tags=None, in_reasoning=False)
    pieces = parser.feed(written) + parser.flush()
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == ["get_weather"]


def test_results_and_what_the_user_says_behind_them_are_one_turn() -> None:
    history = [USER, calls("Rome", "Bonn"), result("Rome"), result("Bonn"), USER]
    turns = render_tools_as_text(history, [])
    assert roles(turns) == ["user", "assistant", "user"]
    assert turns[-1].content == ("Result: sun over emoR\nResult: sun over nnoB\nWeather in Oslo?")


def test_a_result_names_its_function_where_it_says_so() -> None:
    named = Message(role="tool", name="get_weather", content="sun", tool_call_id="a")
    assert render_tools_as_text([named], [])[0].content == "Result of get_weather: sun"


def test_reasoning_is_read_before_calls_whatever_its_tags() -> None:
    """Glimmer's begins with a space, and what follows it with the beginning of a message."""
    tags = ReasoningTags(open=" to=self<|message|>", close="<|eom|>")
    parser = GenericFamily("<|start|>assistant").build_parser(
        tools=[WEATHER], tags=tags, in_reasoning=False
    )
    text = f" to=self<|message|>Hm.<|eom|><|start|>assistant{CALL}"
    pieces = parser.feed(text) + parser.flush()
    assert [piece.text for piece in pieces if isinstance(piece, Reasoning)] == ["Hm."]
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallStart)] == ["get_weather"]
    assert not any(isinstance(piece, Content) for piece in pieces)


@given(mixtures(CALL, '{"name": "', "\n", '"arguments": {'))
def test_any_text_is_read_the_same_however_it_is_cut(text: str) -> None:
    check_text(FAMILY, text, tools=[WEATHER], syntax=(CALL, "{", "}"))


@given(prose("{", '{"name": "get_weather"'))
def test_text_without_calls_stays_as_it_is(text: str) -> None:
    check_prose(FAMILY, text, tools=[WEATHER])


def test_what_its_syntax_produces_is_read_back() -> None:
    check_walks(FAMILY, TOOLS)


def test_a_block_of_markdown_around_calls_belongs_to_them() -> None:
    pieces = check_text(FAMILY, f"Sure:\n```json\n{CALL}\n{CALL}\n```\nDone.", tools=[WEATHER])
    assert len([piece for piece in pieces if isinstance(piece, ToolCallStart)]) == 2
    said = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert said == "Sure:Done."


def test_other_blocks_of_markdown_stay_as_they_are() -> None:
    check_prose(FAMILY, f"```json\n{{}}\n```\n```\ntext {CALL}\n```", tools=[WEATHER])


def test_behind_a_trigger_and_nowhere_else_a_call_is_read() -> None:
    family = GenericFamily(trigger="<call>")
    pieces = check_text(family, f"{CALL}\n<call>{CALL}\n<call> no", tools=[WEATHER])
    assert len([piece for piece in pieces if isinstance(piece, ToolCallStart)]) == 1
    said = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert said == f"{CALL}<call> no"
