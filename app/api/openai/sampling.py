"""What OpenAI's requests say of tokens: which may be drawn, how, and when it is enough.

Knows these fields, our extensions among them; every endpoint that generates has them in common.
Must not know: what is generated from.

How much a model is to think before it answers, and what else its chat template is told.
"""

from dataclasses import dataclass
from typing import Any

from app.api.fields import INT32_MAX, INT64, Fields, as_number, invalid_request, quote_value
from app.core.errors import mark_client_text
from app.core.requests import ReasoningOptions, SamplingValue

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


MAX_STOP_STRINGS = 16  # OpenAI allows four, which few local clients keep to


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When an answer is over, but for its greatest length."""

    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]


def read_sampling(fields: Fields) -> dict[str, SamplingValue]:
    """Only what the client set, so that the model's defaults can stand beneath it."""
    top_k = fields.integer("top_k", -1, INT32_MAX)
    read: dict[str, SamplingValue] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": 0 if top_k == -1 else top_k,  # two ways to say "off"
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10, exclusive_low=True),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repeat_last_n": fields.integer("repeat_last_n", -1, INT32_MAX),
        "logit_bias": _logit_bias(fields),
        "seed": fields.integer("seed", *INT64),
    }
    return {name: value for name, value in read.items() if value is not None}


def read_stop_conditions(
    fields: Fields, *, max_tokens: int | None, constrained: bool
) -> StopConditions:
    """constrained: the answer, or a part of it, must follow a grammar. A grammar says itself where
    an answer may end, and it would leave nothing to draw where it says so too early."""
    ending = StopConditions(
        min_tokens=fields.integer("min_tokens", 0, INT32_MAX) or 0,
        ignore_eos=fields.boolean("ignore_eos") or False,
        stop=fields.strings("stop", MAX_STOP_STRINGS),
    )
    if max_tokens is not None and ending.min_tokens > max_tokens:
        raise invalid_request(
            "min_tokens", f"min_tokens is {ending.min_tokens}, but max_tokens is {max_tokens}"
        )
    if constrained:
        for name, given in (("min_tokens", ending.min_tokens), ("ignore_eos", ending.ignore_eos)):
            if given:
                raise invalid_request(
                    name,
                    f"{name} cannot be combined with structured output, a thinking budget, strict "
                    "tools or required tool calls: leave out one of them",
                )
    return ending


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    biases = fields.nested("logit_bias")
    if biases is None:
        return None
    read: list[tuple[int, float]] = []
    for key, value in biases.items():
        path = biases.path(key[:20])
        # One spelling per id: "7" and "07" would be two biases for one token.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            at = mark_client_text(path)
            raise invalid_request(
                path, f"{at}: keys are token ids, such as '42', not {quote_value(key)}"
            )
        bias = as_number(value)
        if bias is None or not -100 <= bias <= 100:
            raise invalid_request(
                path, f"{path} must be a number from -100 to 100, not {quote_value(value)}"
            )
        read.append((int(key), bias))
    return tuple(read)
