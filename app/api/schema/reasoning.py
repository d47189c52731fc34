"""Request fields for reasoning, with the names used by OpenAI and other servers.

Knows: these fields. Must not know: how they are combined, which options a model supports.
"""

from typing import Annotated, Literal

from msgspec import Meta

from app.api.schema.base import Options, describe, reject_fields
from app.core.sampling_params import INT32_MAX

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
