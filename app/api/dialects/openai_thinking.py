"""How much a model is to think before it answers, and what else its chat template is told.

Knows OpenAI's word for it, and the budgets of vLLM and llama.cpp. Must not know: templates, or
whether the model thinks at all.
"""

from typing import Any

from app.api.fields import INT32_MAX, Fields, invalid_request
from app.core.requests import ReasoningOptions

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Ours (and Qwen's) · vLLM's · llama.cpp's, older and newer.
THINKING_BUDGET_FIELDS = (
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
)

# What a template is given anyway, by fields of their own or by the server.
RESERVED_TEMPLATE_OPTIONS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "self",
)


def read_thinking(fields: Fields) -> ReasoningOptions:
    return ReasoningOptions(
        effort=fields.one_of("reasoning_effort", REASONING_EFFORTS),
        token_budget=read_thinking_budget(fields),
    )


def read_template_options(fields: Fields, thinking: ReasoningOptions) -> dict[str, Any]:
    """Words for the chat template, as vLLM and llama.cpp take them. Which of them a template looks
    at is its own business."""
    options = fields.mapping("chat_template_kwargs") or {}
    for name in options:
        path = f"chat_template_kwargs.{name[:200]}"
        if name in RESERVED_TEMPLATE_OPTIONS:
            raise invalid_request(path, f"{path} cannot be set: the server sets it")
        if name == "reasoning_effort" and thinking.effort is not None:
            raise invalid_request(
                path, f"{path} duplicates the field reasoning_effort: keep one of them"
            )
    return options


def read_thinking_budget(fields: Fields) -> int | None:
    """Most tokens of reasoning. -1 is llama.cpp's way to say that there is no limit."""
    given = [(name, fields.integer(name, -1, INT32_MAX)) for name in THINKING_BUDGET_FIELDS]
    said = [(name, budget) for name, budget in given if budget is not None]
    if len(said) > 1:
        (first, _), (second, _), *_ = said
        raise invalid_request(second, f"{first} and {second} are aliases: keep one of them")
    return said[0][1] if said and said[0][1] >= 0 else None
