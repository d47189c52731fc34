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

from app.api.fields import invalid_request
from app.api.schema.openai import ChatBody
from app.api.schema.reasoning import THINKING_BUDGET_FIELDS, ThinkingOptions
from app.api.schema.responses import ResponseBody
from app.core.requests import ReasoningOptions

# "adaptive" and "auto" select the model's default.
_THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


@dataclass(frozen=True, slots=True)
class _FieldValue:
    """A value and the path of its field."""

    path: str
    value: object


def build_thinking(body: ChatBody) -> ReasoningOptions:
    """Returns the reasoning options of a chat completion."""
    efforts = [_FieldValue("reasoning_effort", body.reasoning_effort)]
    switches, budgets = list[_FieldValue](), list[_FieldValue]()
    if (reasoning := body.reasoning) is not None:
        efforts.append(_FieldValue("reasoning.effort", reasoning.effort))
        switches.append(_FieldValue("reasoning.enabled", reasoning.enabled))
        budgets.append(_FieldValue("reasoning.max_tokens", reasoning.max_tokens))
    return _resolve(body, efforts, switches, budgets)


def build_response_thinking(body: ResponseBody, effort: str | None) -> ReasoningOptions:
    """Returns the reasoning options of a response. effort: `reasoning.effort`."""
    return _resolve(body, [_FieldValue("reasoning.effort", effort)], [], [])


def _resolve(
    body: ChatBody | ResponseBody,
    efforts: list[_FieldValue],
    switches: list[_FieldValue],
    budgets: list[_FieldValue],
) -> ReasoningOptions:
    """Merges the top-level fields, and checks that all fields agree."""
    switches = [_FieldValue("enable_thinking", body.enable_thinking), *switches]
    match body.thinking:
        case ThinkingOptions(type=kind, budget_tokens=tokens):
            switches.append(_FieldValue("thinking", _THINKING_TYPES[kind]))
            budgets = [*budgets, _FieldValue("thinking.budget_tokens", tokens)]
        case switch:
            switches.append(_FieldValue("thinking", switch))
    effort, switch = _agree(efforts), _agree(switches)
    budget = _agree([*_list_budgets(body), *budgets])
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


def _list_budgets(body: ChatBody | ResponseBody) -> list[_FieldValue]:
    """Returns the maximum number of reasoning tokens under each name. -1 means no limit, as in
    llama.cpp."""
    return [_FieldValue(name, getattr(body, name)) for name in THINKING_BUDGET_FIELDS]


def _agree(candidates: list[_FieldValue]) -> _FieldValue | None:
    """Returns the first value that is set. Raises AppError(INVALID) if the values differ."""
    values = [one for one in candidates if one.value is not None]
    for other in values[1:]:
        if other.value != values[0].value:
            raise invalid_request(
                other.path, f"{values[0].path} and {other.path} are aliases: keep one of them"
            )
    return values[0] if values else None
