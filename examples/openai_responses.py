"""OpenAI's Python library: the Responses API, which stores conversations.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_responses.py
"""

import os
from typing import Literal

import openai
from openai import NotFoundError, OpenAI
from pydantic import BaseModel, Field

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server


class GetWeather(BaseModel):
    """Today's weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]


class Mood(BaseModel):
    mood: Literal["glad", "sad"]
    strength: int = Field(ge=1, le=10)


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id
    asked = {"model": model, "temperature": 0, "max_output_tokens": 200}

    first = client.responses.create(**asked, input="Hello!", instructions="Be friendly.")
    print("answer:", first.output_text)
    assert first.status == "completed", first
    assert first.output_text

    # The server stores the conversation, so the next request has only the new input.
    second = client.responses.create(
        **asked, input="And how are you?", previous_response_id=first.id
    )
    print("next turn:", second.output_text)
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0

    streamed(client, asked, first.output_text)

    # A schema for the response.
    parsed = client.responses.parse(**asked, input="How do you feel?", text_format=Mood)
    print("parsed:", repr(parsed.output_parsed))
    assert isinstance(parsed.output_parsed, Mood)

    called(client, asked)

    # A response with `store=False` is not stored.
    unkept = client.responses.create(**asked, input="Hello!", store=False)
    try:
        client.responses.create(**asked, input="Hm?", previous_response_id=unkept.id)
    except openai.APIStatusError as error:
        print("refused:", error.message)
        assert isinstance(error, openai.BadRequestError | NotFoundError)
    else:
        raise AssertionError("an answer that was not to be stored was found")


def streamed(client: OpenAI, asked: dict, whole: str) -> None:
    """Events are numbered, and the last one has the complete response."""
    with client.responses.stream(**asked, input="Hello!", instructions="Be friendly.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    print("pieces:", deltas)
    assert "".join(deltas) == final.output_text == whole


def called(client: OpenAI, asked: dict) -> None:
    """The model calls a function, and its result is sent back as an item."""
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": GetWeather.__doc__,
        "parameters": {**GetWeather.model_json_schema(), "additionalProperties": False},
        "strict": True,
    }
    tools = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    turn = client.responses.create(**asked, **tools, input="Is it warm in Oslo?")
    [call] = [item for item in turn.output if item.type == "function_call"]
    arguments = GetWeather.model_validate_json(call.arguments)
    print(f"{call.name}({arguments})")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
    answer = client.responses.create(
        **asked, input=[result], previous_response_id=turn.id, tools=[tool], tool_choice="none"
    )
    print("answer:", answer.output_text)
    assert all(item.type != "function_call" for item in answer.output)


if __name__ == "__main__":
    main()
