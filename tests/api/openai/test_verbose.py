"""llama.cpp's `verbose`: the prompt of a chat completion."""

import json
from typing import Any

import pytest

from tests.api.asgi import Reply, send_request
from tests.fakes import FakeGenerate, finish, text

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def send(*, debug: bool = False, **fields: Any) -> Reply:
    generate = FakeGenerate([text("x"), finish()])
    return send_request(generate, "POST", "/v1/chat/completions", BODY | fields, debug=debug)


@pytest.mark.parametrize(
    ("debug", "verbose", "shown"),
    [
        (False, None, False),
        (False, True, True),
        (True, None, True),
        (True, False, False),
    ],
)
def test_the_prompt_is_returned_on_request_and_in_debugging(
    debug: bool, verbose: bool | None, shown: bool
):
    body = send(debug=debug, verbose=verbose).json
    assert body.get("__verbose") == ({"prompt": "hi"} if shown else None)


def test_a_stream_has_the_prompt_in_its_last_chunk():
    reply = send(verbose=True, stream=True)
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    prompts = [json.loads(line).get("__verbose") for line in lines]
    assert prompts == [*[None] * (len(lines) - 1), {"prompt": "hi"}]
