"""The request bodies of /v1/messages and /v1/messages/count_tokens: their fields, messages, content
blocks and tools.

Knows: every field that Anthropic documents, including beta features. Must not know: which roles may
use a block, how blocks and tools are converted.

Format: Anthropic's API reference, "Create a Message" and "Count tokens in a Message".
"""

import re
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    Item,
    Model,
    Options,
    TypeNames,
    describe,
    ignore_fields,
    refer,
    refer_to_list,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import KeepAlive, SamplingFields, Stop, Stream
from app.api.schema.tools import FunctionName
from app.core.sampling_params import INT32_MAX

Effort = Literal["low", "medium", "high", "xhigh", "max"]
ClientToolType = Literal["bash", "computer", "memory", "text_editor"]

_MAX_PIXELS = 1 << 20

# Blocks from Anthropic's servers that are encrypted or have no meaning here.
OMITTED_BLOCKS = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "fallback",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)

# `web_search_20250305` is a version of `web_search`.
_VERSION_SUFFIX = re.compile(r"_\d{8}$", re.ASCII)


class PlainBlock(Item, kw_only=True, frozen=True):
    """A block of a document. There is one struct for all types of blocks, because the position of a
    block determines its possible types. openapi.yaml has the exact ones."""

    opaque_types: ClassVar[TypeNames] = OMITTED_BLOCKS
    # cache breakpoints, sources of a text, who made a call
    ignored = ignore_fields("cache_control caller citations")

    type: str
    text: str | None = None


class Source(Item, kw_only=True, frozen=True):
    """The source of an image or a document."""

    ignored = ignore_fields("media_type")

    type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    content: str | list[PlainBlock] | None = None


class TextBlock(PlainBlock, kw_only=True, frozen=True):
    """A block of the system prompt or of a tool result, which is converted to text."""

    source: str | Source | None = None
    title: str | None = None
    context: str | None = None
    content: str | list[PlainBlock] | None = None
    tool_name: str | None = None


class _HostedToolTypes:
    """The types of tools without a known schema. Their options have no meaning here."""

    def __contains__(self, type_: str | None) -> bool:
        return get_tool_kind(type_) not in ("custom", *ClientToolType.__args__)


class AnthropicTool(Item, kw_only=True, frozen=True):
    """A function, a tool with a schema implied by its type, or a tool that Anthropic's servers
    run."""

    opaque_types: ClassVar[TypeNames] = _HostedToolTypes()
    # every tool is in the prompt, and every prefix is cached
    ignored = ignore_fields(
        "allowed_callers cache_control defer_loading display_number eager_input_streaming "
        "enable_zoom max_characters"
    )

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: Raw = NULL
    input_examples: list[Raw] | None = None
    strict: bool | None = None
    display_width_px: Annotated[int, Meta(ge=1, le=_MAX_PIXELS)] | None = None
    display_height_px: Annotated[int, Meta(ge=1, le=_MAX_PIXELS)] | None = None


class ChangedTool(AnthropicTool, kw_only=True, frozen=True):
    """A tool that is added or removed: a function, or the name of a tool."""

    tool_name: str | None = None


class Block(TextBlock, kw_only=True, frozen=True):
    """A block of a message."""

    content: str | list[TextBlock] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = NULL
    tool_use_id: str | None = None
    is_error: bool | None = None
    tool: ChangedTool | None = None


class MessageOutputConfig(Item, kw_only=True, frozen=True):
    """The effort of the current turn."""

    effort: Effort | None = None


class AnthropicMessage(Item, kw_only=True, frozen=True):
    """A message. A client may append a response to the conversation as it is. Claude Code sends the
    last two roles, according to reports for other servers."""

    ignored = ignore_fields(
        "container context_management id model stop_details stop_reason stop_sequence type usage"
    )

    role: Annotated[
        Literal["user", "assistant", "system", "ctx", "msg"],
        describe(expected="user, assistant or system"),
    ]
    content: str | list[Block] | None = None
    clear_at: Literal["never", "next_user_message"] | None = None
    output_config: MessageOutputConfig | None = None


class AnthropicThinking(Options, kw_only=True, frozen=True):
    """Options that the model does not support have no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicToolChoice(Options, kw_only=True, frozen=True):
    """Whether the model calls tools. A required call is enforced during sampling. `tool` needs a
    `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Options, kw_only=True, frozen=True):
    """A JSON schema, which is enforced during sampling."""

    type: Literal["json_schema"]
    schema: Annotated[
        Raw,
        describe(
            "A JSON schema. A schema that cannot be enforced is refused with the reason.",
            schema={"type": "object"},
        ),
    ]


_Format = Annotated[OutputFormat | None, describe(component="AnthropicFormat")]


class OutputConfig(Options, kw_only=True, frozen=True):
    """`format` is enforced during sampling. Templates without `xhigh` and `max` get `high`."""

    # Anthropic's models see it in the prompt; it limits nothing
    ignored = ignore_fields("task_budget")

    effort: Effort | None = None
    format: _Format = None


class ContextEdit(msgspec.Struct, frozen=True):
    """An edit with any attributes."""

    type: str


class ContextManagement(msgspec.Struct, frozen=True):
    """The edits that Anthropic's servers would apply to a long conversation."""

    edits: list[ContextEdit] | None = None


class MessagesBody(SamplingFields, kw_only=True, frozen=True):
    """The body of POST /v1/messages."""

    unsupported = reject_fields(mcp_servers=([],), stop=([],))
    # The location and price of Anthropic's service, the user, and features of Anthropic's servers.
    # `cache_control` is not needed, because every prefix is cached automatically.
    ignored = ignore_fields(
        "anthropic_version betas billing_policy cache_control compaction container "
        "diagnostics fallback_credit_token fallbacks inference_geo metadata service_tier "
        "speed user_profile_id workspace_id"
    )

    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32_MAX)],
        describe(
            "The maximum number of output tokens. The server lowers it to the remaining context. 0 "
            "prefills the prompt into the prefix cache and returns empty content."
        ),
    ]
    messages: Annotated[
        list[AnthropicMessage],
        Meta(min_length=1),
        describe(
            "Consecutive messages with the same role are merged. If the last message is from the "
            "assistant, the output continues it.",
            exact=refer_to_list(
                "AnthropicUserMessage",
                "AnthropicAssistantMessage",
                "AnthropicSystemMessage",
                minItems=1,
            ),
        ),
    ]
    model: Model = None
    system: Annotated[
        str | list[TextBlock] | None,
        describe("The system prompt.", exact=refer("AnthropicTexts")[0]),
    ] = None
    stop_sequences: Stop = None
    stream: Stream = None
    thinking: AnthropicThinking | None = None
    tools: Annotated[
        list[AnthropicTool] | None,
        describe(
            "Functions, and client-side tools with a predefined schema. Anthropic's server-side "
            "tools are omitted from the prompt and listed in the header `x-mlxrunner-notice`.",
            exact=refer_to_list(
                "AnthropicTool", "AnthropicClientTool", "AnthropicHostedTool", nullable=True
            ),
        ),
    ] = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: _Format = None
    context_management: Annotated[
        ContextManagement | None,
        describe("No edits are applied. The response reports this."),
    ] = None
    thread: Annotated[Raw, describe(schema={"type": "null"})] = NULL
    keep_alive: KeepAlive = None
    ttl: KeepAlive = None


class CountTokensBody(MessagesBody, kw_only=True, frozen=True):
    """The body of POST /v1/messages/count_tokens."""

    max_tokens: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        Annotated[int, Meta(ge=0, le=INT32_MAX)] | None, describe("No effect.")
    ] = None


MESSAGES = BodyDecoder(MessagesBody)
COUNT_TOKENS = BodyDecoder[MessagesBody](CountTokensBody)


def get_tool_kind(type_: str | None) -> str:
    """Returns the type of a tool without its version."""
    return _VERSION_SUFFIX.sub("", type_ or "custom")
