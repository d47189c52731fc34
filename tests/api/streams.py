"""What a stream said, put together again as OpenAI's SDK does it."""

import json
from collections.abc import Sequence
from typing import Any

from app.api.openai.output import ChunkEncoder
from app.core.events import OutputEvent


def chunks(writer: ChunkEncoder, events: Sequence[OutputEvent]) -> list[Any]:
    """The payloads of a stream that ends as it should."""
    told = b"".join(map(writer.feed, events)) + writer.end()
    frames = told.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def choices(payloads: Sequence[Any], index: int | None = None) -> list[Any]:
    """The pieces of all choices, or of one, in the order in which they came."""
    said = [choice for payload in payloads for choice in payload["choices"]]
    return said if index is None else [choice for choice in said if choice["index"] == index]


def message(pieces: Sequence[Any]) -> dict[str, Any]:
    """The message that the deltas of one choice come to."""
    message: dict[str, Any] = {}
    for delta in (piece["delta"] for piece in pieces):
        for name, value in delta.items():
            if name == "tool_calls":
                _add_calls(message.setdefault("tool_calls", []), value)
            else:
                message[name] = message.get(name, "") + value
    return message


def _add_calls(calls: list[Any], pieces: Sequence[Any]) -> None:
    for piece in pieces:
        if piece["index"] == len(calls):
            function = {"name": piece["function"]["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": piece["type"], "function": function})
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
