"""Validated requests: generation, and embeddings with their jobs and results.

Knows: the request fields that all dialects share. Must not know: HTTP, JSON, tensors, tokenizers,
streaming. Only the dialect knows whether the response is streamed.

An embedding is stored as bytes: its elements are consecutive little-endian float32 numbers. This
format can be sent between processes and encoded as base64 without conversion.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import Struct

from app.core.images import PlacedImage
from app.core.sampling_params import SamplingValue

# mean: mean of the hidden states of all positions · last: hidden state of the last position
# rank: no embedding, but the scores of a model with a classification head
PoolingType = Literal["mean", "last", "cls", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in the history of a conversation. arguments: the JSON text that the client sent.
    Chat templates receive the parsed value."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. content: the joined text of all content parts. images: the
    images between them, in ascending order of their offsets. reasoning: the assistant's reasoning
    before this message. is_error: whether this is the result of a failed tool
    call. is_temporary: whether later requests of this conversation will not contain this
    message."""

    role: str
    content: str | None
    images: tuple[PlacedImage, ...] = ()
    reasoning: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    is_error: bool = False
    is_temporary: bool = False


def join_contents(
    messages: Iterable[Message], separator: str
) -> tuple[str, tuple[PlacedImage, ...]]:
    """Joins the contents of messages. Returns the text and the images in it. A message without
    content gets no separator."""
    texts: list[str] = []
    images: list[PlacedImage] = []
    length = 0
    for message in messages:
        text = message.content or ""
        if not (text or message.images):
            continue
        if texts:
            length += len(separator)
        images += (replace(one, offset=one.offset + length) for one in message.images)
        texts.append(text)
        length += len(text)
    return separator.join(texts), tuple(images)


def prepend_text(message: Message, text: str) -> Message:
    """Returns the message with text before its content."""
    images = tuple(replace(one, offset=one.offset + len(text)) for one in message.images)
    return replace(message, content=text + (message.content or ""), images=images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that must be rendered by the model's chat template. param: the path of the request
    field. continue_final: whether the output continues the last (assistant) message instead of
    starting a new one. earlier_ids: the token IDs of an earlier conversation, to prepend to the
    rendered text. If they are set, the model's own first messages are omitted."""

    messages: tuple[Message, ...]
    param: str = "messages"
    continue_final: bool = False
    earlier_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """One or more prompts. Each prompt is completed independently of the others."""

    prompts: tuple[str | tuple[int, ...], ...]


# text · token IDs · a conversation · a list of texts or token IDs
Prompt = str | tuple[int, ...] | Conversation | PromptBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: the JSON Schema of the arguments object as
    sent by the client; the default is an object without properties. strict: whether to enforce the
    schema on every call, instead of only on required calls. param: the dotted path of the request
    field. source_param: the path of the field from which the server built `parameters`, or None if
    the client sent them."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False
    param: str = "tools"
    source_param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToolChoice:
    """The single function that the model must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice

# Whether tool calls must follow the schemas of the tools. enforce: a request with an unsupported
# schema is rejected. prefer: if a schema is not supported, calls are not constrained. ignore: calls
# are never constrained.
ToolSchemaPolicy = Literal["enforce", "prefer", "ignore"]


class JsonSchema(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The output is a JSON value that is valid under this schema. text: the schema as JSON. param:
    the dotted path of the request field, for error messages. generated: whether the server built
    the schema from this field, so that paths within the schema mean nothing to the client."""

    text: str
    param: str | None = None
    generated: bool = False


class Regex(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The output is text that fully matches this regular expression."""

    pattern: str
    param: str | None = None


class ChoiceGrammar(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The output is one of several texts. options: one or more texts; none is empty."""

    options: tuple[str, ...]
    param: str | None = None


class LarkGrammar(Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The output matches this context-free grammar, which is written in GBNF or in llguidance's
    variant of Lark. parts: the schemas and regular expressions from the request that the grammar
    contains, used to identify an unsupported one in error messages. inner: a grammar from the
    request, which `text` references as @inner."""

    text: str
    param: str | None = None
    parts: tuple[JsonSchema | Regex, ...] = ()
    inner: "LarkGrammar | None" = None


Grammar = JsonSchema | Regex | ChoiceGrammar | LarkGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Options of reasoning models. effort: the reasoning effort in OpenAI's terms, from "none" to
    "max"; "none" disables reasoning, and None uses the model's default. token_budget: the maximum
    number of reasoning tokens; None sets no limit. enabled: whether to enable reasoning, at any
    effort, even if the model's default is no reasoning. lenient: whether an unsupported option is
    replaced by the nearest supported one, or omitted, instead of causing an error. param,
    budget_param: the paths of the request fields that set the effort and the budget, for error
    messages."""

    effort: str | None = None
    enabled: bool = False
    token_budget: int | None = None
    lenient: bool = False
    param: str = "reasoning_effort"
    budget_param: str = "thinking_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbosity:
    """How long the output should be, for templates that support this. level: "low", "medium" or
    "high". param: the path of the request field."""

    level: str
    param: str = "verbosity"


# Fields that cannot be combined with a grammar. A grammar determines where the output may end and
# which tokens it may contain, so with these fields, no token might be left to sample.
UNCONSTRAINED_FIELDS = (
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A generation request.

    n: the number of choices per prompt. Choices are numbered in the order of the prompts. sampling:
    the `SamplingParams` fields that the client set, by name. max_tokens: the maximum number of
    output tokens. None allows the rest of the context; 0 computes the prompt and generates nothing.
    output_reserve: the number of tokens of the context that the prompt must leave for the output.
    min_tokens: the number of tokens to sample before the output may end. ignore_eos: whether
    end-of-sequence tokens are ignored instead of ending the output. stop_token_ids: further tokens
    that end the output. include_stop: whether the output contains the stop string or token that
    ended it. bad_words: texts that the output must not contain. verbosity: how long the output
    should be; None uses the model's default. top_logprobs: the number of alternatives per sampled
    token; None for no logprobs. prompt_logprobs: the number of alternatives per prompt token; None
    for no logprobs of the prompt. cache_prompt: whether the prefix cache may be used for the
    prompt. num_keep: the number of leading prompt tokens that a context shift never discards. A
    negative value means the whole prompt, and None uses the server's default. grammar: a constraint
    on the whole output, excluding the reasoning. tool_schemas: see `ToolSchemaPolicy`. echo:
    whether the output begins with the prompt. suffix: the text that follows the output.
    chat_template_kwargs: additional variables for the chat template. return_token_ids: whether to
    return the token IDs of the prompt and the output. keep_alive: the number of seconds that the
    model stays loaded after this request; None uses the server's default. max_context: the maximum
    total number of prompt and output tokens; None uses the model's context length. caller: the name
    of the API key. admin: whether the caller may manage models. adapter: the key of the adapter
    that the name of the model selects; "" for none. The server, not the client, sets caller, admin
    and adapter.
    """

    model: str
    prompt: Prompt
    sampling: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    n: int = 1
    max_tokens: int | None = None
    output_reserve: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    bad_words: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_prompt: bool = True
    num_keep: int | None = None
    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_schemas: ToolSchemaPolicy = "enforce"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    verbosity: Verbosity | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    echo: bool = False
    suffix: str | None = None
    return_token_ids: bool = False
    keep_alive: float | None = None
    max_context: int | None = None
    caller: str = ""
    admin: bool = False
    adapter: str = ""

    @property
    def images(self) -> list[PlacedImage]:
        """The images of the conversation, in order."""
        if not isinstance(self.prompt, Conversation):
            return []
        return [image for message in self.prompt.messages for image in message.images]


# The cost of rendering a message or a tool, in characters, in addition to its text.
_CHARACTERS_PER_MESSAGE, _CHARACTERS_PER_TOOL = 64, 1024


def estimate_size(request: GenerateRequest) -> int:
    """Returns the approximate number of characters that must be processed to prepare the
    request."""
    prompts = (
        request.prompt.prompts if isinstance(request.prompt, PromptBatch) else (request.prompt,)
    )
    total = _CHARACTERS_PER_TOOL * len(request.tools) + len(request.suffix or "")
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            total += sum(map(_estimate_message_size, prompt.messages))
        else:
            total += len(prompt)
    return total


def _estimate_message_size(message: Message) -> int:
    texts = (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))
    return _CHARACTERS_PER_MESSAGE + sum(len(text) for text in texts if text is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """A string, its tokens, or tokens and strings in order; never empty. param: the dotted path of
    the request field."""

    content: str | tuple[int | str, ...]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A request for one embedding per input, or with a query for one score per input. pooling: the
    pooling method; None selects the model's default. dimensions: the number of leading elements of
    each embedding to return; None returns all. query: the text to which the inputs, which are then
    texts, are compared. keep_alive, caller, admin: the same as in `GenerateRequest`."""

    model: str
    inputs: tuple[EmbedInput, ...]
    pooling: PoolingType | None = None
    dimensions: int | None = None
    query: str | None = None
    truncate: bool = False
    keep_alive: float | None = None
    caller: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The embeddings of a request. vectors: one embedding per input, in order, normalized to unit
    length; for a request with a query, one number from 0 to 1 per input. prompt_tokens: the number
    of tokens in all inputs."""

    vectors: tuple[bytes, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """A job that computes embeddings. inputs: the tokens of each input, from one token up to the
    context length. dimensions: the number of elements to return, at most the hidden size of the
    model. first_segments: the number of tokens of each input that belong to its first text; empty
    if the inputs have one text. logit_ids: with pooling "last", tokens whose logits are returned in
    place of an embedding."""

    id: str
    inputs: tuple[tuple[int, ...], ...]
    pooling: PoolingType
    dimensions: int | None = None
    first_segments: tuple[int, ...] = ()
    logit_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """The result of a finished job. vectors: the same as in `Embeddings`. error: one sentence if
    the job failed; `vectors` is then empty."""

    job_id: str
    vectors: tuple[bytes, ...] = ()
    error: str | None = None
