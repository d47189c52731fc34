"""Request fields for sampling, stop conditions, reasoning and chat templates.

Knows: these fields, including our extensions, which all generating endpoints share. Must not know:
the prompt.
"""

from dataclasses import dataclass
from typing import Any

from app.api.fields import INT32_MAX, Fields, as_number, invalid_request, quote_value
from app.core.errors import mark_client_text
from app.core.requests import ReasoningOptions
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob, SamplingValue

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Our name (and Qwen's), vLLM's, llama.cpp's newer and older names.
THINKING_BUDGET_FIELDS = (
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
)

# Variables that the server sets itself, from other fields or its own state.
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
    """Reads variables for the chat template, as vLLM and llama.cpp accept them. A template may
    ignore them."""
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
    """Reads the largest number of reasoning tokens. -1 means no limit, as in llama.cpp."""
    given = [(name, fields.integer(name, -1, INT32_MAX)) for name in THINKING_BUDGET_FIELDS]
    said = [(name, budget) for name, budget in given if budget is not None]
    if len(said) > 1:
        (first, _), (second, _), *_ = said
        raise invalid_request(second, f"{first} and {second} are aliases: keep one of them")
    return said[0][1] if said and said[0][1] >= 0 else None


MAX_STOP_STRINGS = 16  # OpenAI allows four, but few local clients respect that


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When generation ends, besides its maximum length."""

    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]


def read_sampling(fields: Fields) -> dict[str, SamplingValue]:
    """Returns only the parameters that the client set; the model's defaults apply to the others."""
    read: dict[str, SamplingValue] = {
        knob.name: read_knob(fields, knob, knob.name, knob.high) for knob in SAMPLING_KNOBS
    }
    read["logit_bias"] = _logit_bias(fields)
    return {name: value for name, value in read.items() if value is not None}


def read_knob(fields: Fields, knob: SamplingKnob, name: str, high: float) -> float | int | None:
    """None where it is not set. name: of the field."""
    if knob.kind is int:
        value = fields.integer(name, int(knob.low), int(high))
    else:
        value = fields.number(name, knob.low, high, exclusive_low=knob.exclusive_low)
    return knob.default if value is not None and value == knob.off else value


def read_stop_conditions(
    fields: Fields, *, max_tokens: int | None, constrained: bool
) -> StopConditions:
    """Reads the stop conditions. constrained: all or part of the output must follow a grammar. The
    grammar determines where the output may end, so other stop conditions could leave no valid
    token."""
    stop_conditions = StopConditions(
        min_tokens=fields.integer("min_tokens", 0, INT32_MAX) or 0,
        ignore_eos=fields.boolean("ignore_eos") or False,
        stop=fields.strings("stop", MAX_STOP_STRINGS),
    )
    if max_tokens is not None and stop_conditions.min_tokens > max_tokens:
        raise invalid_request(
            "min_tokens",
            f"min_tokens is {stop_conditions.min_tokens}, but max_tokens is {max_tokens}",
        )
    if constrained:
        for name, given in (
            ("min_tokens", stop_conditions.min_tokens),
            ("ignore_eos", stop_conditions.ignore_eos),
        ):
            if given:
                raise invalid_request(
                    name,
                    f"{name} cannot be combined with structured output, a thinking budget, strict "
                    "tools or required tool calls: leave out one of them",
                )
    return stop_conditions


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    biases = fields.nested("logit_bias")
    if biases is None:
        return None
    read: list[tuple[int, float]] = []
    for key, value in biases.items():
        path = biases.path(key[:20])
        # One spelling per id: "7" and "07" would be two biases for the same token.
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
