"""The request body of /v1/responses: its fields, its input items and its tools.

Knows: every field that OpenAI documents for creating a response. Must not know: stored responses,
how items are converted to messages.

Format: OpenAI's API reference, `ResponseInputItem`.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    OBJECT_DECODER,
    AnyObject,
    Identifier,
    Item,
    NoEffectObject,
    NoEffectText,
    Options,
    TypeNames,
    describe,
    refer,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder, Data
from app.api.schema.generation import (
    USUAL_LOGPROBS,
    EnableThinking,
    GenerationFields,
    LogprobsCount,
    ReasoningEffort,
    Summary,
    Thinking,
    ThinkingBudget,
    Verbosity,
)
from app.api.schema.messages import ImageDetail
from app.api.schema.openai import Metadata, ServiceTier, TemplateOptions
from app.api.schema.tools import FunctionName
from app.api.schema.unsupported_fields import list_unsupported_fields
from app.core.request_context import add_notice
from app.core.sampling_params import INT64_MAX

# The tools that OpenAI's servers run or define (OpenAI's reference, November 2026). Some have
# versions.
HostedType = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
    "web_search_2025_08_26",
    "web_search_preview_2025_03_11",
]
CallableType = Literal["function", "custom"]

# The items of calls to these tools, which the input contains after a conversation with OpenAI's
# models.
_HOSTED_ITEMS = frozenset(
    (
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call"),
        *("computer_call", "computer_call_output", "file_search_call", "image_generation_call"),
        *("local_shell_call", "local_shell_call_output", "mcp_approval_request"),
        *("mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output"),
        *("shell_call", "shell_call_output", "tool_search_call", "tool_search_output"),
        "web_search_call",
    )
)

# The supported values of OpenAI's `include`. The other values concern items of OpenAI's own tools.
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

AttachmentType = Literal["input_image", "input_file", "input_audio"]
_DIRECT = {"type": "direct"}


# The structs of items and tools have the fields of several types. openapi.yaml has the exact ones.
_ITEMS = {
    "anyOf": refer(
        "MessageItem",
        "FunctionCallItem",
        "CustomCallItem",
        "ToolOutputItem",
        "ReasoningItem",
        "ItemReference",
    )
}
_TOOLS = {"anyOf": refer("ResponseFunction", "CustomTool", "NamespaceTool", "HostedTool")}


class ItemPart(Item, kw_only=True, frozen=True):
    """A part of an item. The item determines which types it may have."""

    opaque_types: ClassVar[TypeNames] = frozenset(("input_file", "input_audio"))

    type: (
        Literal["input_text", "output_text", "refusal", "reasoning_text", "text", "summary_text"]
        | AttachmentType
    )
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[
        str | None, describe("A data URL, such as `data:image/png;base64,iVBO…`.")
    ] = None
    file_id: str | None = None
    detail: ImageDetail = None
    annotations: Annotated[Raw, describe(schema={"type": ["array", "null"]})] = NULL
    logprobs: Annotated[Raw, describe(schema={"type": ["array", "null"]})] = NULL


class InputItem(Item, kw_only=True, frozen=True):
    """An item of the input. There is one struct for all types, because the type is optional: an
    item with a role is a message, and another one without a type refers to a stored item."""

    unsupported = reject_fields(**{"async": (False,), "caller": (_DIRECT,)})
    opaque_types: ClassVar[TypeNames] = _HOSTED_ITEMS

    type: (
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "item_reference",
        ]
        | None
    ) = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None


class TextInput(Options, kw_only=True, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class GrammarInput(Options, kw_only=True, frozen=True, tag_field="type", tag="grammar"):
    """A text that matches a grammar."""

    syntax: Literal["lark", "regex"]
    definition: str


class MemberTool(Item, kw_only=True, frozen=True):
    """A function, or a custom tool, which takes text."""

    unsupported = reject_fields(
        **{"async": (False,), "allowed_callers": (["direct"],), "output_schema": ()}
    )

    type: CallableType
    name: FunctionName
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None
    format: TextInput | GrammarInput | None = None
    defer_loading: bool | None = None


class ResponseTool(Item, kw_only=True, frozen=True):
    """A tool. The options of OpenAI's hosted tools are meaningless here."""

    unsupported = MemberTool.unsupported
    opaque_types: ClassVar[TypeNames] = frozenset(HostedType.__args__)

    type: CallableType | Literal["namespace"] | HostedType
    name: FunctionName | None = None
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None
    format: TextInput | GrammarInput | None = None
    defer_loading: bool | None = None
    tools: list[MemberTool] | None = None


class ToolReference(Options, kw_only=True, frozen=True):
    """A tool of the request."""

    opaque_types: ClassVar[TypeNames] = ResponseTool.opaque_types

    type: CallableType | HostedType
    name: str | None = None
    namespace: str | None = None


class ResponseToolChoice(Options, kw_only=True, frozen=True):
    """The tool that the model must call, or the tools that it may call."""

    opaque_types: ClassVar[TypeNames] = ResponseTool.opaque_types

    type: CallableType | HostedType | Literal["allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None


class ResponseText(Options, kw_only=True, frozen=True, tag_field="type", tag="text"):
    """Any text."""

    unsupported = reject_fields(schema="use the type json_schema")


class ResponseJsonObject(Options, kw_only=True, frozen=True, tag_field="type", tag="json_object"):
    """Any object, or as in llama.cpp one that matches `schema`."""

    schema: Raw = NULL


class ResponseJsonSchema(Options, kw_only=True, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that matches a schema. `name` and `description` have no effect, and every schema is
    strict."""

    name: str
    schema: Raw
    description: str | None = None
    strict: bool | None = None


class TextOptions(Options, kw_only=True, frozen=True):
    """The format of the output."""

    format: Annotated[
        ResponseText | ResponseJsonObject | ResponseJsonSchema | None,
        describe(exact=refer("ResponseTextFormat")[0]),
    ] = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Options, kw_only=True, frozen=True):
    """OpenAI's options of reasoning. Reasoning is never summarized here."""

    unsupported = reject_fields(context=("auto",), mode=("standard",))

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponseStreamOptions(Options, kw_only=True, frozen=True):
    """Requires `stream: true`."""

    unsupported = reject_fields(include_obfuscation=(False,))


class ResponseBody(GenerationFields, kw_only=True, frozen=True):
    """The body of POST /v1/responses."""

    unsupported: ClassVar = {
        **reject_fields(**list_unsupported_fields("responses")),
        **reject_fields(
            access_programs=(),
            background=(False,),
            context_management=(),
            conversation="use previous_response_id, or send all items",
            image=(),
            max_completion_tokens="use max_output_tokens",
            max_tokens="use max_output_tokens",
            messages="use input",
            moderation=(),
            n=(1,),
            prompt="send instructions and input",
            reasoning_effort="use reasoning.effort",
            response_format="use text.format",
        ),
    }

    input: Annotated[
        str | list[InputItem],
        describe(
            "A string, or a list of items. An item can refer to a stored item. The input must not "
            "be empty unless the request continues a response.",
            exact={"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEMS}]},
        ),
    ]
    instructions: Annotated[
        str | None,
        describe(
            "A system message at the beginning of the prompt. Continuations of this response do "
            "not inherit it."
        ),
    ] = None
    previous_response_id: Annotated[str | None, describe(exact=refer("PreviousResponseId")[0])] = (
        None
    )
    store: Annotated[
        bool | None,
        describe(
            "Store the response in memory until it is evicted. A stored response can be retrieved, "
            "listed, referenced and continued.",
            schema={"default": True},
        ),
    ] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
        describe(
            "The maximum number of output tokens, including reasoning and calls. The default is "
            "the remaining context. With `--context-shift`, the output may exceed the context, and "
            "the default is ten times the context."
        ),
    ] = None
    tools: Annotated[
        list[ResponseTool] | None,
        describe(
            "Functions, custom tools, and groups of them. OpenAI's hosted tools are omitted from "
            "the prompt and listed in the `x-mlxrunner-notice` header.",
            exact={"type": ["array", "null"], "items": _TOOLS},
        ),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponseToolChoice | None,
        describe("Whether the model calls tools, and which.", exact=refer("ResponseToolChoice")[0]),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        describe("Whether a response may contain several calls.", schema={"default": True}),
    ] = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
        describe("The limit applies to OpenAI's hosted tools, which this server never calls."),
    ] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[
        list[Include] | None,
        describe(
            "Log-probabilities of messages, and the reasoning text in an opaque encoding, for "
            "clients that send back only that."
        ),
    ] = None
    top_logprobs: Annotated[
        LogprobsCount,
        describe(
            "The number of most likely tokens to return for each position. A value above 0 "
            "requests log-probabilities, regardless of `include`. `--max-logprobs` changes the "
            "maximum.",
            schema=USUAL_LOGPROBS,
        ),
    ] = None
    enable_thinking: EnableThinking = None
    thinking: Thinking = None
    thinking_budget: ThinkingBudget = None
    thinking_token_budget: ThinkingBudget = None
    thinking_budget_tokens: ThinkingBudget = None
    reasoning_budget_tokens: ThinkingBudget = None
    chat_template_kwargs: TemplateOptions = NULL
    stream_options: ResponseStreamOptions | None = None
    truncation: Annotated[
        Literal["disabled", "auto"] | None,
        describe(
            "`auto` on a server with `--context-shift`, which drops the middle of prompts that are "
            "too long. `disabled` on all other servers, which reject such prompts."
        ),
    ] = None
    service_tier: ServiceTier = None
    metadata: Metadata = NULL
    user: Identifier = None
    safety_identifier: Identifier = None
    prompt_cache_key: Identifier = None
    prompt_cache_retention: NoEffectText = None
    prompt_cache_options: NoEffectObject = None
    client_metadata: Annotated[AnyObject | None, describe("Sent by Codex. No effect.")] = None


class TokenCountBody(ResponseBody, kw_only=True, frozen=True):
    """The body of POST /v1/responses/input_tokens."""

    input: str | list[InputItem] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class _ItemType(msgspec.Struct, frozen=True):
    type: str | None = None


_items_decoder = msgspec.json.Decoder(list[Raw])
_type_decoder = msgspec.json.Decoder(_ItemType)

# An item that changes no prompt. It takes the place of another one, so that the items after it keep
# their index.
_EMPTY_ITEM = Raw(b'{"type":"reasoning"}')


def omit_hosted_items(data: Data) -> bytes | None:
    """Empties the items of calls to OpenAI's tools, and reports them. An error would end the
    conversation, because the client sends the same items with every later request. Returns None if
    there are none."""
    try:
        fields = OBJECT_DECODER.decode(data)
        items = _items_decoder.decode(fields.get("input", NULL))
    except msgspec.DecodeError:
        return None
    types = [_read_type(item) for item in items]
    hosted = sorted(_HOSTED_ITEMS.intersection(types))
    if not hosted:
        return None
    add_notice(f"items of OpenAI's tools are omitted from the prompt: {', '.join(hosted)}")
    kept = zip(items, types, strict=True)
    fields["input"] = Raw(
        msgspec.json.encode(
            [_EMPTY_ITEM if type_ in _HOSTED_ITEMS else item for item, type_ in kept]
        )
    )
    return msgspec.json.encode(fields)


def _read_type(item: Raw) -> str | None:
    try:
        return _type_decoder.decode(item).type
    except msgspec.DecodeError:
        return None


RESPONSE = BodyDecoder(ResponseBody, camel_case=True, repair=omit_hosted_items)
TOKEN_COUNT = BodyDecoder[ResponseBody](TokenCountBody, camel_case=True, repair=omit_hosted_items)
