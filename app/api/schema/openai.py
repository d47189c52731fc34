"""The request bodies of chat completions and completions.

Knows: every field that OpenAI documents, mlxrunner's extensions and the names of other servers.
Must not know: how the values are used.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    AnyObject,
    Identifier,
    NoEffectObject,
    NoEffectText,
    describe,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder
from app.api.schema.formats import (
    Gbnf,
    GuidedChoice,
    GuidedJson,
    GuidedText,
    ResponseFormat,
    StructuredOutputsField,
)
from app.api.schema.generation import (
    USUAL_LOGPROBS,
    Choices,
    EnableThinking,
    GenerationFields,
    LogprobsCount,
    NumKeep,
    OpenRouterReasoning,
    PromptLogprobsCount,
    ReasoningEffort,
    ReturnProgress,
    ReturnTokenIds,
    StreamOptionsField,
    Thinking,
    ThinkingBudget,
    Verbosity,
)
from app.api.schema.messages import Messages
from app.api.schema.tools import ToolChoice, Tools
from app.api.schema.unsupported_fields import list_unsupported_fields
from app.core.sampling_params import INT64_MAX

MAX_BEST_OF = 20

# Variables of a chat template that the server sets itself, from other fields or its own state.
RESERVED_TEMPLATE_OPTIONS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "self",
)

# The only service tier of this server, with OpenAI's name for it.
SERVICE_TIER = "default"

MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

Metadata = Annotated[
    Raw,
    describe(
        "Client-defined key-value pairs. They have no effect.",
        schema={
            "type": ["object", "null"],
            "maxProperties": MAX_METADATA_PAIRS,
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": ["string", "null"], "maxLength": MAX_METADATA_VALUE},
        },
    ),
]
ServiceTier = Annotated[
    Literal["auto", "default"] | None,
    describe("There is only one tier. The response echoes the field."),
]
TemplateOptions = Annotated[
    Raw,
    describe(
        "Additional variables for the chat template, such as `enable_thinking`.",
        component="TemplateOptions",
        schema={
            "type": ["object", "null"],
            "propertyNames": {"not": {"enum": list(RESERVED_TEMPLATE_OPTIONS)}},
        },
    ),
]
_TokenLimit = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
NumPredict = Annotated[
    _TokenLimit | None,
    describe(
        "llama.cpp's name for `max_tokens`. -1 means the rest of the context.",
        component="NumPredict",
    ),
]


class ConstrainedFields(GenerationFields, kw_only=True, frozen=True):
    """The fields of all endpoints that accept a format of the output under each server's name."""

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputsField = None
    guided_json: GuidedJson = NULL
    guided_regex: GuidedText = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedText = None
    json_schema: GuidedJson = NULL
    grammar: Gbnf = None


class CommonFields(ConstrainedFields, kw_only=True, frozen=True):
    """The fields that chat completions and completions share."""

    n: Choices = None
    stream_options: StreamOptionsField = None
    n_predict: NumPredict = None
    return_token_ids: ReturnTokenIds = None
    return_progress: ReturnProgress = None
    n_keep: NumKeep = None
    user: Identifier = None


class ChatBody(CommonFields, kw_only=True, frozen=True):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar = {
        **reject_fields(**list_unsupported_fields("chat")),
        **reject_fields(
            audio=(),
            function_call="use tool_choice",
            functions="use tools",
            max_output_tokens="use max_completion_tokens",
            modalities=(["text"],),
            moderation=(),
            prompt="use messages",
            suffix=("",),
            web_search_options="define a search function in tools",
        ),
    }

    messages: Messages
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
        describe(
            "The maximum number of output tokens. The default is the remaining context. With "
            "`--context-shift`, the output may exceed the context, and the default is ten times "
            "the context."
        ),
    ] = None
    max_tokens: Annotated[
        _TokenLimit | None,
        describe(
            "The older name for `max_completion_tokens`, which takes precedence if both are set. "
            "-1 is the same as omitting it.",
            schema={"not": {"const": 0}},
        ),
    ] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[
        bool | None,
        describe("If false, a response contains at most one call. Requires `tools`."),
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        describe(
            "The amount of reasoning. The model's template defines the effect. If the template can "
            "only turn reasoning on or off, every value except `none` turns it on."
        ),
    ] = None
    enable_thinking: EnableThinking = None
    thinking: Thinking = None
    thinking_budget: ThinkingBudget = None
    thinking_token_budget: ThinkingBudget = None
    thinking_budget_tokens: ThinkingBudget = None
    reasoning_budget_tokens: ThinkingBudget = None
    reasoning: Annotated[
        OpenRouterReasoning | None,
        describe(
            "OpenRouter's format for `reasoning_effort`, `enable_thinking` and `thinking_budget`."
        ),
    ] = None
    verbosity: Annotated[
        Verbosity | None,
        describe(
            "If the template does not use this variable, only `medium`, the default, is accepted."
        ),
    ] = None
    text_verbosity: Annotated[Verbosity | None, describe("An alias of `verbosity`.")] = None
    chat_template_kwargs: TemplateOptions = NULL
    logprobs: Annotated[
        bool | None, describe("Return the log-probability of every output token.")
    ] = None
    top_logprobs: Annotated[
        LogprobsCount,
        describe(
            "The number of most likely tokens to return for each position. Requires `logprobs`. "
            "`--max-logprobs` changes the maximum.",
            schema=USUAL_LOGPROBS,
        ),
    ] = None
    prompt_logprobs: PromptLogprobsCount = None
    verbose: Annotated[
        bool | None,
        describe("Return the text of the prompt in `__verbose`, as in llama.cpp."),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        describe(
            "The output continues the last message, which must be an assistant message with text "
            "and without calls. Cannot be combined with `add_generation_prompt: true`."
        ),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, describe("False is accepted only with `continue_final_message`.")
    ] = None
    store: Annotated[
        bool | None,
        describe(
            "Chat completions are not stored. The Responses API stores responses.",
            schema={"enum": [False, None]},
        ),
    ] = None
    service_tier: ServiceTier = None
    metadata: Metadata = NULL
    safety_identifier: Identifier = None
    prompt_cache_key: Identifier = None
    prompt_cache_retention: NoEffectText = None
    prompt_cache_options: NoEffectObject = None
    client_metadata: Annotated[AnyObject | None, describe("Sent by Codex. No effect.")] = None
    prediction: Annotated[
        AnyObject | None, describe("Would not speed up generation. No effect.")
    ] = None


class CompletionBody(CommonFields, kw_only=True, frozen=True):
    """The body of POST /v1/completions."""

    unsupported: ClassVar = {
        **reject_fields(**list_unsupported_fields("completions")),
        **reject_fields(
            max_completion_tokens="use max_tokens",
            messages="use POST /v1/chat/completions",
            reasoning_effort="use POST /v1/chat/completions",
            continue_final_message="use POST /v1/chat/completions",
            tools=([],),
        ),
    }

    prompt: Annotated[
        Raw,
        describe(
            "A string, a list of token IDs, or up to 128 of either. Each prompt gets `n` choices, "
            "in prompt order.",
            schema={
                "anyOf": [
                    {"type": "string"},
                    {"allOf": [{"$ref": "#/components/schemas/TokenIds"}], "minItems": 1},
                    {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 128,
                        "items": {
                            "anyOf": [
                                {"type": "string"},
                                {
                                    "allOf": [{"$ref": "#/components/schemas/TokenIds"}],
                                    "minItems": 1,
                                },
                            ]
                        },
                    },
                ]
            },
        ),
    ]
    max_tokens: Annotated[
        _TokenLimit | None,
        describe(
            "0 is valid only with `echo`. -1 means the rest of the context.", schema={"default": 16}
        ),
    ] = None
    echo: Annotated[
        bool | None,
        describe(
            "Begin each choice with its prompt. With `logprobs`, include the log-probabilities of "
            "the prompt."
        ),
    ] = None
    suffix: Annotated[
        str | None,
        describe(
            "The text after the completion, for models with fill-in-the-middle support. Rejected "
            "for other models."
        ),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None,
        describe(
            "The number of completions to generate for each prompt. The `n` completions with the "
            "highest mean log-probability per token are returned. The value must be at least `n`, "
            "or equal to `n` for streaming. `usage` counts all completions."
        ),
    ] = None
    logprobs: Annotated[
        LogprobsCount,
        describe(
            "Return the log-probability of every output token, and the given number of most "
            "likely tokens for each position. `--max-logprobs` changes the maximum.",
            schema=USUAL_LOGPROBS,
        ),
    ] = None
    prompt_logprobs: PromptLogprobsCount = None


CHAT = BodyDecoder(ChatBody, camel_case=True)
COMPLETION = BodyDecoder(CompletionBody, camel_case=True)
