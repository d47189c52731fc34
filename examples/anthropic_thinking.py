"""Anthropic's Python library: thinking, with a tool call in between. Needs a model that thinks.

ANTHROPIC_BASE_URL=http://localhost:8080 python examples/anthropic_thinking.py
"""

import json
import os
from typing import Any

from anthropic import Anthropic

os.environ.setdefault("ANTHROPIC_BASE_URL", "http://localhost:8080")
os.environ.setdefault("ANTHROPIC_API_KEY", "any")  # required by the library, not by the server

WEATHER: Any = {
    "name": "get_weather",
    "description": "Today's weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def main() -> None:
    client = Anthropic()
    [model] = [found.id for found in client.models.list(limit=1)][:1]
    question = {"role": "user", "content": "What is the weather in Rome? Use the tool."}
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 4000,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "tools": [WEATHER],
    }

    # The thinking is a separate block before the call.
    turn = client.messages.create(**asked, messages=[question])
    thought, call = turn.content
    assert (thought.type, call.type) == ("thinking", "tool_use")
    assert thought.signature
    print("thinking:", thought.thinking)
    print("call:", call.name, json.dumps(call.input))

    # The same request as a stream.
    with client.messages.stream(**asked, messages=[question]) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == thought.thinking
    assert final.content[0] == thought
    assert final.content[1].input == call.input

    # The next request contains the thinking: send the blocks back unchanged.
    messages = [
        question,
        {"role": "assistant", "content": turn.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}],
        },
    ]
    answer = client.messages.create(**asked, messages=messages)
    assert answer.stop_reason == "end_turn"
    assert [block.type for block in answer.content] == ["thinking", "text"]
    print("answer:", answer.content[1].text)

    # The same request without thinking.
    plain = client.messages.create(
        **{**asked, "thinking": {"type": "disabled"}}, messages=[question]
    )
    assert "thinking" not in [block.type for block in plain.content]


if __name__ == "__main__":
    main()
