"""Ollama's Python library: thinking, with a tool call in between. Needs a model that thinks.

pip install ollama
OLLAMA_HOST=http://localhost:8080 python examples/ollama_thinking.py
"""

import json

import ollama


def get_weather(city: str) -> str:
    """Today's weather in a city.

    Args:
        city: its name
    """
    return f"It is sunny in {city}."


def main() -> None:
    client = ollama.Client()
    model = client.list().models[0].model
    assert model is not None
    assert {"thinking", "tools"} <= set(client.show(model).capabilities or ())
    messages = [{"role": "user", "content": "What is the weather in Rome? Use the tool."}]

    # The thinking has its own field, `thinking`.
    turn = client.chat(model, messages, tools=[get_weather], think=True).message
    assert turn.thinking
    assert not turn.content
    [call] = turn.tool_calls or ()
    print("thinking:", turn.thinking)
    print("call:", call.function.name, json.dumps(dict(call.function.arguments)))

    # The same request as a stream.
    pieces = list(client.chat(model, messages, tools=[get_weather], think=True, stream=True))
    thoughts = [piece.message.thinking for piece in pieces if piece.message.thinking]
    assert len(thoughts) > 1
    assert "".join(thoughts) == turn.thinking
    [streamed] = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert streamed.function == call.function

    # The next request contains the thinking: send the message back unchanged.
    result = {
        "role": "tool",
        "tool_name": call.function.name,
        "content": get_weather(**call.function.arguments),
    }
    answer = client.chat(model, [*messages, turn, result], tools=[get_weather], think=True).message
    assert answer.thinking
    print("answer:", answer.content)

    # Without thinking, and the completion of a prompt with `generate`.
    assert not client.chat(model, messages, tools=[get_weather], think=False).message.thinking
    assert client.generate(model, "What is the weather in Rome?", think=True).thinking


if __name__ == "__main__":
    main()
