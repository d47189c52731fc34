"""What a client asks for, once it has been validated.

Knows: the words of a request that every dialect shares. Must not know: HTTP, JSON, tensors,
tokenizers, or whether the answer is streamed (that is the dialect's business).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that stands in the history of a conversation.

    `arguments` is the JSON text as the client sent it; templates get it parsed.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. Content parts have been joined into one text by the dialect.
    reasoning: what the assistant thought before it said this."""

    role: str
    content: str | None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that still has to go through the model's chat template. param: where it stood in the
    request."""

    messages: tuple[Message, ...]
    param: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts that are continued beside each other, each for itself. At least one."""

    prompts: tuple[str | tuple[int, ...], ...]


# text · token ids · a conversation · texts and token ids
Prompt = str | tuple[int, ...] | Conversation | PromptBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: the JSON Schema of its arguments' object, as
    the client sent it; an object without properties where it sent none. strict: arguments follow
    the schema whenever the model calls it, not only where a call is asked for. param: where it
    stood in the request, dotted."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    param: str = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToolChoice:
    """The one function that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice

SamplingValue = float | int | tuple[tuple[int, float], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
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
    def merge(*layers: Mapping[str, SamplingValue]) -> "SamplingParams":
        """Our defaults, overridden by each layer in turn: the model's, then the request's."""
        merged: dict[str, SamplingValue] = {}
        for layer in layers:
            merged.update(layer)
        return replace(SamplingParams(), **merged)  # pyright: ignore[reportArgumentType]  # names are checked by replace, values by the edge that made the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema:
    """One JSON value that satisfies this schema. text: the schema, as JSON. param: where it stood
    in the request, dotted, for whoever has to mend it."""

    text: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex:
    """A text that this regular expression matches from its beginning to its end."""

    pattern: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGrammar:
    """One of these texts, at least one of them, none empty."""

    options: tuple[str, ...]
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LarkGrammar:
    """A text that this context-free grammar produces, in llguidance's variant of Lark or in GBNF.
    parts: what of it came out of the request by itself, to find the one that cannot be followed.
    inner: a grammar of the request's that the text refers to as @inner."""

    text: str
    param: str | None = None
    parts: tuple[JsonSchema | Regex, ...] = ()
    inner: "LarkGrammar | None" = None


Grammar = JsonSchema | Regex | ChoiceGrammar | LarkGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """How a model that reasons before it answers should do it. effort: a word of OpenAI's, "none"
    to "xhigh"; None leaves it to the model. token_budget: most tokens of reasoning; None for no
    limit."""

    effort: str | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Answers that a client wants: `n` to each prompt, numbered as choices in this order.

    sampling: only the `SamplingParams` fields that the client set, by name. max_tokens: None means
    the rest of the context; 0 only with echo. min_tokens: so many are sampled before the answer may
    end. ignore_eos: nothing that the model says ends it. top_logprobs: None for no logprobs at all,
    else how many alternatives (0 to 20) stand beside each sampled token. cache_prompt: whether what
    is cached of the prompt may serve it. num_keep: prompt tokens at the beginning that a context
    shift never discards; a negative number is all of them, None leaves it to the server. grammar:
    what the answer must follow, from its first token (behind the reasoning, where there is any) to
    its last. echo: answers begin with the prompt. suffix: what will stand behind the answer.
    chat_template_kwargs: more words for the chat template. return_token_ids: tell the prompt's ids.
    keep_alive: seconds that the model stays loaded after this; None leaves it to the server.
    caller: who asks, by the name of the key. admin: whether it may manage models. Both are the
    server's own word, not the client's.
    """

    model: str
    prompt: Prompt
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    cache_prompt: bool = True
    num_keep: int | None = None
    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    echo: bool = False
    suffix: str | None = None
    return_token_ids: bool = False
    keep_alive: float | None = None
    caller: str = ""
    admin: bool = False
