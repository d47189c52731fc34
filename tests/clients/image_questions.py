"""A client that asks for the color of an image with OpenAI's, Anthropic's and Ollama's libraries,
and then asks again in a later turn. Arguments: the address of the server, the model, the path of a
PNG. Prints one line per answer: the library, the way the image was sent, and the answer.

Runs in .venv-clients, so it imports nothing of this repository.
"""

import base64
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# installed in .venv-clients only
import anthropic  # pyright: ignore[reportMissingImports]
import ollama  # pyright: ignore[reportMissingImports]
import openai

QUESTION = "What colour is it?"


def ask_twice(ask: Callable[[list[Any]], str], first: Any) -> Iterator[str]:
    answer = ask([first])
    yield answer
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": QUESTION}]
    yield ask([first, *turns])


def use_openai(address: str, model: str, image: bytes) -> Iterator[tuple[str, str]]:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any")
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"

    def chat(messages: list[Any]) -> str:
        done = client.chat.completions.create(model=model, messages=messages, temperature=0)
        return done.choices[0].message.content or ""

    def respond(items: list[Any]) -> str:
        return client.responses.create(model=model, input=items, temperature=0).output_text

    text: Any = {"type": "text", "text": QUESTION}
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    for answer in ask_twice(chat, {"role": "user", "content": [part, text]}):
        yield "chat", answer
    text = {"type": "input_text", "text": QUESTION}
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    for answer in ask_twice(respond, {"role": "user", "content": [part, text]}):
        yield "responses", answer


def use_anthropic(address: str, model: str, image: bytes) -> Iterator[tuple[str, str]]:
    client = anthropic.Anthropic(base_url=address, api_key="any")

    def create(messages: list[Any]) -> str:
        asked: Any = {"model": model, "messages": messages}
        counted = client.messages.count_tokens(**asked).input_tokens
        done = client.messages.create(**asked, max_tokens=40)
        used = done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0)
        assert used + (done.usage.cache_creation_input_tokens or 0) == counted, (done, counted)
        return done.content[0].text

    data = base64.b64encode(image).decode()
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    text = {"type": "text", "text": QUESTION}
    part: Any = {"type": "image", "source": source}
    for answer in ask_twice(create, {"role": "user", "content": [part, text]}):
        yield "messages", answer


def use_ollama(address: str, model: str, path: Path) -> Iterator[tuple[str, str]]:
    client = ollama.Client(host=address)
    greedy = {"temperature": 0}

    def chat(messages: list[Any]) -> str:
        found = client.chat(model=model, messages=messages, options=greedy)
        return found.message.content or ""

    first = {"role": "user", "content": QUESTION, "images": [str(path)]}
    for answer in ask_twice(chat, first):
        yield "ollama chat", answer
    found = client.generate(model=model, prompt=QUESTION, images=[path], options=greedy)
    yield "ollama generate", found.response
    assert "vision" in (client.show(model).capabilities or [])


def main() -> None:
    address, model, path = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    image = path.read_bytes()
    for way, answer in (
        *use_openai(address, model, image),
        *use_anthropic(address, model, image),
        *use_ollama(address, model, path),
    ):
        print(f"{way}: {answer}")


if __name__ == "__main__":
    main()
