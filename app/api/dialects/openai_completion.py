"""OpenAI's completions: from events to chunks and bodies.

Knows the shape of a choice that is a text. A stream never sends an empty one before its end. Must
not know: which request this answers.
"""

from collections.abc import Sequence

from app.api.dialects.openai_logprobs import Columns
from app.api.dialects.openai_reply import Chunks, Head, Held, Said, Whole, body
from app.api.wire import JsonObject
from app.core.events import CallDelta, Finish, ReasoningDelta, Spoken, TextDelta

KIND = "text_completion"


class CompletionChunks(Chunks):
    """Frames of a streamed completion."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, KIND)
        self._held: dict[int, Held] = {}
        self._columns: dict[int, Columns] = {}
        self._speaking: set[int] = set()  # choices whose prompt's ids were sent

    def speak(self, event: TextDelta | ReasoningDelta | CallDelta) -> list[JsonObject]:
        # a plain prompt is answered by nothing but text
        assert isinstance(event, TextDelta)
        self._held.setdefault(event.choice, Held()).add(event)
        return [self._choice(event.choice, event.text)] if event.text else []

    def close(self, event: Finish) -> JsonObject:
        choice = self._choice(event.choice, "")
        return choice | {"finish_reason": event.reason, "stop_reason": event.stop}

    def _choice(self, choice: int, text: str) -> JsonObject:
        held = self._held.get(choice, Held()).take()
        columns = self._columns.setdefault(choice, Columns())
        return {
            "index": choice,
            "text": text,
            "logprobs": columns.of(held.logprobs) if held.logprobs else None,
            "finish_reason": None,
            **({"token_ids": held.ids, **self._prompt(choice)} if self.head.ids else {}),
        }

    def _prompt(self, choice: int) -> JsonObject:
        """Its ids, in the first chunk of each choice."""
        if choice in self._speaking:
            return {}
        self._speaking.add(choice)
        return {"prompt_token_ids": self.prompts[choice // self.head.made]}


def collect_completion(head: Head, events: Sequence[Spoken]) -> JsonObject:
    """The body of a completion that is not streamed."""
    whole = Whole.of(events)
    told = whole.told(head)
    return body(
        head, KIND, whole, [_choice(head, place, said, whole) for place, said in enumerate(told)]
    )


def _choice(head: Head, place: int, said: Said, whole: Whole) -> JsonObject:
    ids = {"token_ids": said.held.ids, "prompt_token_ids": whole.prompts.get(said.end.prompt)}
    return {
        "index": place,
        "text": said.text,
        "logprobs": Columns().of(said.held.logprobs) if head.logprobs else None,
        "finish_reason": said.end.reason,
        "stop_reason": said.end.stop,
        **(ids if head.ids else {}),
    }
