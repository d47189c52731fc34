"""A model that was trained to see: the answers over HTTP match transformers.

Each prompt is asked alone, with cached prefixes, streamed and in a batch. All must name the colors
of their own images, in order. The same model in GGUF, with a projector, gives the same answers.
"""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.colors_model.drawings import draw_named, encode_png
from tests.models.gguf.converter import Types
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.store.gguf.converted import convert_folder

FOLDER = Path(__file__).parent / "colors_model"
REFERENCE: list[dict[str, Any]] = json.loads((FOLDER / "reference.json").read_text())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(str(FOLDER / "model"), "--parallel", "8") as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gguf_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The weights are bfloat16 in both formats."""
    folder = tmp_path_factory.mktemp("gguf")
    path = convert_folder(FOLDER / "model", folder, quantize=lambda name: Types.BF16)
    with run_server(str(path), "--parallel", "8") as running:
        yield running.wait_until_ready()


def make_messages(colors: list[str]) -> Any:
    images = [encode_png(draw_named(color, index)) for index, color in enumerate(colors)]
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What colour is it?"}]}]


def ask(client: openai.OpenAI, colors: list[str]) -> Any:
    return client.chat.completions.create(
        model="model", messages=make_messages(colors), temperature=0
    )


def stream(client: openai.OpenAI, colors: list[str]) -> str:
    chunks = client.chat.completions.create(
        model="model", messages=make_messages(colors), temperature=0, stream=True
    )
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_every_answer_is_that_of_transformers(client: openai.OpenAI) -> None:
    """One after the other, so that later prompts find images of earlier ones in the cache."""
    for one in REFERENCE:
        found = ask(client, one["colors"])
        assert found.choices[0].message.content == one["answer"] == ", ".join(one["colors"])
        assert found.usage.prompt_tokens == one["prompt_tokens"]
        assert stream(client, one["colors"]) == one["answer"]


def test_the_model_in_gguf_gives_the_same_answers(gguf_server: ServerProcess) -> None:
    url = f"{gguf_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for one in REFERENCE:
            found = ask(client, one["colors"])
            assert found.choices[0].message.content == one["answer"]
            assert found.usage.prompt_tokens == one["prompt_tokens"]
    [model] = httpx.get(f"{gguf_server.url}/v1/models", timeout=TIMEOUT).json()["data"]
    assert model["input_modalities"] == ["text", "image"]


def test_requests_at_the_same_time_see_their_own_images(client: openai.OpenAI) -> None:
    prompts = [one["colors"] for one in REFERENCE]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda colors: ask(client, colors), prompts))
    answers = [one.choices[0].message.content for one in found]
    assert answers == [one["answer"] for one in REFERENCE]


def test_a_later_turn_knows_the_image_without_encoding_it_again(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    messages = make_messages(["purple", "yellow"])
    first: Any = client.chat.completions.create(model="model", messages=messages, temperature=0)
    encoded = count_encoded(server)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    question = {"role": "user", "content": "What colour is it?"}
    later: Any = [*messages, answer, question]
    second: Any = client.chat.completions.create(model="model", messages=later, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
    assert count_encoded(server) == encoded


def count_encoded(server: ServerProcess) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if "images_encoded" in line and line[0] != "#"
    )
