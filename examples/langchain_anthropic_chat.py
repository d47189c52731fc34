"""LangChain over Anthropic's API: a chain that streams, tools, structured output, an error.

pip install langchain-anthropic
ANTHROPIC_BASE_URL=http://localhost:8080 python examples/langchain_anthropic_chat.py
"""

import os
from typing import Literal

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pydantic import BaseModel, ConfigDict

os.environ.setdefault("ANTHROPIC_BASE_URL", "http://localhost:8080")
os.environ.setdefault("ANTHROPIC_API_KEY", "any")  # required by the library, not by the server


class Choice(BaseModel):
    """A color."""

    model_config = ConfigDict(extra="forbid")

    color: Literal["red", "green", "blue"]


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Today's weather in a city."""
    return f"It is sunny in {city}."


def main() -> None:
    [name] = [found.id for found in anthropic.Anthropic().models.list(limit=1)][:1]
    model = ChatAnthropic(model=name, max_tokens=100, temperature=0)

    # Non-streamed, and streamed through a chain.
    reply = model.invoke([HumanMessage("Say hello.")])
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["input_tokens"] > 0
    assert reply.response_metadata["stop_reason"] == "end_turn"
    print("answer:", reply.text)
    chain = ChatPromptTemplate.from_messages([("human", "Say {what}.")]) | model
    pieces = list(chain.stream({"what": "hello"}))
    assert all(isinstance(piece, AIMessageChunk) for piece in pieces)
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == reply.text

    # A required call, non-streamed and streamed, and the response to its result.
    agent = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    question = HumanMessage("What is the weather in Oslo?")
    turn = agent.invoke([question])
    [call] = turn.tool_calls
    print("call:", call["name"], call["args"])
    assert call["args"]["city"] in ("Rome", "Oslo")
    chunks = list(agent.stream([question]))
    whole = sum(chunks[1:], chunks[0])
    assert [streamed["args"] for streamed in whole.tool_calls] == [call["args"]]
    history = [question, turn, get_weather.invoke(call)]
    answer = model.bind_tools([get_weather], tool_choice={"type": "none"}).invoke(history)
    assert not answer.tool_calls

    # Structured output, with a required call and with the output format.
    for method in ("function_calling", "json_schema"):
        structured = model.with_structured_output(Choice, method=method)
        choice = structured.invoke("Which color has the sky?")
        assert isinstance(choice, Choice)
        print(f"{method}:", choice.color)

    # An unknown model is an error.
    try:
        ChatAnthropic(model="claude-nothing", max_tokens=10).invoke("Hello!")
    except anthropic.NotFoundError as error:
        print("rejected:", error.message)
    else:
        raise AssertionError("an unknown model was found")


if __name__ == "__main__":
    main()
