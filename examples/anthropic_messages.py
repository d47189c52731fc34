"""Anthropic's Python library: messages, streams, thinking, token counts, models and errors.

ANTHROPIC_BASE_URL=http://localhost:8080 python examples/anthropic_messages.py
"""

import asyncio
import os
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic

os.environ.setdefault("ANTHROPIC_BASE_URL", "http://localhost:8080")
os.environ.setdefault("ANTHROPIC_API_KEY", "any")  # required by the library, not by the server

# the newest version of the library has no `temperature` argument
GREEDY: dict[str, Any] = {"max_tokens": 100, "extra_body": {"temperature": 0}}


def prompt_tokens(usage: Any) -> int:
    """The usage splits the prompt tokens: not cached, written to the cache, read from it."""
    return (
        usage.input_tokens
        + (usage.cache_creation_input_tokens or 0)
        + (usage.cache_read_input_tokens or 0)
    )


def main() -> None:
    client = Anthropic()
    [model] = [found.id for found in client.models.list(limit=1)][:1]
    assert client.models.retrieve(model).type == "model"
    system = [{"type": "text", "text": "Be friendly.", "cache_control": {"type": "ephemeral"}}]
    body: dict[str, Any] = {
        "model": model,
        "system": system,
        "messages": [{"role": "user", "content": "Hello!"}],
    }

    counted = client.messages.count_tokens(**body).input_tokens
    whole = client.messages.create(**body, **GREEDY)
    [block] = whole.content
    assert block.type == "text"
    print("answer:", block.text)
    assert whole.stop_reason == "end_turn", whole
    assert prompt_tokens(whole.usage) == counted

    streamed(client, body, block.text, counted)
    stopped(client, body, block.text)
    thinking(client, body)
    errors(client, body)
    asyncio.run(concurrent(body, block.text))


def streamed(client: Anthropic, body: dict[str, Any], whole: str, counted: int) -> None:
    with client.messages.stream(**body, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    print("pieces:", pieces)
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    assert final.stop_reason == "end_turn"
    assert prompt_tokens(final.usage) == counted
    assert final.usage.cache_read_input_tokens, "the prompt was computed before"


def stopped(client: Anthropic, body: dict[str, Any], whole: str) -> None:
    """Stop sequences, a low and a high token limit, and a request that generates nothing."""
    word = whole.split()[1]
    stop = client.messages.create(**body, **GREEDY, stop_sequences=[word])
    assert (stop.stop_reason, stop.stop_sequence) == ("stop_sequence", word)
    cut = client.messages.create(**body, **{**GREEDY, "max_tokens": 1})
    assert cut.stop_reason == "max_tokens"
    far = client.messages.create(**body, **{**GREEDY, "max_tokens": 20000})
    assert far.content[0].text == whole, "a limit beyond the context is not an error"
    warmed = client.messages.create(**body, **{**GREEDY, "max_tokens": 0})
    assert (warmed.content, warmed.usage.output_tokens) == ([], 0)


def thinking(client: Anthropic, body: dict[str, Any]) -> None:
    """Every model accepts the options. A model that does not reason returns no thinking blocks."""
    enabled = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**body, **{**GREEDY, "max_tokens": 2000}, thinking=enabled)
    print("blocks:", [block.type for block in message.content])
    assert all(block.signature for block in message.content if block.type == "thinking")
    turns = [*body["messages"], {"role": "assistant", "content": message.content}]
    turns.append({"role": "user", "content": "And how are you?"})
    next_turn = client.messages.create(**{**body, "messages": turns}, **GREEDY)
    assert next_turn.content


def errors(client: Anthropic, body: dict[str, Any]) -> None:
    try:
        client.messages.create(**{**body, "model": "claude-nothing"}, **GREEDY)
    except anthropic.NotFoundError as error:
        print("rejected:", error.message)
        assert error.request_id
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("an unknown model was found")
    long = {**body, "messages": [{"role": "user", "content": "word " * 20000}]}
    try:
        with client.messages.stream(**long, **GREEDY) as stream:
            stream.get_final_message()
    except anthropic.BadRequestError as error:
        print("rejected:", error.message)
        # coding agents recognize this message and compact the conversation
        assert "prompt is too long: " in error.message
    else:
        raise AssertionError("a prompt longer than the context was accepted")


async def concurrent(body: dict[str, Any], whole: str) -> None:
    client = AsyncAnthropic()
    many = [client.messages.create(**body, **GREEDY) for _ in range(4)]
    assert {message.content[0].text for message in await asyncio.gather(*many)} == {whole}
    async with client.messages.stream(**body, **GREEDY) as stream:
        assert await stream.get_final_text() == whole


if __name__ == "__main__":
    main()
