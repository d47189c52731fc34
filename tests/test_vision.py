"""Images in a real server with a small random Qwen3-VL: every dialect, the prefix cache, token
counts, and errors."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests import tiny, tiny_vision
from tests.image_files import encode_png, make_data_url, make_png
from tests.server_process import TIMEOUT, ServerProcess, run_server

SIZE = (4 * tiny_vision.SIDE, 2 * tiny_vision.SIDE)
TOKENS = 8  # of an image of this size
BROKEN = "data:image/png;base64," + base64.b64encode(make_png(*SIZE)[:60]).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("vision")
    vision, text = tiny_vision.write(folder / "vision"), tiny.write(folder / "text")
    with run_server(str(vision), str(text)) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def see(*parts: str | int, model: str = "vision", **fields: Any) -> dict[str, Any]:
    """A request with texts and images; the numbers are their grey levels."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": make_data_url(*SIZE, part)}}
        for part in parts
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def send(server: ServerProcess, body: dict[str, Any]) -> Any:
    reply = post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def post(url: str, json: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=json, timeout=TIMEOUT)


def get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT, **options)


def get_text(reply: Any) -> str:
    return reply["choices"][0]["message"]["content"]


def test_an_image_is_part_of_the_prompt(server: ServerProcess):
    with_image = send(server, see("look: ", 10, " what?"))
    without = send(server, see("look: ", " what?"))
    # the image rows, and the marks before and after them; no line break separates the texts
    added = with_image["usage"]["prompt_tokens"] - without["usage"]["prompt_tokens"]
    assert added == TOKENS + 2 - 1


def test_another_image_with_the_same_text_is_another_prompt(server: ServerProcess):
    first = send(server, see("which? ", 20, " say"))
    again = send(server, see("which? ", 20, " say"))
    other = send(server, see("which? ", 200, " say"))
    assert get_text(again) == get_text(first)
    assert get_text(other) != get_text(first)
    assert other["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    before = len("user: which? ") + 1
    assert cached <= before


def test_a_text_turn_continues_an_image_turn_from_the_cache(server: ServerProcess):
    question = see(30, "turn", max_tokens=6)
    answer = send(server, question)
    later = {
        **question,
        "messages": [
            *question["messages"],
            {"role": "assistant", "content": get_text(answer)},
            {"role": "user", "content": "more"},
        ],
    }
    continued = send(server, later)
    cached = continued["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= answer["usage"]["prompt_tokens"] - 1
    fresh = send(server, {**later, "cache_prompt": False})
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert get_text(fresh) == get_text(continued)


def test_a_streamed_answer_is_the_collected_one(client: openai.OpenAI):
    request: Any = see(40, "stream", 41, max_tokens=12)
    collected = client.chat.completions.create(**request)
    chunks = client.chat.completions.create(**request, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == collected.choices[0].message.content


def test_the_dialects_have_the_same_prompt(server: ServerProcess, client: openai.OpenAI):
    """The images come first, because they do in Ollama's messages."""
    chat = send(server, see(50, "same"))
    url = make_data_url(*SIZE, 50)
    image: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
    response = client.responses.create(
        model="vision",
        input=[{"role": "user", "content": [image, {"type": "input_text", "text": "same"}]}],
        max_output_tokens=8,
        temperature=0,
    )
    assert response.output_text == get_text(chat)
    assert response.usage is not None
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]

    source = {"type": "base64", "media_type": "image/png", "data": encode_png(*SIZE, 50)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "same"}]
    body = {"model": "vision", "messages": [{"role": "user", "content": content}]}
    generate = {**body, "max_tokens": 8, "temperature": 0}
    message = post(f"{server.url}/v1/messages", json=generate).json()
    count = post(f"{server.url}/v1/messages/count_tokens", json=body).json()
    assert message["content"][0]["text"] == get_text(chat)
    usage = message["usage"]
    used = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert used == count["input_tokens"] == chat["usage"]["prompt_tokens"]

    body = {
        "model": "vision",
        "messages": [{"role": "user", "content": "same", "images": [encode_png(*SIZE, 50)]}],
        "options": {"temperature": 0, "num_predict": 8},
        "stream": False,
    }
    shown = post(f"{server.url}/api/chat", json=body).json()
    assert shown["message"]["content"] == get_text(chat)
    assert shown["prompt_eval_count"] == chat["usage"]["prompt_tokens"]


def test_the_token_counts_are_those_of_the_request(server: ServerProcess):
    body = see("count ", 60, 61)
    used = send(server, body)["usage"]["prompt_tokens"]
    tokenized = httpx.post(
        f"{server.url}/v1/tokenize", json={"model": "vision", "messages": body["messages"]}
    ).json()
    assert tokenized["count"] == used
    pad = tiny.VOCAB + 1
    assert tokenized["tokens"].count(pad) == 2 * TOKENS
    items = [
        {"type": "input_text", "text": "count "},
        *({"type": "input_image", "image_url": make_data_url(*SIZE, n)} for n in (60, 61)),
    ]
    counted = httpx.post(
        f"{server.url}/v1/responses/input_tokens",
        json={"model": "vision", "input": [{"role": "user", "content": items}]},
    ).json()
    assert counted["input_tokens"] == used


def test_a_stored_response_with_an_image_is_continued(client: openai.OpenAI):
    image: Any = {"type": "input_image", "image_url": make_data_url(*SIZE, 70), "detail": "auto"}
    first = client.responses.create(
        model="vision", input=[{"role": "user", "content": [image]}], max_output_tokens=4
    )
    second = client.responses.create(
        model="vision", input="and?", previous_response_id=first.id, max_output_tokens=4
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > TOKENS


def test_a_broken_image_is_refused_in_a_question_and_omitted_later(server: ServerProcess):
    part = {"type": "image_url", "image_url": {"url": BROKEN}}
    broken = see("see", messages=[{"role": "user", "content": [part]}])
    reply = post(f"{server.url}/v1/chat/completions", json=broken)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages.0.content.0"
    turns = [*broken["messages"], {"role": "user", "content": "go on"}]
    reply = post(f"{server.url}/v1/chat/completions", json={**broken, "messages": turns})
    assert reply.status_code == 200
    assert "images are omitted" in reply.headers["x-mlxrunner-notice"]


def test_a_text_model_refuses_an_image_and_names_the_model_that_sees(server: ServerProcess):
    reply = post(f"{server.url}/v1/chat/completions", json=see(1, "x", model="text"))
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "this model reads text only (text)" in message
    assert "use one of these models: vision" in message
    body = see(1, "x", model="text")
    body["messages"].append({"role": "user", "content": "y"})
    reply = post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert "reads text only" in reply.headers["x-mlxrunner-notice"]


def test_the_models_say_whether_they_process_images(server: ServerProcess):
    models = get(f"{server.url}/v1/models").json()["data"]
    assert {model["id"]: model["input_modalities"] for model in models} == {
        "vision": ["text", "image"],
        "text": ["text"],
    }
    for name in ("vision", "text"):
        shown = post(f"{server.url}/api/show", {"model": name}).json()
        assert ("vision" in shown["capabilities"]) is (name == "vision")
    headers = {"anthropic-version": "2023-06-01"}
    model = get(f"{server.url}/v1/models/vision", headers=headers).json()
    assert model["capabilities"]["image_input"]["supported"]


def test_without_its_vision_tower_the_model_reads_text_only(
    tmp_path_factory: pytest.TempPathFactory,
):
    folder = tiny_vision.write(tmp_path_factory.mktemp("no-vision") / "vision")
    with run_server(str(folder), "--no-vision") as server:
        [model] = get(f"{server.url}/v1/models").json()["data"]
        assert model["input_modalities"] == ["text"]
        reply = post(f"{server.url}/v1/chat/completions", see(1, "x"))
        assert reply.status_code == 400
        assert "this model reads text only" in reply.json()["error"]["message"]
        assert send(server, see("x"))["usage"]["prompt_tokens"] > 0
