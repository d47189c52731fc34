"""OpenAI's completions: converts events to chunks and bodies.

Knows: the format of a text choice. Must not know: the request.

A stream never sends empty text before the final chunk.
"""

from collections.abc import Sequence

from app.api.openai.logprobs import CompletionLogprobs, render_prompt_logprobs
from app.api.openai.output import (
    ChoiceOutput,
    ChunkEncoder,
    Completion,
    CompletionMetadata,
    TokenBuffer,
    render_body,
    render_stop_reason,
)
from app.core.events import Finish, OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta
from app.http.responses import JsonObject

OBJECT_TYPE = "text_completion"


class CompletionChunkEncoder(ChunkEncoder):
    """Encodes a streamed completion."""

    def __init__(self, metadata: CompletionMetadata) -> None:
        super().__init__(metadata, OBJECT_TYPE)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_ids_sent: set[int] = set()  # choices whose prompt token IDs were already sent

    def delta_choices(self, event: TextDelta | ReasoningDelta | ToolCallDelta) -> list[JsonObject]:
        # a prompt without a chat template produces only text
        assert isinstance(event, TextDelta)
        return [self._choice(event.choice, event.text)] if event.text else []

    def finish_choice(self, event: Finish) -> JsonObject:
        choice = self._choice(event.choice, "")
        return choice | {"finish_reason": event.reason, "stop_reason": render_stop_reason(event)}

    def _choice(self, choice: int, text: str) -> JsonObject:
        tokens = self.tokens.pop(choice, None) or TokenBuffer()
        columns = self._logprobs.setdefault(choice, CompletionLogprobs())
        return {
            "index": choice,
            "text": text,
            "logprobs": columns.render(tokens.logprobs) if tokens.logprobs else None,
            "finish_reason": None,
            **(
                {"token_ids": tokens.ids, **self._prompt_ids(choice)}
                if self.metadata.return_token_ids
                else {}
            ),
        }

    def _prompt_ids(self, choice: int) -> JsonObject:
        """Returns the token IDs of the prompt, for the first chunk of each choice."""
        if choice in self._prompt_ids_sent:
            return {}
        self._prompt_ids_sent.add(choice)
        return {"prompt_token_ids": self.prompt_ids[choice // self.metadata.best_of]}


def collect_completion(metadata: CompletionMetadata, events: Sequence[OutputEvent]) -> JsonObject:
    """Builds the body of a non-streaming completion."""
    completion = Completion.from_events(events)
    outputs = completion.select_choices(metadata)
    return render_body(
        metadata,
        OBJECT_TYPE,
        completion,
        [
            _render_choice(metadata, place, output, completion)
            for place, output in enumerate(outputs)
        ],
    )


def _render_choice(
    metadata: CompletionMetadata, place: int, output: ChoiceOutput, completion: Completion
) -> JsonObject:
    ids = {
        "token_ids": output.tokens.ids,
        "prompt_token_ids": completion.prompt_ids.get(output.finish_event.prompt_index),
    }
    return {
        "index": place,
        "text": output.text,
        "logprobs": CompletionLogprobs().render(output.tokens.logprobs)
        if metadata.logprobs
        else None,
        "finish_reason": output.finish_event.reason,
        "stop_reason": render_stop_reason(output.finish_event),
        **(ids if metadata.return_token_ids else {}),
        **render_prompt_logprobs(completion.prompt_logprobs.get(output.finish_event.prompt_index)),
    }
