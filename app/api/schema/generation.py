"""Request fields of every endpoint that generates text: sampling, reasoning, stop conditions,
formats.

Knows: these fields, including mlxrunner's extensions and the names of OpenAI and other servers.
Must not know: prompts, how the values are combined and used, which options a model supports.
"""

from typing import Annotated, Literal

from msgspec import Meta, Raw

from app.api.schema.base import NULL, Model, Options, Text, TokenId, describe, reject_fields
from app.core.sampling_params import DEFAULT_MAX_LOGPROBS, INT32_MAX, INT64_MAX, INT64_MIN

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# The names used by this server and Qwen, by vLLM, and by newer and older versions of llama.cpp.
THINKING_BUDGET_FIELDS = (
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
)

# OpenAI's kinds of summaries. None of them has an effect.
Summary = Literal["auto", "concise", "detailed"]

_Budget = Annotated[int, Meta(ge=0, le=INT32_MAX)]

EnableThinking = Annotated[
    bool | None,
    describe(
        "Whether the model reasons before the content, if the template supports both.",
        component="EnableThinking",
    ),
]
ThinkingBudget = Annotated[
    Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None,
    describe(
        "The maximum number of reasoning tokens; then the server ends the reasoning, and the model "
        "continues with the content. -1 means no limit. The field has four aliases: mlxrunner's, "
        "vLLM's, and llama.cpp's older and newer names. A request can set only one of them.",
        component="ThinkingBudget",
    ),
]

MAX_STOP_STRINGS = 16  # OpenAI allows four, but many local clients send more
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 256

# The maximum number of choices, and therefore prompts, per request. OpenAI has the same limit for
# `n`.
MAX_CHOICES = 128

_STRINGS = "a string or an array of strings, none of them empty"
_NO_GRAMMAR = "Cannot be combined with a format, strict tools, required calls or a thinking budget."
_BadWord = Annotated[
    str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS, extra_json_schema={"pattern": "[^ ]"})
]

Temperature = Annotated[
    Annotated[float, Meta(ge=0, le=2)] | None,
    describe(
        "0 means greedy sampling. The default comes from the model, or is 1.",
        component="Temperature",
    ),
]
TopP = Annotated[
    Annotated[float, Meta(ge=0, le=1)] | None,
    describe(
        "Keep the smallest set of most likely tokens whose total probability reaches this value. 1 "
        "turns the filter off.",
        component="TopP",
    ),
]
TopK = Annotated[
    Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None,
    describe(
        "Keep this many of the most likely tokens. 0 and -1 turn the filter off.",
        component="TopK",
    ),
]
MinP = Annotated[
    Annotated[float, Meta(ge=0, le=1)] | None,
    describe(
        "Keep tokens with at least this probability, relative to the most likely token. 0 turns "
        "the filter off.",
        component="MinP",
    ),
]
Penalty = Annotated[
    Annotated[float, Meta(ge=-2, le=2)] | None,
    describe(
        "Subtracted from the logits of tokens that have occurred: the presence penalty once, the "
        "frequency penalty once per occurrence. 0 turns the penalty off.",
        component="Penalty",
    ),
]
RepetitionPenalty = Annotated[
    # a smaller penalty would take logits out of the range of float32
    Annotated[float, Meta(ge=0.01, le=10)] | None,
    describe(
        "Divides the positive logits of tokens that have occurred, and multiplies the negative "
        "ones.",
        component="RepetitionPenalty",
    ),
]
RepeatLastN = Annotated[
    Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None,
    describe(
        "The number of recent tokens to which the three penalties apply, including the prompt. "
        "-1, the default, means all tokens. 0 means none.",
        component="RepeatLastN",
    ),
]
Seed = Annotated[
    Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None,
    describe("The same request with the same seed produces the same tokens.", component="Seed"),
]
LogitBias = Annotated[
    Raw,
    describe(
        "A map from token IDs to values that are added to the logits. 100 forces a token, and "
        "-100 forbids it.",
        component="LogitBias",
        schema={
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": ["number", "null"], "minimum": -100, "maximum": 100},
            "example": {"42": -100},
        },
    ),
]
AllowedTokenIds = Annotated[
    Annotated[list[TokenId], Meta(min_length=1)] | None,
    describe(
        f"The output contains only these token IDs. {_NO_GRAMMAR}", component="AllowedTokenIds"
    ),
]
BadWords = Annotated[
    _BadWord | Annotated[list[_BadWord], Meta(max_length=MAX_BAD_WORDS)] | None,
    describe(
        f"Texts that the output must not contain. {_NO_GRAMMAR}",
        component="BadWords",
        expected=f"texts of 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces",
    ),
]
Stop = Annotated[
    Text | Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)] | None,
    describe(
        "Strings that end the output. They are not part of the output.",
        component="Stop",
        expected=_STRINGS,
    ),
]
StopTokenIds = Annotated[
    Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None,
    describe(f"Token IDs that end the output. {_NO_GRAMMAR}", component="StopTokenIds"),
]
IncludeStop = Annotated[
    bool | None,
    describe(
        "The output includes the stop string or the stop token that ended it.",
        component="IncludeStop",
        schema={"default": False},
    ),
]
MinTokens = Annotated[
    Annotated[int, Meta(ge=0, le=INT32_MAX)] | None,
    describe(
        f"The minimum number of output tokens. {_NO_GRAMMAR}",
        component="MinTokens",
        schema={"default": 0},
    ),
]
IgnoreEos = Annotated[
    bool | None,
    describe(
        f"Continue after the end-of-sequence token. {_NO_GRAMMAR}",
        component="IgnoreEos",
        schema={"default": False},
    ),
]
KeepAlive = Annotated[
    float | str | None,
    describe(
        "How long the model stays in memory after this request, as in Ollama: seconds, or a "
        "duration such as `5m`. 0 unloads the model when it becomes idle, and a negative value "
        "keeps it loaded forever. The value of the latest accepted request applies. If the server "
        "has API keys, only an admin key can set a shorter time than the operator's.",
        component="KeepAlive",
        expected='a number of seconds or a duration such as "5m"',
    ),
]
CachePrompt = Annotated[
    bool | None,
    describe(
        "Whether the request may use cached prefixes. If false, the whole prompt is prefilled. "
        "Other requests can still use the resulting prefix.",
        component="CachePrompt",
        schema={"default": True},
    ),
]
NumKeep = Annotated[
    Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None,
    describe(
        "The number of prompt tokens that a context shift keeps; -1 means the whole prompt.",
        component="NumKeep",
    ),
]
Stream = Annotated[
    bool | None,
    describe(
        "Stream the response as server-sent events.",
        component="Stream",
        schema={"default": False},
    ),
]


class ThinkingOptions(Options, kw_only=True, frozen=True):
    """The format of Anthropic and of several servers."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: _Budget | None = None


Thinking = Annotated[
    bool | ThinkingOptions | None,
    describe(
        "The same as `enable_thinking`, with an optional thinking budget.", component="Thinking"
    ),
]


class OpenRouterReasoning(Options, kw_only=True, frozen=True):
    """OpenRouter's format for `reasoning_effort`, `enable_thinking` and `thinking_budget`."""

    unsupported = reject_fields(exclude=(False,))

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    max_tokens: _Budget | None = None
    summary: Summary | None = None


class StreamOptions(Options, kw_only=True, frozen=True):
    """OpenAI's stream options, and `continuous_usage_stats` from vLLM and SGLang."""

    unsupported = reject_fields(include_obfuscation=(False,))

    include_usage: Annotated[
        bool | None,
        describe(
            "Send an additional chunk without choices that contains `usage`. In all other chunks, "
            "`usage` is null, unless `continuous_usage_stats` is set."
        ),
    ] = None
    continuous_usage_stats: Annotated[
        bool | None,
        describe(
            "`usage` in every chunk contains the choice's token counts so far, as in vLLM and "
            "SGLang."
        ),
    ] = None


StreamOptionsField = Annotated[
    StreamOptions | None, describe("Requires `stream: true`.", component="StreamOptions")
]
Choices = Annotated[
    Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
    describe(
        "The number of choices per prompt. The prompt is prefilled only once.",
        component="Choices",
        schema={"default": 1},
    ),
]
ReturnTokenIds = Annotated[
    bool | None,
    describe(
        "Return the token IDs of the prompt and of the output.",
        component="ReturnTokenIds",
        schema={"default": False},
    ),
]
# app/core/sampling_params.py limits the number, which operators may increase
LogprobsCount = Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None
USUAL_LOGPROBS: dict[str, int] = {"minimum": 0, "maximum": DEFAULT_MAX_LOGPROBS}
PromptLogprobsCount = Annotated[
    LogprobsCount,
    describe(
        "Return the log-probability of every prompt token, and the given number of most likely "
        "tokens for each position, as in vLLM. It cannot be streamed. `--max-logprobs` changes the "
        "maximum.",
        component="PromptLogprobsCount",
        schema=USUAL_LOGPROBS,
    ),
]
ReturnProgress = Annotated[
    bool | None,
    describe(
        "Stream the progress of the prefill as chunks with `prompt_progress`, as in llama.cpp.",
        component="ReturnProgress",
    ),
]
Verbosity = Literal["low", "medium", "high"]


class SamplingFields(Options, kw_only=True, frozen=True):
    """The sampling parameters that OpenAI's, Anthropic's and llama.cpp's requests share. Their
    ranges are those of `app.core.sampling_params.SAMPLING_KNOBS`."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: RepetitionPenalty = None
    repeat_penalty: RepetitionPenalty = None
    repeat_last_n: RepeatLastN = None
    seed: Seed = None
    logit_bias: LogitBias = NULL
    allowed_token_ids: AllowedTokenIds = None


class GenerationFields(SamplingFields, kw_only=True, frozen=True):
    """The fields that all endpoints of OpenAI's API that generate text share."""

    model: Model = None
    stream: Stream = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    include_stop_str_in_output: IncludeStop = None
    bad_words: BadWords = None
    min_tokens: MinTokens = None
    ignore_eos: IgnoreEos = None
    cache_prompt: CachePrompt = None
    keep_alive: KeepAlive = None
    ttl: KeepAlive = None
