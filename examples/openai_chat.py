"""OpenAI's Python library: a conversation, non-streamed and streamed, sequential and concurrent.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_chat.py
"""

import asyncio
import os

from openai import AsyncOpenAI, BadRequestError, OpenAI

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

HELLO = [{"role": "user", "content": "Hello! Who are you?"}]


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id
    print("model:", model)

    # A non-streamed response. The seed makes it reproducible.
    drawn = {"model": model, "messages": HELLO, "seed": 7, "temperature": 0.7, "max_tokens": 64}
    answer = client.chat.completions.create(**drawn)
    said = answer.choices[0].message.content
    print("whole:", said)
    assert said
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    # The same response as a stream. The last chunk has no choices and contains the token counts.
    pieces: list[str] = []
    usage = None
    for chunk in client.chat.completions.create(
        **drawn, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    print("pieces:", pieces)
    assert "".join(pieces) == said
    assert usage
    assert usage.completion_tokens == answer.usage.completion_tokens

    # The library's stream helper: events, and the complete response at the end.
    with client.chat.completions.stream(**drawn) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == said

    # Several choices for one prompt, which is prefilled only once, with log-probabilities.
    several = client.chat.completions.create(**drawn, n=3, logprobs=True, top_logprobs=2)
    for choice in several.choices:
        print(f"choice {choice.index}:", choice.message.content)
        assert choice.logprobs
        for token in choice.logprobs.content or []:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2
    assert [choice.index for choice in several.choices] == [0, 1, 2]

    # An error names the invalid field.
    try:
        client.chat.completions.create(model=model, messages=HELLO, temperature=-1)
    except BadRequestError as error:
        print("refused:", error.message)
        assert error.param == "temperature"
    else:
        raise AssertionError("a negative temperature was accepted")

    print("at once:", asyncio.run(at_once(model)))


async def at_once(model: str) -> list[str]:
    """Concurrent requests, which the server processes as a batch."""
    questions = ("Hello!", "How are you?", "What is your name?")
    async with AsyncOpenAI() as client:

        async def ask(question: str) -> str:
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                stream=True,
                max_tokens=64,
            )
            said = [c.delta.content or "" async for chunk in stream for c in chunk.choices]
            assert any(said)
            return "".join(said)

        return await asyncio.gather(*map(ask, questions))


if __name__ == "__main__":
    main()
