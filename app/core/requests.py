"""Validated generation requests.

Knows: the request fields that all dialects share. Must not know: HTTP, JSON, tensors, tokenizers,
whether the response is streamed (only the dialect knows).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.core.sampling_params import SamplingValue


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in the history of a conversation. arguments: JSON text as the client sent it;
    templates get the parsed value."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. content: text; the dialect has joined content parts.
    reasoning: the assistant's reasoning before this message."""

    role: str
    content: str | None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that the model's chat template has to render. param: path of the request field."""

    messages: tuple[Message, ...]
    param: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """At least one prompt; the prompts are completed independently of each other."""

    prompts: tuple[str | tuple[int, ...], ...]


# text · token ids · a conversation · texts and token ids
Prompt = str | tuple[int, ...] | Conversation | PromptBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: JSON Schema of the arguments object as the
    client sent it; by default an object without properties. strict: enforce the schema on every
    call, not only on calls that the request demands. param: dotted path of the request field."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema:
    """A JSON value that satisfies this schema. text: the schema as JSON. param: dotted path of the
    request field, for error messages."""

    text: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex:
    """A text that this regular expression matches as a whole."""

    pattern: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGrammar:
    """One of several texts. options: at least one text; none is empty."""

    options: tuple[str, ...]
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LarkGrammar:
    """A text that this context-free grammar matches, in llguidance's variant of Lark or in GBNF.
    parts: schemas and expressions of the request in the grammar, to find one that is unsupported.
    inner: a grammar of the request that `text` refers to as @inner."""

    text: str
    param: str | None = None
    parts: tuple[JsonSchema | Regex, ...] = ()
    inner: "LarkGrammar | None" = None


Grammar = JsonSchema | Regex | ChoiceGrammar | LarkGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Options of reasoning models. effort: reasoning effort in OpenAI's terms, "none" to "xhigh";
    None is the model's default. token_budget: maximum number of reasoning tokens; None for no
    limit."""

    effort: str | None = None
    token_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A generation request.

    n: number of choices per prompt; choices are numbered in the order of the prompts. sampling:
    only the `SamplingParams` fields that the client set, by name. max_tokens: None is the rest of
    the context; 0 only with echo. min_tokens: number of tokens to sample before the output may end.
    ignore_eos: end-of-sequence tokens do not end the output. top_logprobs: number of alternatives
    per sampled token, 0 to 20; None for no logprobs. cache_prompt: whether a cached prefix may be
    used for the prompt. num_keep: leading prompt tokens that a context shift never discards;
    negative means all, None is the server's default. grammar: constraint on the whole output after
    the reasoning, if any. echo: the output begins with the prompt. suffix: text that follows the
    output. chat_template_kwargs: additional variables for the chat template. return_token_ids:
    return the ids of the prompt and the output. keep_alive: seconds that the model stays loaded
    after this request; None is the server's default. caller: name of the API key. admin: whether
    the caller may manage models. The server sets both, not the client.
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
