"""Images on a bad day: the model's process is killed, clients disconnect, many clients send the
same image. The answers name the colors of the images, so each one shows what the model has seen."""

import base64
import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.colors_model.drawings import draw_named, encode_png
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.test_colors_model import FOLDER, count_encoded
from tests.waiting import wait_until

COLORS = ("purple", "yellow", "red", "blue", "green")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(str(FOLDER / "model"), "--parallel", "8") as running:
        yield running.wait_until_ready()


def make_body(images: Sequence[tuple[str, int]], **fields: Any) -> dict[str, Any]:
    """A question about images. images: colors, and numbers by which their drawings differ."""
    parts = [
        {
            "type": "image_url",
            "image_url": {
                "url": "data:image/png;base64,"
                + base64.b64encode(encode_png(draw_named(color, number))).decode()
            },
        }
        for color, number in images
    ]
    content = [*parts, {"type": "text", "text": "What colour is it?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": "model", "messages": messages, "temperature": 0, **fields}


def post(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT)


def ask(server: ServerProcess, images: Sequence[tuple[str, int]], **fields: Any) -> str:
    reply = post(server, make_body(images, **fields))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def read_model(server: ServerProcess) -> dict[str, Any]:
    status: Any = server.status()
    [model] = status["Models"]
    return model


def is_unused(server: ServerProcess) -> bool:
    """Whether no request runs or waits, and no memory of requests is reserved."""
    lines = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text.splitlines()
    names = (
        "vllm:num_requests_running{",
        "vllm:num_requests_waiting{",
        "vllm:kv_cache_usage_perc{",
    )
    values = [float(line.split()[-1]) for line in lines if line.startswith(names)]
    assert len(values) == len(names), lines
    return not any(values)


def test_clients_with_the_same_new_image_have_it_encoded_once(server: ServerProcess) -> None:
    before = count_encoded(server)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda _: ask(server, [("purple", 901)]), range(32)))
    assert set(answers) == {"purple"}
    assert count_encoded(server) == before + 1


def test_requests_with_twelve_images_have_the_answers_of_each_alone(server: ServerProcess) -> None:
    """The model was not trained for this many, so its answers only have to be the same."""
    prompts = [
        [(COLORS[(i + n) % len(COLORS)], 1000 + 12 * n + i) for i in range(12)] for n in range(8)
    ]
    before = count_encoded(server)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda images: ask(server, images), prompts))
    assert count_encoded(server) == before + 8 * 12
    alone = [ask(server, images, cache_prompt=False) for images in prompts]
    assert together == alone


def test_clients_that_disconnect_leave_nothing(server: ServerProcess) -> None:
    """Before, while and after their images are decoded and encoded."""
    for number in range(24):
        body = json.dumps(make_body([("red", 2000 + number)] * 3, stream=True)).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as client:
            client.sendall(head.encode() + body)
            if number % 3:
                client.recv(64 * (number % 3))
    wait_until(lambda: is_unused(server), server.log_text, limit=TIMEOUT)
    assert ask(server, [("red", 2100)]) == "red"


def test_a_model_process_that_is_killed_loses_only_what_it_computes(server: ServerProcess) -> None:
    """A request fails with an error, or its images are sent to the next process."""
    prompts = [[(COLORS[n % len(COLORS)], 3000 + n)] for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(post, server, make_body(images)) for images in prompts]
        wait_until(lambda: any(one.done() for one in replies), server.log_text, limit=TIMEOUT)
        os.kill(read_model(server)["Pid"], signal.SIGKILL)
        found = [one.result() for one in replies]
    for images, reply in zip(prompts, found, strict=True):
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["message"]["content"] == images[0][0]
        else:
            assert reply.status_code >= 500, reply.text
            assert reply.json()["error"]["message"]
    wait_until(lambda: read_model(server)["Phase"] == "ready", server.log_text, limit=TIMEOUT)
    assert [ask(server, images) for images in prompts] == [color for [(color, _)] in prompts]
    wait_until(lambda: is_unused(server), server.log_text, limit=TIMEOUT)
