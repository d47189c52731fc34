"""OpenAI's Python library: optional and required function calls.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_tools.py
"""

import json
import os
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server


class GetWeather(BaseModel):
    """Today's weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)


def get_weather(asked: GetWeather) -> str:
    return json.dumps({"city": asked.city, "celsius": 21, "days": asked.days})


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    messages = [{"role": "user", "content": "What will the weather be in Rome?"}]
    # "required" is enforced during sampling, so any model makes a valid call.
    # `parallel_tool_calls=False` is enforced in the same way.
    asked = {
        "model": model,
        "messages": messages,
        "tools": tools,
        "parallel_tool_calls": False,
        "seed": 1,
        "max_tokens": 200,
    }

    # The agent loop: the model calls a function, the program runs it, and the model responds.
    turn = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    assert turn.finish_reason == "tool_calls", turn
    calls = turn.message.tool_calls or []
    messages.append(turn.message.model_dump(exclude_none=True))
    for call in calls:
        result = get_weather(GetWeather.model_validate_json(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    print("answer:", last.message.content)
    assert calls
    assert not last.message.tool_calls

    streamed(client, {**asked, "messages": messages[:1]}, calls[0].function.arguments)


def streamed(client: OpenAI, asked: dict, arguments: str) -> None:
    """The name comes first, and the arguments follow in chunks."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        pieces = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    print("pieces:", [piece.arguments_delta for piece in pieces])
    assert len(pieces) > 1
    assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments
    assert {piece.name for piece in pieces} == {"get_weather"}

    # `parse` converts the arguments to a pydantic object.
    parsed = client.chat.completions.parse(**asked, tool_choice="required")
    first = (parsed.choices[0].message.tool_calls or [])[0]
    print("parsed:", repr(first.function.parsed_arguments))
    assert isinstance(first.function.parsed_arguments, GetWeather)
    # the same seed gives the same call as the non-streamed request
    assert first.function.arguments == arguments


if __name__ == "__main__":
    main()
