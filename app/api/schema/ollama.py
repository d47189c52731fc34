"""The request bodies of Ollama's API: chat, generate, embeddings and model management.

Knows: every field that Ollama documents. Must not know: how the values are used.

Format: docs/api.md and api/types.go in ollama/ollama, August 2026 (fb3076099).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    AnyObject,
    Item,
    Model,
    Options,
    TokenId,
    describe,
    ignore_fields,
    refer,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import KeepAlive
from app.api.schema.tools import FunctionName
from app.core.sampling_params import INT32_MAX, SAMPLING_KNOBS

ROLES = ("system", "user", "assistant", "tool")

# As in Ollama, a fractional part of an integer is truncated. Counts are limited to the integers
# that a float64 represents exactly (RFC 8259, section 6); a seed has 64 bits.
EXACT_INTEGERS = (-(2**53), 2**53)
INTEGER_MESSAGE = 'option "{name}" must be of type integer'
Integer = int | float | None

MAX_PRESET_MESSAGES = 1024

_KNOBS = {knob.runner_name or knob.name: knob for knob in SAMPLING_KNOBS}


def _describe_integer(
    description: str | None = None, limits: tuple[int, int] = EXACT_INTEGERS
) -> Meta:
    low, high = limits
    exact = {"type": ["number", "null"], "minimum": low, "maximum": high}
    return describe(description, message=INTEGER_MESSAGE, exact=exact)


def _describe_knob(name: str) -> Meta:
    """Describes a sampling parameter. As in Ollama, 0 disables one whose range excludes 0."""
    knob = _KNOBS[name]
    type_ = "integer" if knob.kind is int else "number"
    limits = {"minimum": knob.low, "maximum": knob.trusted_high}
    exact = {"type": [type_, "null"], **limits}
    if knob.low > 0:
        exact = {"anyOf": [{"const": 0}, {"type": type_, **limits}, {"type": "null"}]}
    message = INTEGER_MESSAGE if knob.kind is int else 'option "{name}" must be of type float32'
    return describe(knob.doc, message=message, exact=exact)


Images = Annotated[
    list[str] | None,
    describe(
        "The images before the text, as base64 or data URLs. For a text-only model, they are "
        "replaced with text, or rejected in a question.",
        component="OllamaImages",
    ),
]


class OllamaOptions(Item, kw_only=True, frozen=True):
    """Sampling parameters and limits. Options of llama.cpp (`num_batch`, `num_gpu`, `num_thread`,
    `use_mmap`, `mirostat` and others) have no effect. Unknown options are ignored and reported."""

    # settings of llama.cpp's loader, and samplers that Ollama removed
    ignored = ignore_fields(
        "num_batch num_gpu main_gpu use_mmap use_mlock num_thread numa low_vram f16_kv vocab_only "
        "logits_all draft_num_predict num_gqa typical_p tfs_z mirostat mirostat_tau mirostat_eta "
        "penalize_newline"
    )

    temperature: Annotated[float | None, _describe_knob("temperature")] = None
    top_k: Annotated[Integer, _describe_knob("top_k")] = None
    top_p: Annotated[float | None, _describe_knob("top_p")] = None
    min_p: Annotated[float | None, _describe_knob("min_p")] = None
    repeat_penalty: Annotated[float | None, _describe_knob("repeat_penalty")] = None
    presence_penalty: Annotated[float | None, _describe_knob("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, _describe_knob("frequency_penalty")] = None
    repeat_last_n: Annotated[Integer, _describe_knob("repeat_last_n")] = None
    seed: Annotated[Integer, _describe_knob("seed")] = None
    num_predict: Annotated[
        Integer,
        _describe_integer("The maximum number of output tokens. Below 1, the rest of the context."),
    ] = None
    num_ctx: Annotated[
        Integer, _describe_integer("The maximum number of prompt and output tokens.")
    ] = None
    num_keep: Annotated[
        Integer, _describe_integer("The number of prompt tokens that a context shift keeps.")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        describe(
            "Strings that end the output.",
            expected="a string or an array of strings, none of them empty",
        ),
    ] = None


class OllamaCalledFunction(Item, kw_only=True, frozen=True):
    """The function of an earlier call."""

    ignored = ignore_fields("index")

    name: str
    arguments: Annotated[Raw, describe(schema={"type": ["object", "string", "null"]})] = NULL


class OllamaToolCall(Item, kw_only=True, frozen=True):
    """An earlier call."""

    ignored = ignore_fields("type")

    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(Item, kw_only=True, frozen=True):
    """A message."""

    role: Annotated[str, describe(schema={"enum": [*ROLES]})]
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(Item, kw_only=True, frozen=True):
    """The declaration of a function."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[Raw, describe("A JSON schema.", schema={"type": ["object", "null"]})] = (
        NULL
    )
    strict: bool | None = None


class OllamaTool(Item, kw_only=True, frozen=True):
    """A function that the model may call."""

    ignored = ignore_fields("items")

    function: OllamaFunction
    type: Annotated[Literal["function", ""] | None, describe(expected="'function'")] = None


_Stream = Annotated[
    bool | None,
    describe(
        "Whether the response is a stream of JSON lines.",
        component="OllamaStream",
        schema={"default": True},
    ),
]
_Format = Annotated[
    Raw,
    describe(
        "`json` or a JSON schema, enforced during sampling, after the reasoning.",
        component="OllamaFormat",
        schema={"anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]},
    ),
]
_Think = Annotated[
    bool | Literal["low", "medium", "high", "max"] | None,
    describe(
        "For models without reasoning, all values except false return 400.",
        component="OllamaThink",
        expected='true, false, "low", "medium", "high" or "max"',
        exact={"enum": [True, False, "low", "medium", "high", "max", None]},
    ),
]


class OllamaBody(Options, kw_only=True, frozen=True):
    """The fields that name and keep a model."""

    model: Model = None
    keep_alive: KeepAlive = None


class OllamaPromptBody(OllamaBody, kw_only=True, frozen=True):
    """The fields that chat and generate share."""

    unsupported = reject_fields(_debug_render_only=(False,))
    ignored = ignore_fields("shift", truncate="No effect: a prompt that is too long is rejected.")

    stream: _Stream = None
    format: _Format = NULL
    think: _Think = None
    options: Annotated[OllamaOptions | None, describe(component="OllamaOptions")] = None
    logprobs: Annotated[
        bool | None, describe("Return the log-probability of every output token.")
    ] = None
    top_logprobs: Annotated[
        Integer, _describe_integer("The number of most likely tokens for each position.", (0, 20))
    ] = None


class OllamaChatBody(OllamaPromptBody, kw_only=True, frozen=True):
    """The body of POST /api/chat."""

    messages: Annotated[
        list[OllamaMessage] | None,
        describe(
            "The conversation. Without messages, the request loads the model, or unloads it with "
            "`keep_alive: 0`."
        ),
    ] = None
    tools: Annotated[
        list[OllamaTool] | None,
        describe("Functions, for models with the `tools` capability."),
    ] = None


class OllamaGenerateBody(OllamaPromptBody, kw_only=True, frozen=True):
    """The body of POST /api/generate."""

    prompt: Annotated[
        str | None,
        describe(
            "Rendered as a user message, except with `raw` or `suffix`. An empty prompt loads the "
            "model."
        ),
    ] = None
    suffix: Annotated[
        str | None,
        describe("The text after the output, for models with the `insert` capability."),
    ] = None
    system: Annotated[str | None, describe("The system message.")] = None
    context: Annotated[
        list[TokenId] | None,
        describe("The token IDs of an earlier response, which precede the prompt."),
    ] = None
    raw: Annotated[bool | None, describe("The prompt is not rendered.")] = None
    template: str | None = None
    images: Images = None


class OllamaEmbedBody(OllamaBody, kw_only=True, frozen=True):
    """The body of POST /api/embed."""

    input: Annotated[
        str | list[str] | None,
        describe(
            "A string, or a list of strings.",
            message="invalid input type: input must be a string or a list of strings",
            exact=refer("OllamaEmbedInput")[0],
        ),
    ] = None
    truncate: Annotated[
        bool | None,
        describe(
            "By default, inputs that are too long are truncated. With false, they return 400."
        ),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=0, le=INT32_MAX)] | None,
        describe("Truncates each embedding to this many dimensions."),
    ] = None
    options: Annotated[AnyObject | None, describe("No effect.")] = None


class OllamaEmbeddingsBody(OllamaBody, kw_only=True, frozen=True):
    """The body of POST /api/embeddings."""

    prompt: Annotated[str | None, describe("For an empty text, the vector is empty.")] = None
    options: Annotated[AnyObject | None, describe("No effect.")] = None


class OllamaNameBody(Options, kw_only=True, frozen=True):
    """The name of a model."""

    model: Annotated[str | None, describe("The name of a model.", exact=refer("ModelId")[0])] = None
    name: Annotated[
        str | None, describe("An older name for `model`.", schema={"maxLength": 512})
    ] = None


class OllamaShowBody(OllamaNameBody, kw_only=True, frozen=True):
    """The body of POST /api/show."""

    ignored = ignore_fields("system options template")

    verbose: Annotated[bool | None, describe("Whether the response lists the tensors.")] = None


class OllamaPullBody(OllamaNameBody, kw_only=True, frozen=True):
    """The body of POST /api/pull."""

    ignored = ignore_fields("insecure username password")

    stream: _Stream = None


class OllamaCopyBody(Options, kw_only=True, frozen=True):
    """The body of POST /api/copy."""

    source: Annotated[str | None, describe("The name of a model.", exact=refer("ModelId")[0])] = (
        None
    )
    destination: Annotated[
        str | None, describe("The name of the copy.", exact=refer("OllamaName")[0])
    ] = None


class PresetMessage(Item, kw_only=True, frozen=True):
    """A message that precedes every conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class OllamaCreateBody(OllamaNameBody, kw_only=True, frozen=True):
    """The body of POST /api/create. A request has either `from` or `files`."""

    # they would modify the weights, or use Ollama's template format
    unsupported = reject_fields(
        **dict.fromkeys(
            ("adapters", "template", "quantize", "quantization", "renderer", "parser"),
            ("", dict[str, str]()),
        )
    )
    ignored = ignore_fields("requires")

    model: Annotated[
        str | None, describe("The name of the new model.", exact=refer("OllamaName")[0])
    ] = None
    from_: Annotated[str | None, describe("The name of a model.", exact=refer("ModelId")[0])] = (
        msgspec.field(name="from", default=None)
    )
    files: Annotated[
        dict[str, str] | None,
        describe(
            "The digests of uploaded files, by file name.",
            message="files maps file names to digests",
            exact=refer("OllamaFiles")[0],
        ),
    ] = None
    system: Annotated[str | None, describe("The default system message.")] = None
    parameters: Annotated[
        Raw,
        describe("Default options of requests.", exact=refer("OllamaParameters")[0]),
    ] = NULL
    license: Annotated[
        str | list[str] | None,
        describe(
            "A string, or a list of strings.",
            expected="a string or an array of strings, none of them empty",
        ),
    ] = None
    messages: Annotated[
        Annotated[list[PresetMessage], Meta(max_length=MAX_PRESET_MESSAGES)] | None,
        describe("Messages that precede every conversation."),
    ] = None
    stream: _Stream = None


CHAT = BodyDecoder(OllamaChatBody)
GENERATE = BodyDecoder(OllamaGenerateBody)
EMBED = BodyDecoder(OllamaEmbedBody)
EMBEDDINGS = BodyDecoder(OllamaEmbeddingsBody)
NAME = BodyDecoder(OllamaNameBody)
SHOW = BodyDecoder(OllamaShowBody)
PULL = BodyDecoder(OllamaPullBody)
COPY = BodyDecoder(OllamaCopyBody)
CREATE = BodyDecoder(OllamaCreateBody)
