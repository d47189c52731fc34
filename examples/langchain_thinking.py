"""LangChain over Anthropic's and Ollama's APIs: thinking, with a tool call in between. Needs a
model that thinks.

pip install langchain-anthropic langchain-ollama
OLLAMA_HOST=http://localhost:8080 ANTHROPIC_BASE_URL=http://localhost:8080 \
    python examples/langchain_thinking.py
"""

import json
import os
from typing import Any

import ollama
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

os.environ.setdefault("ANTHROPIC_BASE_URL", "http://localhost:8080")
os.environ.setdefault("ANTHROPIC_API_KEY", "any")  # required by the library, not by the server


@tool
def get_weather(city: str) -> str:
    """Today's weather in a city."""
    return f"It is sunny in {city}."


def find_reasoning(message: AIMessage | AIMessageChunk) -> str:
    """LangChain uses the same form of blocks for all servers."""
    return "".join(
        str(block.get("reasoning", ""))
        for block in message.content_blocks
        if block["type"] == "reasoning"
    )


def try_model(model: Any) -> None:
    agent = model.bind_tools([get_weather])
    question = HumanMessage("What is the weather in Rome? Use the tool.")
    turn = agent.invoke([question])
    [call] = turn.tool_calls
    assert find_reasoning(turn)
    print("thinking:", find_reasoning(turn))
    print("call:", call["name"], json.dumps(call["args"]))

    pieces = list(agent.stream([question]))
    assert len([piece for piece in pieces if find_reasoning(piece)]) > 1
    assert "".join(map(find_reasoning, pieces)) == find_reasoning(turn)
    whole = sum(pieces[1:], pieces[0])
    assert [streamed["args"] for streamed in whole.tool_calls] == [call["args"]]

    answer = agent.invoke([question, turn, get_weather.invoke(call)])
    assert find_reasoning(answer)
    print("answer:", answer.text)


def main() -> None:
    name = ollama.Client().list().models[0].model
    assert name is not None
    thinking = {"type": "enabled", "budget_tokens": 2000}
    try_model(ChatAnthropic(model=name, max_tokens=4000, thinking=thinking))
    try_model(ChatOllama(model=name, reasoning=True))


if __name__ == "__main__":
    main()
