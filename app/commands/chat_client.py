"""The client of chat completions, for the commands that talk to a model.

Knows: OpenAI's request and stream, and the comments that report loading and prefill. Must not know:
terminals, the commands.
"""

import base64
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from app.commands.client_programs import Endpoint
from app.commands.servers import read_error, stream_events
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Finish,
    ModelLoading,
    PrefillProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    Usage,
)
from app.images.input import read_image

ChatEvent = ModelLoading | PrefillProgress | ReasoningDelta | TextDelta | Finish

_PREFILL_COMMENT = re.compile(r": ?prefill (\d+)/(\d+)")
_LOADING_COMMENT = re.compile(r": ?loading (\d+) %")
_QUEUED_COMMENT = re.compile(r": ?waiting to load")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """images: data URLs, which come before the content."""

    role: str
    content: str
    images: tuple[str, ...] = ()

    def render(self) -> Mapping[str, Any]:
        """Returns the message of a request."""
        if not self.images:
            return {"role": self.role, "content": self.content}
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        if self.content:
            parts.append({"type": "text", "text": self.content})
        return {"role": self.role, "content": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options that a chat sends with its messages. system: the first message; None for the
    model's own. think: whether the model reasons, or the effort; None for its default.
    output_format: "json" or a JSON schema. parameters: sampling parameters by their name in a
    request. keep_alive: how long the model then stays loaded, in seconds; -1 is forever, None is
    the server's setting."""

    system: str | None = None
    think: bool | str | None = None
    output_format: str | Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keep_alive: float | None = None

    def set_parameter(self, name: str, value: Any) -> "ChatOptions":
        """Returns the options with a parameter; None removes it."""
        parameters = {key: old for key, old in self.parameters.items() if key != name}
        return replace(
            self, parameters=parameters if value is None else {**parameters, name: value}
        )


@contextmanager
def stream_chat(
    endpoint: Endpoint, messages: Sequence[ChatMessage], options: ChatOptions
) -> Generator[Iterator[ChatEvent]]:
    """Sends a conversation, and yields the events of the answer. Leaving the context early cancels
    the request. Raises AppError for a request that is rejected or fails."""
    body = build_request(endpoint.model, messages, options)
    with stream_events(endpoint.url, "/v1/chat/completions", body, endpoint.api_key) as lines:
        yield read_events(lines)


def build_request(
    model: str, messages: Sequence[ChatMessage], options: ChatOptions
) -> Mapping[str, Any]:
    """Returns the body of the request."""
    system = [] if options.system is None else [ChatMessage(role="system", content=options.system)]
    body: dict[str, Any] = {
        "model": model,
        "messages": [message.render() for message in [*system, *messages]],
        "stream": True,
        **options.parameters,
    }
    if isinstance(options.think, str):
        body["reasoning_effort"] = options.think
    elif options.think is not None:
        body["enable_thinking"] = options.think
    if options.output_format == "json":
        body["response_format"] = {"type": "json_object"}
    elif options.output_format is not None:
        schema = {"name": "answer", "schema": options.output_format, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if options.keep_alive is not None:
        body["keep_alive"] = options.keep_alive
    return body


def read_events(lines: Iterator[str]) -> Iterator[ChatEvent]:
    """Yields the events of a stream. Raises AppError for an error in the stream, and if it ends
    before the answer does."""
    for line in lines:
        if line.startswith(":"):
            yield from _read_comment(line)
        elif line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield from _read_chunk(cast("Mapping[str, Any]", json.loads(data)))
    raise AppError(ErrorKind.ENGINE, "the server closed the connection before the answer ended")


def _read_comment(line: str) -> Iterator[ChatEvent]:
    if found := _PREFILL_COMMENT.match(line):
        yield PrefillProgress(computed_tokens=int(found[1]), total_tokens=int(found[2]))
    elif found := _LOADING_COMMENT.match(line):
        yield ModelLoading(progress=int(found[1]))
    elif _QUEUED_COMMENT.match(line):
        yield ModelLoading(progress=0, queued=True)


def _read_chunk(chunk: Mapping[str, Any]) -> Iterator[ChatEvent]:
    if chunk.get("error"):
        raise read_error(500, chunk)
    for choice in chunk.get("choices") or ():
        delta: Mapping[str, Any] = choice.get("delta") or {}
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningDelta(text=text)
        if text := delta.get("content"):
            yield TextDelta(text=text)
        if choice.get("finish_reason"):
            yield _read_finish(choice["finish_reason"], chunk)


def _read_finish(reason: Any, chunk: Mapping[str, Any]) -> Finish:
    timings: Mapping[str, Any] = chunk.get("timings") or {}
    return Finish(
        reason=reason,
        usage=Usage(
            prompt_tokens=int(chunk.get("prompt_eval_count") or 0),
            completion_tokens=int(chunk.get("eval_count") or 0),
            cached_tokens=int(timings.get("cache_n") or 0),
        ),
        timings=Timings(
            prefill_ns=int(chunk.get("prompt_eval_duration") or 0),
            # `eval_duration` also covers the first token, which is the end of the prefill
            decode_ns=round(1e6 * (timings.get("predicted_ms") or 0)),
            total_ns=int(chunk.get("total_duration") or 0),
        ),
    )


def read_format(text: str) -> str | Mapping[str, Any]:
    """Returns "json", or the JSON schema in a file. Raises AppError(INVALID)."""
    if text == "json":
        return text
    try:
        schema: Any = json.loads(Path(text).expanduser().read_text("utf-8"))
    except OSError as error:
        why = f"{text} cannot be read: {error.strerror or error}"
    except ValueError as error:
        why = f"{text} is not a JSON file: {error}"
    else:
        if isinstance(schema, dict):
            return cast("dict[str, Any]", schema)
        why = f"{text} is not a JSON schema, which is an object"
    raise AppError(ErrorKind.INVALID, f"--format is json or a file with a JSON schema: {why}")


def read_image_file(path: Path) -> str:
    """Returns an image as a data URL. Raises AppError(INVALID) if the file is not an image that a
    server accepts."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise AppError(ErrorKind.INVALID, message) from error
    image = read_image(data, param=str(path))
    return f"data:image/{image.format};base64,{base64.b64encode(data).decode()}"
