"""The output items of a response while they are generated.

Knows: the events and the object of each kind of item. Must not know: which items a response has,
the other fields of a response.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from app.api.openai.logprobs import render_token_logprobs
from app.api.responses.input_items import new_item_id
from app.core.events import TokenLogprob
from app.http.responses import JsonObject


class OutputItem(Protocol):
    """One output item. Call `begin`, add the pieces, then call `end`."""

    kind: str

    def begin(self) -> Iterator[JsonObject]: ...

    def end(self, status: str) -> Iterator[JsonObject]: ...

    def render(self) -> JsonObject:
        """Returns the item in its current state."""
        ...


class TextItem:
    """A message or a reasoning item, each with one part of text."""

    def __init__(self, kind: str, index: int, *, id_: str, part: str) -> None:
        self.kind = kind
        self._part = part
        self._status = "in_progress"
        self._texts: list[str] = []
        self._logprobs: list[JsonObject] = []
        self._id = id_
        self._location: JsonObject = {"item_id": id_, "output_index": index, "content_index": 0}

    @staticmethod
    def create(kind: str, index: int) -> "TextItem":
        if kind == "message":
            return TextItem(kind, index, id_=new_item_id("msg"), part="output_text")
        assert kind == "reasoning"
        return TextItem(kind, index, id_=new_item_id("rs"), part="reasoning_text")

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
        """Adds tokens of the text, including those whose text was not output, and renders them."""
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
        return begun | {"summary": [], "content": content}

    def _text_part(self) -> JsonObject:
        part: JsonObject = {"type": self._part, "text": "".join(self._texts)}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part


class FunctionCallItem:
    """A call of a client's function."""

    kind = "function_call"

    def __init__(self, index: int, *, call_id: str, name: str) -> None:
        self._index = index
        self._id = new_item_id("fc")
        self._call_id = call_id
        self._name = name
        self._status = "in_progress"
        self._arguments: list[str] = []

    def begin(self) -> Iterator[JsonObject]:
        yield self._item_event("response.output_item.added")

    def add_arguments(self, arguments: str) -> JsonObject:
        self._arguments.append(arguments)
        return self._arguments_event("delta", delta=arguments)

    def end(self, status: str) -> Iterator[JsonObject]:
        self._status = status
        yield self._arguments_event("done", name=self._name, arguments="".join(self._arguments))
        yield self._item_event("response.output_item.done")

    def render(self) -> JsonObject:
        return {
            "id": self._id,
            "type": self.kind,
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def _item_event(self, type_: str) -> JsonObject:
        return {"type": type_, "output_index": self._index, "item": self.render()}

    def _arguments_event(self, what: str, **said: Any) -> JsonObject:
        return {
            "type": f"response.function_call_arguments.{what}",
            "item_id": self._id,
            "output_index": self._index,
            **said,
        }
