"""LlamaIndex over Ollama's API: thinking, with a tool call in between. Needs a model that thinks.

pip install llama-index-llms-ollama
OLLAMA_HOST=http://localhost:8080 python examples/llama_index_thinking.py
"""

import json
import os
from typing import Any

import ollama
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama


def get_weather(city: str) -> str:
    """Today's weather in a city."""
    return f"It is sunny in {city}."


def find_thinking(response: ChatResponse) -> str:
    blocks = response.message.blocks
    return "".join(block.content or "" for block in blocks if isinstance(block, ThinkingBlock))


def main() -> None:
    name = ollama.Client().list().models[0].model
    assert name is not None
    llm = Ollama(
        model=name,
        base_url=os.environ.get("OLLAMA_HOST", "http://localhost:8080"),
        thinking=True,
        request_timeout=120,
    )
    tool = FunctionTool.from_defaults(get_weather)
    question = ChatMessage(role="user", content="What is the weather in Rome? Use the tool.")

    turn = llm.chat_with_tools([tool], chat_history=[question])
    [call] = llm.get_tool_calls_from_response(turn)
    assert find_thinking(turn)
    print("thinking:", find_thinking(turn))
    print("call:", call.tool_name, json.dumps(call.tool_kwargs))

    # Each response of a stream has the text so far.
    pieces = list(llm.stream_chat_with_tools([tool], chat_history=[question]))
    deltas: list[Any] = [piece.additional_kwargs.get("thinking_delta") for piece in pieces]
    assert len([delta for delta in deltas if delta]) > 1
    assert "".join(delta or "" for delta in deltas) == find_thinking(turn)
    [streamed] = llm.get_tool_calls_from_response(pieces[-1])
    assert streamed.tool_kwargs == call.tool_kwargs

    result = ChatMessage(
        role="tool",
        content=get_weather(**call.tool_kwargs),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    answer = llm.chat_with_tools([tool], chat_history=[question, turn.message, result])
    assert find_thinking(answer)
    print("answer:", answer.message.content)


if __name__ == "__main__":
    main()
