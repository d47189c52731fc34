"""Request fields for sampling, reasoning, stop conditions and chat templates: converts them for a
request.

Knows: these fields, including mlxrunner's extensions, which are shared by all generation endpoints;
all names of the reasoning effort, the on/off switch and the token budget. Must not know: the
prompt, which options a model or its template supports.

    effort    reasoning_effort · reasoning.effort (OpenRouter)
    switch    enable_thinking (Qwen) · thinking, reasoning.enabled
    budget    thinking_budget and its aliases · thinking.budget_tokens · reasoning.max_tokens

A request may contain several of the fields for reasoning if they agree, because some clients send
several names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from msgspec import Raw

from app.api.fields import as_number, invalid_request, quote_value
from app.api.schema.decode import decode_json, decode_object
from app.api.schema.generation import (
    THINKING_BUDGET_FIELDS,
    GenerationFields,
    SamplingFields,
    ThinkingOptions,
)
from app.api.schema.openai import RESERVED_TEMPLATE_OPTIONS, ChatBody
from app.api.schema.responses import ResponseBody
from app.core.errors import mark_client_text
from app.core.requests import (
    UNCONSTRAINED_FIELDS,
    ReasoningOptions,
    Verbosity,
)
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob, SamplingValue

# Variables that enable or disable reasoning in most templates.
SWITCH_VARIABLES = ("enable_thinking", "thinking")

# "adaptive" and "auto" select the model's default.
_THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


def build_template_options(value: Raw, thinking: ReasoningOptions) -> dict[str, Any]:
    """Returns the variables for the chat template in `chat_template_kwargs`, as in vLLM and
    llama.cpp. A template may ignore them."""
    options = decode_object(value, "chat_template_kwargs") or {}
    for name in options:
        path = f"chat_template_kwargs.{name[:200]}"
        if name in RESERVED_TEMPLATE_OPTIONS:
            raise invalid_request(path, f"{path} cannot be set: the server sets it")
        if name == "reasoning_effort" and thinking.effort is not None:
            raise invalid_request(
                path, f"{path} duplicates the field {thinking.param}: keep one of them"
            )
        if name in SWITCH_VARIABLES and _contradicts(thinking, options[name]):
            raise invalid_request(
                path, f"{path} duplicates the field {thinking.param}: keep one of them"
            )
    return options


def _contradicts(thinking: ReasoningOptions, switch: object) -> bool:
    return (thinking.enabled and switch is False) or (thinking.effort == "none" and switch is True)


def build_verbosity(**levels: str | None) -> Verbosity | None:
    """Returns the first level that is set. levels: by the names of the fields."""
    return next(
        (Verbosity(level=level, param=name) for name, level in levels.items() if level is not None),
        None,
    )


def build_sampling(body: SamplingFields) -> dict[str, SamplingValue]:
    """Returns only the parameters that the client set. The model's defaults apply to all other
    parameters."""
    allowed = body.allowed_token_ids
    values: dict[str, SamplingValue] = {
        knob.name: _get_knob(body, knob) for knob in SAMPLING_KNOBS
    } | {
        "logit_bias": _build_logit_bias(body.logit_bias),
        "allowed_token_ids": None if allowed is None else _sort_token_ids(allowed),
    }
    return {name: value for name, value in values.items() if value is not None}


def _get_knob(body: SamplingFields, knob: SamplingKnob) -> float | int | None:
    value = getattr(body, knob.name)
    if knob.runner_name is not None:
        alias = getattr(body, knob.runner_name)
        if value is not None and alias is not None and value != alias:
            raise invalid_request(
                knob.runner_name,
                f"{knob.name} and {knob.runner_name} are aliases: keep one of them",
            )
        value = alias if value is None else value
    return knob.default if value is not None and value == knob.off else value


def _sort_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    """Returns each token ID once. The IDs are checked against the vocabulary later."""
    return tuple(sorted(set(ids or ())))


def build_stop_conditions(
    body: GenerationFields, *, max_tokens: int | None, constrained: bool
) -> dict[str, Any]:
    """Returns the fields of `GenerateRequest` that end the output before its maximum length, or
    that it must not contain. constrained: whether all or part of the output must match a grammar. A
    grammar determines where the output may end and which tokens it may contain, so with other
    conditions, no valid token might be left."""
    bad_words = _build_bad_words(to_tuple(body.bad_words))
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid_request(
            "min_tokens", f"min_tokens is {min_tokens}, but max_tokens is {max_tokens}"
        )
    if constrained:
        for name in UNCONSTRAINED_FIELDS:
            if getattr(body, name):
                raise invalid_request(
                    name,
                    f"{name} cannot be combined with structured output, a thinking budget, strict "
                    "tools or required tool calls: remove one of them",
                )
    return {
        "min_tokens": min_tokens,
        "ignore_eos": body.ignore_eos or False,
        "stop": to_tuple(body.stop),
        "stop_token_ids": _sort_token_ids(body.stop_token_ids),
        "include_stop": body.include_stop_str_in_output or False,
        "bad_words": bad_words,
    }


def to_tuple(texts: str | Sequence[str] | None) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts or ())


def _build_bad_words(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if not word.strip(" "):
            raise invalid_request(
                "bad_words", "bad_words must contain texts that are not only spaces"
            )
    return words


def _build_logit_bias(value: Raw) -> tuple[tuple[int, float], ...] | None:
    # clients of llama.cpp send an empty array for none
    biases = decode_json(value)
    if biases is None or biases == []:
        return None
    if not isinstance(biases, dict):
        raise invalid_request(
            "logit_bias", f"logit_bias must be an object, not {quote_value(biases)}"
        )
    return tuple(
        (_parse_token_id(key), _check_bias(key, bias))
        for key, bias in cast("dict[str, object]", biases).items()
        if bias is not None
    )


def _parse_token_id(key: str) -> int:
    # Each ID has only one spelling; "7" and "07" would be two biases for the same token.
    if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
        path = f"logit_bias.{key[:20]}"
        raise invalid_request(
            path,
            f"{mark_client_text(path)}: keys are token IDs, such as '42', not {quote_value(key)}",
        )
    return int(key)


def _check_bias(key: str, value: object) -> float:
    bias = as_number(value)
    if bias is None or not -100 <= bias <= 100:
        path = f"logit_bias.{key}"
        raise invalid_request(
            path, f"{path} must be a number from -100 to 100, not {quote_value(value)}"
        )
    return bias


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
