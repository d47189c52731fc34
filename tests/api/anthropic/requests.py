"""The requests and responses in the tests of this dialect."""

import json
from typing import Any

from app.core.requests import Conversation, GenerateRequest, Message
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, FakeGenerate, Script

PATH = "/v1/messages"


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    """A valid request. messages: the user's texts, or complete messages."""
    given = messages or ("hi",)
    read = [{"role": "user", "content": one} if isinstance(one, str) else one for one in given]
    return {"model": CARD.id, "max_tokens": 100, "messages": read, **fields}


def message(role: str, *blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": [*blocks], **fields}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def call(id: str = "toolu_1", name: str = "f", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str = "toolu_1", content: Any = "done", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def send(content: Any, script: Script = (), **headers: str) -> tuple[Reply, FakeGenerate]:
    generate = FakeGenerate(script) if script else FakeGenerate()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return send_request(generate, "POST", PATH, content, named), generate


def parse_body(content: Any) -> GenerateRequest:
    """The request that reaches the model."""
    reply, generate = send(content)
    assert reply.status == 200, reply.body
    return generate.opened[0]


def conversation(*messages: Any, **fields: Any) -> Conversation:
    prompt = parse_body(body(*messages, **fields)).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def prompt_of(*messages: Any, **fields: Any) -> list[Message]:
    return list(conversation(*messages, **fields).messages)


def turns(*messages: Any, **fields: Any) -> list[tuple[str, str | None]]:
    return [(one.role, one.content) for one in prompt_of(*messages, **fields)]


def rejection(content: Any) -> str:
    """The message of a 400."""
    reply, generate = send(content)
    assert (reply.status, generate.opened) == (400, []), reply.body
    assert reply.json["error"]["type"] == "invalid_request_error"
    return reply.json["error"]["message"]


def events(reply: Reply) -> list[Any]:
    """The events of a stream, each of which is named by its type."""
    found: list[Any] = []
    for frame in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = frame.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
