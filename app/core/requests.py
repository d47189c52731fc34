"""What a client asks for, once it has been validated.

Knows: the words of a request that every dialect shares. Must not know: HTTP, JSON, tensors,
tokenizers, or whether the answer is streamed (that is the dialect's business).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool call that stands in the history of a conversation.

    `arguments` is the JSON text as the client sent it; templates get it parsed.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. Content parts have been joined into one text by the dialect."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that still has to go through the model's chat template."""

    messages: tuple[Message, ...]


# text · token ids · a conversation
Prompt = str | tuple[int, ...] | Conversation

SamplingValue = float | int | tuple[tuple[int, float], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Every field belongs to one request and to nothing else.

    temperature: 0 takes the most likely token. top_p: 0..1, 1 is off. top_k: 0 is off.
    min_p: 0..1, 0 is off. repetition_penalty: > 0, 1 is off. presence_penalty and
    frequency_penalty: 0 is off. repeat_last_n: how many tokens back, prompt included, the three
    penalties look: -1 is all of them, 0 is none. logit_bias: (token id, added to its logit).
    seed: None draws a fresh one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    @staticmethod
    def layered(*layers: Mapping[str, SamplingValue]) -> "Sampling":
        """Our defaults, overridden by each layer in turn: the model's, then the request's."""
        merged: dict[str, SamplingValue] = {}
        for layer in layers:
            merged.update(layer)
        return replace(Sampling(), **merged)  # pyright: ignore[reportArgumentType]  # names are checked by replace, values by the edge that made the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema:
    """An answer must be one JSON value that satisfies this schema. text: the schema, as JSON."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One answer that a client wants.

    sampling: only the `Sampling` fields that the client set, by name. max_tokens: None means the
    rest of the context. top_logprobs: None for no logprobs at all, else how many alternatives
    (0 to 20) stand beside each sampled token. reuse: whether what is cached of the prompt may serve
    it. keep: prompt tokens at the beginning that a context shift never discards; a negative number
    is all of them, None leaves it to the server. grammar: what the answer must follow, from its
    first token to its last.
    """

    model: str
    prompt: Prompt
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    reuse: bool = True
    keep: int | None = None
    grammar: JsonSchema | None = None
