"""Request fields for reasoning, with the names used by OpenAI and other servers.

Knows: all names of the effort, the on/off switch and the token budget. Must not know: which options
a model or its template supports.

    effort    reasoning_effort · reasoning.effort (OpenRouter)
    switch    enable_thinking (Qwen) · thinking, reasoning.enabled
    budget    thinking_budget and its aliases · thinking.budget_tokens · reasoning.max_tokens

A request may contain several of these fields if they agree, because some clients send several
names.
"""

from dataclasses import dataclass, replace

from app.api.fields import INT32_MAX, Fields, invalid_request
from app.core.requests import ReasoningOptions

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# OpenAI's kinds of summaries. None of them has an effect.
SUMMARIES = ("auto", "concise", "detailed")

# The names used by this server and Qwen, by vLLM, and by newer and older versions of llama.cpp.
THINKING_BUDGET_FIELDS = (
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
)

# "adaptive" and "auto" select the model's default.
_THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


@dataclass(frozen=True, slots=True)
class _FieldValue:
    """A value and the path of its field."""

    path: str
    value: object


def read_thinking(fields: Fields) -> ReasoningOptions:
    """Reads the reasoning options of a chat completion."""
    efforts = [
        _FieldValue("reasoning_effort", fields.one_of("reasoning_effort", REASONING_EFFORTS))
    ]
    switches, budgets = list[_FieldValue](), list[_FieldValue]()
    reasoning = fields.nested("reasoning")
    if reasoning is not None:
        efforts.append(_read(reasoning, "effort", reasoning.one_of("effort", REASONING_EFFORTS)))
        switches.append(_read(reasoning, "enabled", reasoning.boolean("enabled")))
        budgets.append(
            _read(reasoning, "max_tokens", reasoning.integer("max_tokens", 0, INT32_MAX))
        )
        reasoning.one_of("summary", SUMMARIES)
        reasoning.reject("exclude", False)
        reasoning.check_unknown()
    return _resolve(fields, efforts, switches, budgets)


def read_response_thinking(fields: Fields) -> ReasoningOptions:
    """Reads the reasoning options of a response. OpenAI hides reasoning and can return a summary
    instead; this server returns the reasoning itself and never summarizes it."""
    efforts = list[_FieldValue]()
    reasoning = fields.nested("reasoning")
    if reasoning is not None:
        efforts.append(_read(reasoning, "effort", reasoning.one_of("effort", REASONING_EFFORTS)))
        for name in ("summary", "generate_summary"):
            reasoning.one_of(name, SUMMARIES)
        reasoning.reject("context", "auto")
        reasoning.reject("mode", "standard")
        reasoning.check_unknown()
    return _resolve(fields, efforts, [], [])


def _resolve(
    fields: Fields,
    efforts: list[_FieldValue],
    switches: list[_FieldValue],
    budgets: list[_FieldValue],
) -> ReasoningOptions:
    """Merges the top-level fields, and checks that all fields agree."""
    switches = [_read(fields, "enable_thinking", fields.boolean("enable_thinking")), *switches]
    thinking = fields.value("thinking")
    if isinstance(thinking, bool):
        switches.append(_FieldValue("thinking", thinking))
    elif (nested := fields.nested("thinking")) is not None:
        kind = nested.required_one_of("type", tuple(_THINKING_TYPES))
        switches.append(_FieldValue("thinking", _THINKING_TYPES[kind]))
        tokens = nested.integer("budget_tokens", 0, INT32_MAX)
        budgets = [*budgets, _read(nested, "budget_tokens", tokens)]
        nested.check_unknown()
    effort, switch = _agree(efforts), _agree(switches)
    budget = _agree([*_read_budgets(fields), *budgets])
    tokens = None if budget is None or budget.value == -1 else budget.value
    options = ReasoningOptions(
        effort=None if effort is None else str(effort.value),
        token_budget=tokens if isinstance(tokens, int) else None,
    )
    if effort is not None:
        options = replace(options, param=effort.path)
    if budget is not None and tokens is not None:
        options = replace(options, budget_param=budget.path)
    return options if switch is None else _apply_switch(options, effort, switch)


def _apply_switch(
    options: ReasoningOptions, effort: _FieldValue | None, switch: _FieldValue
) -> ReasoningOptions:
    off = switch.value is False
    if effort is None:
        changed = replace(options, param=switch.path)
        return replace(changed, effort="none") if off else replace(changed, enabled=True)
    if off != (effort.value == "none"):
        raise invalid_request(
            switch.path, f"{switch.path} and {effort.path} exclude each other: keep one of them"
        )
    return options


def _read_budgets(fields: Fields) -> list[_FieldValue]:
    """Reads the maximum number of reasoning tokens. -1 means no limit, as in llama.cpp."""
    return [
        _read(fields, name, fields.integer(name, -1, INT32_MAX)) for name in THINKING_BUDGET_FIELDS
    ]


def _read(fields: Fields, name: str, value: object) -> _FieldValue:
    return _FieldValue(fields.path(name), value)


def _agree(candidates: list[_FieldValue]) -> _FieldValue | None:
    """Returns the first value that is set. Raises AppError(INVALID) if the values differ."""
    values = [one for one in candidates if one.value is not None]
    for other in values[1:]:
        if other.value != values[0].value:
            raise invalid_request(
                other.path, f"{values[0].path} and {other.path} are aliases: keep one of them"
            )
    return values[0] if values else None
