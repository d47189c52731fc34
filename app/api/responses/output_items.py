"""The output items of a response during generation.

Knows: the events and the object of each item type. Must not know: the list of items in a response,
the other fields of a response.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import orjson

from app.api.opaque_reasoning import encode_reasoning
from app.api.openai.logprobs import render_token_logprobs
from app.api.responses.input_items import new_item_id
from app.api.responses.tools import CUSTOM_INPUT, DeclaredTool
from app.core.events import TokenLogprob
from app.http.responses import JsonObject

# the arguments of a custom tool before its input, without white space
_INPUT_START = f'{{"{CUSTOM_INPUT}":"'

# the same with the complete characters of an input that has not ended
_PARTIAL_INPUT = re.compile(
    rf'''\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}))*)'''
)


class OutputItem(Protocol):
    """One output item. Call `begin`, add the parts, then call `end`."""

    kind: str

    def begin(self) -> Iterator[JsonObject]: ...

    def end(self, status: str) -> Iterator[JsonObject]: ...

    def render(self) -> JsonObject:
        """Returns the item in its current state."""
        ...


class TextItem:
    """A message or reasoning item with one text part."""

    def __init__(
        self, kind: str, index: int, *, id_: str, part: str, encrypted: bool = False
    ) -> None:
        self.kind = kind
        self._part = part
        self._encrypted = encrypted
        self._status = "in_progress"
        self._texts: list[str] = []
        self._logprobs: list[JsonObject] = []
        self._id = id_
        self._location: JsonObject = {"item_id": id_, "output_index": index, "content_index": 0}

    @staticmethod
    def create(kind: str, index: int, *, encrypted: bool = False) -> "TextItem":
        """Creates an empty item. encrypted: whether a reasoning item also has
        `encrypted_content`."""
        if kind == "message":
            return TextItem(kind, index, id_=new_item_id("msg"), part="output_text")
        assert kind == "reasoning"
        return TextItem(
            kind, index, id_=new_item_id("rs"), part="reasoning_text", encrypted=encrypted
        )

    def begin(self) -> Iterator[JsonObject]:
        empty = self.render()
        empty["content"] = []
        index = self._location["output_index"]
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.content_part.added", **self._location, "part": self._text_part()}

    def add_text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> JsonObject:
        self._texts.append(text)
        scored = self.add_logprobs(logprobs)
        delta: JsonObject = {
            "type": f"response.{self._part}.delta",
            **self._location,
            "delta": text,
        }
        return delta | ({"logprobs": scored} if self.kind == "message" else {})

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[JsonObject]:
        """Adds and renders tokens of the text, including tokens whose text was not output."""
        scored: list[JsonObject] = render_token_logprobs(logprobs)
        self._logprobs += scored
        return scored

    def end(self, status: str) -> Iterator[JsonObject]:
        self._status = status
        part = self._text_part()
        done: JsonObject = {
            "type": f"response.{self._part}.done",
            **self._location,
            "text": part["text"],
        }
        yield done | ({"logprobs": self._logprobs} if self.kind == "message" else {})
        yield {"type": "response.content_part.done", **self._location, "part": part}
        index = self._location["output_index"]
        yield {"type": "response.output_item.done", "output_index": index, "item": self.render()}

    def render(self) -> JsonObject:
        content = [self._text_part()]
        begun: JsonObject = {"id": self._id, "type": self.kind, "status": self._status}
        if self.kind == "message":
            return begun | {"role": "assistant", "content": content}
        reasoning = begun | {"summary": [], "content": content}
        if self._encrypted:
            complete = self._status != "in_progress"
            text = content[0]["text"]
            reasoning["encrypted_content"] = encode_reasoning(text) if complete else None
        return reasoning

    def _text_part(self) -> JsonObject:
        part: JsonObject = {"type": self._part, "text": "".join(self._texts)}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part


class CallItem(ABC):
    """A call to a tool that the client declared.

    kind: the item's type. id_prefix: the prefix of the item's ID. event_prefix: the prefix of the
    events with the call's arguments or input.
    """

    kind: str
    id_prefix: str
    event_prefix: str

    def __init__(self, index: int, *, call_id: str, tool: DeclaredTool) -> None:
        self._index = index
        self._id = new_item_id(self.id_prefix)
        self._call_id = call_id
        self._tool = tool
        self._status = "in_progress"
        self._arguments: list[str] = []

    def begin(self) -> Iterator[JsonObject]:
        yield self._item_event("response.output_item.added")

    def add_arguments(self, arguments: str) -> Iterator[JsonObject]:
        self._arguments.append(arguments)
        yield from self._content_deltas(arguments)

    def end(self, status: str) -> Iterator[JsonObject]:
        self._status = status
        yield from self._content_done("".join(self._arguments))
        yield self._item_event("response.output_item.done")

    def render(self) -> JsonObject:
        return {
            "id": self._id,
            "type": self.kind,
            "status": self._status,
            "call_id": self._call_id,
            **_render_name(self._tool),
            **self._content(),
        }

    @abstractmethod
    def _content_deltas(self, arguments: str) -> Iterator[JsonObject]:
        """Yields the events of a part of the arguments."""
        ...

    @abstractmethod
    def _content_done(self, arguments: str) -> Iterator[JsonObject]:
        """Yields the events of the complete arguments."""
        ...

    @abstractmethod
    def _content(self) -> JsonObject:
        """Returns the fields of the arguments so far."""
        ...

    def _item_event(self, type_: str) -> JsonObject:
        return {"type": type_, "output_index": self._index, "item": self.render()}

    def _content_event(self, what: str, **fields: Any) -> JsonObject:
        return {
            "type": f"response.{self.event_prefix}.{what}",
            "item_id": self._id,
            "output_index": self._index,
            **fields,
        }


class FunctionCallItem(CallItem):
    """A call to a function defined by the client."""

    kind, id_prefix, event_prefix = "function_call", "fc", "function_call_arguments"

    def _content_deltas(self, arguments: str) -> Iterator[JsonObject]:
        yield self._content_event("delta", delta=arguments)

    def _content_done(self, arguments: str) -> Iterator[JsonObject]:
        yield self._content_event("done", name=self._tool.name, arguments=arguments)

    def _content(self) -> JsonObject:
        return {"arguments": "".join(self._arguments)}


class CustomToolCallItem(CallItem):
    """A call to a custom tool defined by the client. The model generates its input as a JSON
    argument, so the text is known only when the call is complete."""

    kind, id_prefix, event_prefix = "custom_tool_call", "ctc", "custom_tool_call_input"

    _input = ""

    def _content_deltas(self, arguments: str) -> Iterator[JsonObject]:
        return iter(())

    def _content_done(self, arguments: str) -> Iterator[JsonObject]:
        self._input = read_custom_input(arguments)
        if self._input:
            yield self._content_event("delta", delta=self._input)
        yield self._content_event("done", input=self._input)

    def _content(self) -> JsonObject:
        return {"input": self._input}


def create_call_item(index: int, *, call_id: str, tool: DeclaredTool) -> CallItem:
    kind = CustomToolCallItem if tool.custom else FunctionCallItem
    return kind(index, call_id=call_id, tool=tool)


def _render_name(tool: DeclaredTool) -> JsonObject:
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    return {"name": tool.name, **namespace}


def read_custom_input(arguments: str) -> str:
    """Returns the input of a custom tool, even if the arguments end within it, or the whole
    arguments if they do not have the expected format."""
    try:
        read: object = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return _read_partial_input(arguments)
    text = cast("JsonObject", read).get(CUSTOM_INPUT) if isinstance(read, dict) else None
    return text if isinstance(text, str) else arguments


def _read_partial_input(arguments: str) -> str:
    """Returns the part of the input in arguments that end before the object does. Other text that
    is not JSON is returned unchanged."""
    found = _PARTIAL_INPUT.match(arguments)
    if found is None:
        begun = _INPUT_START.startswith("".join(arguments.split()))
        return "" if begun else arguments
    text: str = json.loads(f'"{found[1]}"')
    return text[:-1] if "\ud800" <= text[-1:] <= "\udbff" else text
