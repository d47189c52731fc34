"""OpenAI's chat completions: converts events to chunks and bodies.

Knows: the shape of a choice that is a message (text, reasoning and tool calls). Must not know: the
request.

As in OpenAI's API, each choice of a stream begins with a chunk that has the role and empty content.
It is sent together with the first output, because clients measure the time to the first chunk. No
later chunk has empty content.
"""

from collections.abc import Sequence
from typing import assert_never

from app.api.openai.logprobs import render_chat_logprobs, render_prompt_logprobs
from app.api.openai.output import (
    ChoiceOutput,
    ChunkEncoder,
    Completion,
    CompletionMetadata,
    ToolCallOutput,
    render_body,
    render_stop_reason,
)
from app.core.events import Finish, OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta
from app.http.responses import JsonObject

ROLE = {"role": "assistant"}


class ChatChunkEncoder(ChunkEncoder):
    """Encodes a streamed chat completion."""

    def __init__(self, metadata: CompletionMetadata) -> None:
        super().__init__(metadata, "chat.completion.chunk")
        self._prompt_ids_sent = False

    def delta_choices(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> list[JsonObject]:
        choice = event.choice
        match event:
            case TextDelta():
                return [self._choice(choice, {"content": event.text})] if event.text else []
            case ReasoningDelta():
                return [self._choice(choice, _reasoning_fields(event.text, self.metadata))]
            case ToolCallDelta():
                return [
                    self._choice(choice, {"tool_calls": [piece]})
                    for piece in _tool_call_deltas(event)
                ]
            case _:
                assert_never(event)

    def begin_choice(self, choice: int) -> list[JsonObject]:
        begin = _delta_choice(choice, {**ROLE, "content": ""})
        return [begin | {"token_ids": list[int]()} if self.metadata.return_token_ids else begin]

    def finish_choice(self, event: Finish) -> JsonObject:
        choice = self._choice(event.choice, {})
        return choice | {"finish_reason": event.reason, "stop_reason": render_stop_reason(event)}

    def extra_fields(self) -> JsonObject:
        """Returns the token IDs of the prompt, for the very first chunk."""
        if self._prompt_ids_sent or not self.metadata.return_token_ids:
            return {}
        self._prompt_ids_sent = True
        return {"prompt_token_ids": self.prompt_ids[0]}

    def _choice(self, choice: int, delta: JsonObject) -> JsonObject:
        entry = _delta_choice(choice, delta)
        tokens = self.tokens.pop(choice, None)
        if tokens is not None and tokens.logprobs:
            entry["logprobs"] = render_chat_logprobs(tokens.logprobs)
        if self.metadata.return_token_ids:
            entry["token_ids"] = [] if tokens is None else tokens.ids
        return entry


def _delta_choice(choice: int, delta: JsonObject) -> JsonObject:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


def collect_chat(metadata: CompletionMetadata, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming chat completion."""
    completion = Completion.from_events(events)
    choices = [
        _render_choice(metadata, place, output)
        for place, output in enumerate(completion.select_choices(metadata))
    ]
    ids = {"prompt_token_ids": completion.prompt_ids[0]} if metadata.return_token_ids else {}
    body = render_body(metadata, "chat.completion", completion, choices)
    return body | ids | render_prompt_logprobs(completion.prompt_logprobs.get(0))


def _render_choice(metadata: CompletionMetadata, place: int, output: ChoiceOutput) -> JsonObject:
    return {
        "index": place,
        "message": _render_message(output, metadata),
        "logprobs": render_chat_logprobs(output.tokens.logprobs) if metadata.logprobs else None,
        "finish_reason": output.finish_event.reason,
        "stop_reason": render_stop_reason(output.finish_event),
        **({"token_ids": output.tokens.ids} if metadata.return_token_ids else {}),
    }


def _render_message(output: ChoiceOutput, metadata: CompletionMetadata) -> JsonObject:
    """Renders a message. The content is null, not empty, if there are tool calls and no text."""
    content = None if output.calls and not output.text else output.text
    message: JsonObject = {**ROLE, "content": content, "refusal": None}
    if output.reasoning:
        message |= _reasoning_fields(output.reasoning, metadata)
    if output.calls:
        message["tool_calls"] = [_render_tool_call(call) for call in output.calls]
    return message


def _reasoning_fields(text: str, metadata: CompletionMetadata) -> JsonObject:
    """Returns the reasoning under the server's field name. Some clients join the texts of all field
    names that they know, so by default there is only one."""
    if metadata.reasoning_field == "both":
        return {"reasoning_content": text, "reasoning": text}
    return {metadata.reasoning_field: text}


def _render_tool_call(call: ToolCallOutput) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_call_deltas(event: ToolCallDelta) -> list[JsonObject]:
    """Renders a tool call. The first delta contains the name without arguments; later deltas
    contain parts of the arguments."""
    pieces: list[JsonObject] = []
    if event.id is not None:
        function = {"name": event.name, "arguments": ""}
        begun = {"id": event.id, "type": "function", "function": function}
        pieces.append({"index": event.call_index, **begun})
    if event.arguments:
        pieces.append({"index": event.call_index, "function": {"arguments": event.arguments}})
    return pieces
