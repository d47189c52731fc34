"""Anthropic's Python library: functions, the library's tool runner, structured answers.

ANTHROPIC_BASE_URL=http://localhost:8080 python examples/anthropic_tools.py
"""

import json
import os
from typing import Any

from anthropic import Anthropic, beta_tool

os.environ.setdefault("ANTHROPIC_BASE_URL", "http://localhost:8080")
os.environ.setdefault("ANTHROPIC_API_KEY", "any")  # required by the library, not by the server

WEATHER: Any = {
    "name": "get_weather",
    "description": "Today's weather in a city.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}

CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def main() -> None:
    client = Anthropic()
    [model] = [found.id for found in client.models.list(limit=1)][:1]
    # A required call is enforced during sampling, so any model makes a valid one.
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "What will the weather be in Rome?"}],
        "tools": [WEATHER],
        "extra_body": {"seed": 1},
    }
    required = {"type": "any", "disable_parallel_tool_use": True}

    # The loop of an agent: the model calls a function, the program runs it, and the model responds.
    turn = client.messages.create(**asked, tool_choice=required)
    assert turn.stop_reason == "tool_use", turn
    [call] = [block for block in turn.content if block.type == "tool_use"]
    print(f"{call.name}({json.dumps(call.input)})")
    assert call.input["city"] in ("Paris", "Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 °C"}
    reminder = {"type": "text", "text": "Answer in one sentence."}
    messages = [
        *asked["messages"],
        {"role": "assistant", "content": turn.content},
        {"role": "user", "content": [result, reminder]},
    ]
    answer = client.messages.create(**{**asked, "messages": messages}, tool_choice={"type": "none"})
    print("answer:", [block.text for block in answer.content if block.type == "text"])
    assert all(block.type != "tool_use" for block in answer.content)

    streamed(client, asked, call.input)
    structured(client, asked)
    runner(client, model)


def streamed(client: Anthropic, asked: dict[str, Any], arguments: object) -> None:
    """Arguments arrive member by member, so that each piece extends valid JSON."""
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    print("pieces:", pieces)
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == call.input == arguments


def structured(client: Anthropic, asked: dict[str, Any]) -> None:
    """A schema for the answer."""
    plain = {name: value for name, value in asked.items() if name != "tools"}
    config = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    message = client.messages.create(**plain, output_config=config)
    [block] = [block for block in message.content if block.type == "text"]
    print("structured:", block.text)
    assert json.loads(block.text)["city"] in ("Paris", "Rome", "Oslo")


def runner(client: Anthropic, model: str) -> None:
    """The library calls the functions and sends their results. Newer versions first check whether
    the server stores conversations, and send all messages if it does not."""
    calls: list[str] = []

    @beta_tool
    def get_time(city: str) -> str:
        """The time in a city."""
        calls.append(city)
        return "12:00"

    messages = list(
        client.beta.messages.tool_runner(
            model=model,
            max_tokens=100,
            max_iterations=2,
            tools=[get_time],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=[{"role": "user", "content": "What time is it in Oslo?"}],
        )
    )
    print("turns:", [message.stop_reason for message in messages])
    assert len(messages) == 2
    assert calls


if __name__ == "__main__":
    main()
