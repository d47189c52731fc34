"""Decode streams and join their deltas, as OpenAI's SDK does."""

import json
from collections.abc import Sequence
from typing import Any

from app.api.openai.output import ChunkEncoder
from app.core.events import OutputEvent


def chunks(encoder: ChunkEncoder, events: Sequence[OutputEvent]) -> list[Any]:
    """The payloads of a stream that ends properly."""
    body = b"".join(map(encoder.feed, events)) + encoder.end()
    frames = body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def choices(payloads: Sequence[Any], index: int | None = None) -> list[Any]:
    """The deltas of all choices, or of one, in order."""
    found = [choice for payload in payloads for choice in payload["choices"]]
    return found if index is None else [choice for choice in found if choice["index"] == index]


def message(pieces: Sequence[Any]) -> dict[str, Any]:
    """The message formed by the deltas of one choice."""
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
