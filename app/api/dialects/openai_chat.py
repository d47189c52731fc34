"""OpenAI's chat completions: from events to chunks and bodies.

Knows the shape of a choice that is a message: text, reasoning and calls. A stream never sends an
empty text and sends the role with the first thing that is said, because clients take the first
chunk for the first token. Must not know: which request this answers.
"""

from collections.abc import Sequence
from typing import assert_never

from app.api.dialects.openai_logprobs import chat_logprobs
from app.api.dialects.openai_reply import Call, Chunks, Head, Held, Said, Whole, body
from app.api.wire import JsonObject
from app.core.events import CallDelta, Finish, ReasoningDelta, Spoken, TextDelta

ROLE = {"role": "assistant"}


class ChatChunks(Chunks):
    """Frames of a streamed chat completion."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "chat.completion.chunk")
        self._held: dict[int, Held] = {}
        self._speaking: set[int] = set()  # choices whose role was sent
        self._prompt_told = False

    def speak(self, event: TextDelta | ReasoningDelta | CallDelta) -> list[JsonObject]:
        choice = event.choice
        match event:
            case TextDelta():
                self._held.setdefault(choice, Held()).add(event)
                return [self._choice(choice, {"content": event.text})] if event.text else []
            case ReasoningDelta():
                return [self._choice(choice, _thought(event.text))]
            case CallDelta():
                return [self._choice(choice, {"tool_calls": [piece]}) for piece in _pieces(event)]
            case _:
                assert_never(event)

    def close(self, event: Finish) -> JsonObject:
        choice = self._choice(event.choice, {})
        return choice | {"finish_reason": event.reason, "stop_reason": event.stop}

    def more(self) -> JsonObject:
        """The prompt's ids, in the first chunk of all."""
        if self._prompt_told or not self.head.ids:
            return {}
        self._prompt_told = True
        return {"prompt_token_ids": self.prompts[0]}

    def _choice(self, choice: int, delta: JsonObject) -> JsonObject:
        role = {} if choice in self._speaking else ROLE
        self._speaking.add(choice)
        held = self._held.get(choice, Held()).take()
        return {
            "index": choice,
            "delta": role | delta,
            "logprobs": chat_logprobs(held.logprobs) if held.logprobs else None,
            "finish_reason": None,
            **({"token_ids": held.ids} if self.head.ids else {}),
        }


def collect_chat(head: Head, events: Sequence[Spoken]) -> JsonObject:
    """The body of a chat completion that is not streamed."""
    whole = Whole.of(events)
    choices = [_choice(head, place, said) for place, said in enumerate(whole.told(head))]
    ids = {"prompt_token_ids": whole.prompts[0]} if head.ids else {}
    return body(head, "chat.completion", whole, choices) | ids


def _choice(head: Head, place: int, said: Said) -> JsonObject:
    return {
        "index": place,
        "message": _message(said),
        "logprobs": chat_logprobs(said.held.logprobs) if head.logprobs else None,
        "finish_reason": said.end.reason,
        "stop_reason": said.end.stop,
        **({"token_ids": said.held.ids} if head.ids else {}),
    }


def _message(said: Said) -> JsonObject:
    """Without text there is none, not an empty one, where there are calls instead."""
    content = None if said.calls and not said.text else said.text
    message: JsonObject = {**ROLE, "content": content, "refusal": None}
    if said.reasoning:
        message |= _thought(said.reasoning)
    if said.calls:
        message["tool_calls"] = [_call(call) for call in said.calls]
    return message


def _thought(text: str) -> JsonObject:
    """Under the name that DeepSeek gave it and most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _pieces(event: CallDelta) -> list[JsonObject]:
    """A call begins with its name and no arguments; these follow, in pieces."""
    pieces: list[JsonObject] = []
    if event.id is not None:
        function = {"name": event.name, "arguments": ""}
        begun = {"id": event.id, "type": "function", "function": function}
        pieces.append({"index": event.call, **begun})
    if event.arguments:
        pieces.append({"index": event.call, "function": {"arguments": event.arguments}})
    return pieces
