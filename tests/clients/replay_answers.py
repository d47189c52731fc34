"""A client that sends each answer back, with the types and the accumulators of Anthropic's and
Ollama's libraries. Arguments: the address of the server, the model. Its first message selects the
answer: tests/clients/test_replay.py.

Runs in .venv-clients, so it imports nothing of this repository.
"""

import itertools
import sys
from typing import Any

# installed in .venv-clients only
import anthropic  # pyright: ignore[reportMissingImports]
import ollama  # pyright: ignore[reportMissingImports]

KINDS = "rtcb"  # reasoning, text, a call, a call whose arguments are not JSON
FINISHES = ("stop", "length", "tool_calls")


def list_answers() -> list[str]:
    words = ["".join(word) for size in range(3) for word in itertools.product(KINDS, repeat=size)]
    return [f"{word}-{finish}" for word in [*words, "rtc", "rcc", "trt"] for finish in FINISHES]


def check_messages(client: anthropic.Anthropic, model: str, answer: str, *, dumped: bool) -> None:
    tool: Any = {"name": "f", "description": "Does.", "input_schema": {"type": "object"}}
    asked: Any = {"model": model, "max_tokens": 99, "tools": [tool]}
    first: Any = {"role": "user", "content": answer}
    with client.messages.stream(**asked, messages=[first]) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**asked, messages=[first]), streamed):
        content: Any = [block.model_dump() for block in message.content] if dumped else None
        turn: Any = {"role": "assistant", "content": content if dumped else message.content}
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "4"}
            for block in message.content
            if block.type == "tool_use"
        ]
        last: Any = {"role": "user", "content": [*results, {"type": "text", "text": "-stop"}]}
        client.messages.create(**asked, messages=[first, turn, last])


def check_chat(client: ollama.Client, model: str, answer: str, *, dumped: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked: Any = {"model": model, "tools": [tool]}
    first = {"role": "user", "content": answer}
    streamed = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
    for part in client.chat(**asked, messages=[first], stream=True):
        streamed.content = (streamed.content or "") + (part.message.content or "")
        streamed.thinking = (streamed.thinking or "") + (part.message.thinking or "")
        streamed.tool_calls = [*(streamed.tool_calls or []), *(part.message.tool_calls or [])]
    for message in (client.chat(**asked, messages=[first]).message, streamed):
        turn: Any = message.model_dump() if dumped else message
        results = [
            {"role": "tool", "tool_name": call.function.name, "content": "4"}
            for call in message.tool_calls or []
        ]
        last = {"role": "user", "content": "-stop"}
        client.chat(**asked, messages=[first, turn, *results, last])


def main() -> None:
    url, model = sys.argv[1:]
    messages = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    chat = ollama.Client(host=url)
    count = 0
    for answer in list_answers():
        for dumped in (False, True):
            check_messages(messages, model, answer, dumped=dumped)
            check_chat(chat, model, answer, dumped=dumped)
            count += 1
    print(f"replayed {count} answers")


if __name__ == "__main__":
    main()
