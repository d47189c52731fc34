"""Request fields for sampling, stop conditions and chat templates.

Knows: these fields, including mlxrunner's extensions, which are shared by all generation endpoints.
Must not know: the prompt.
"""

from dataclasses import dataclass, replace
from typing import Any

from app.api.fields import (
    INT32_MAX,
    Fields,
    as_number,
    as_token_ids,
    invalid_request,
    quote_value,
)
from app.core.errors import mark_client_text
from app.core.requests import (
    UNCONSTRAINED_FIELDS,
    GenerateRequest,
    ReasoningOptions,
    Verbosity,
)
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob, SamplingValue

# Variables that enable or disable reasoning in most templates.
SWITCH_VARIABLES = ("enable_thinking", "thinking")

# Variables that the server sets itself, from other fields or from its own state.
RESERVED_TEMPLATE_OPTIONS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "self",
)


def read_template_options(fields: Fields, thinking: ReasoningOptions) -> dict[str, Any]:
    """Reads variables for the chat template, as in vLLM and llama.cpp. A template may ignore
    them."""
    options = fields.mapping("chat_template_kwargs") or {}
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


def read_verbosity(fields: Fields, *aliases: str) -> Verbosity | None:
    """Reads the first of the field and its aliases that is set."""
    for name in ("verbosity", *aliases):
        level = fields.one_of(name, VERBOSITIES)
        if level is not None:
            return Verbosity(level=level, param=fields.path(name))
    return None


VERBOSITIES = ("low", "medium", "high")

MAX_STOP_STRINGS = 16  # OpenAI allows four, but many local clients send more
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """The stop conditions in addition to the maximum length, and the texts that the output must not
    contain. See `GenerateRequest` for the fields."""

    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    bad_words: tuple[str, ...] = ()

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        return replace(
            request,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop=self.include_stop,
            bad_words=self.bad_words,
        )


def read_sampling(fields: Fields) -> dict[str, SamplingValue]:
    """Returns only the parameters that the client set. The model's defaults apply to all other
    parameters."""
    read: dict[str, SamplingValue] = {
        knob.name: _read_knob_or_alias(fields, knob) for knob in SAMPLING_KNOBS
    }
    read["logit_bias"] = _logit_bias(fields)
    read["allowed_token_ids"] = _read_allowed_token_ids(fields)
    return {name: value for name, value in read.items() if value is not None}


def _read_knob_or_alias(fields: Fields, knob: SamplingKnob) -> float | int | None:
    value = read_knob(fields, knob, knob.name, knob.high)
    if knob.runner_name is None:
        return value
    alias = read_knob(fields, knob, knob.runner_name, knob.high)
    if value is not None and alias is not None and value != alias:
        raise invalid_request(
            knob.runner_name, f"{knob.name} and {knob.runner_name} are aliases: keep one of them"
        )
    return alias if value is None else value


def _read_allowed_token_ids(fields: Fields) -> tuple[int, ...] | None:
    ids = _read_token_ids(fields, "allowed_token_ids")
    if ids == ():
        raise invalid_request(
            "allowed_token_ids",
            "allowed_token_ids must contain at least one token ID: omit it to allow all tokens",
        )
    return ids


def _read_token_ids(fields: Fields, name: str) -> tuple[int, ...] | None:
    """Reads token IDs and removes duplicates. The IDs are checked against the vocabulary later."""
    ids = fields.array(name)
    if ids is None:
        return None
    return tuple(sorted(set(as_token_ids(ids, fields.path(name))))) if ids else ()


def read_knob(fields: Fields, knob: SamplingKnob, name: str, high: float) -> float | int | None:
    """Reads one sampling parameter. Returns None if it is not set. name: the name of the field."""
    if knob.kind is int:
        value = fields.integer(name, int(knob.low), int(high))
    else:
        value = fields.number(name, knob.low, high)
    return knob.default if value is not None and value == knob.off else value


def read_stop_conditions(
    fields: Fields, *, max_tokens: int | None, constrained: bool
) -> StopConditions:
    """Reads the stop conditions. constrained: whether all or part of the output must match a
    grammar. A grammar determines where the output may end and which tokens it may contain, so with
    other conditions, no valid token might be left."""
    stop_conditions = StopConditions(
        min_tokens=fields.integer("min_tokens", 0, INT32_MAX) or 0,
        ignore_eos=fields.boolean("ignore_eos") or False,
        stop=fields.strings("stop", MAX_STOP_STRINGS),
        stop_token_ids=_read_stop_token_ids(fields),
        include_stop=fields.boolean("include_stop_str_in_output") or False,
        bad_words=_read_bad_words(fields),
    )
    if max_tokens is not None and stop_conditions.min_tokens > max_tokens:
        raise invalid_request(
            "min_tokens",
            f"min_tokens is {stop_conditions.min_tokens}, but max_tokens is {max_tokens}",
        )
    if constrained:
        for name in UNCONSTRAINED_FIELDS:
            if fields.value(name):
                raise invalid_request(
                    name,
                    f"{name} cannot be combined with structured output, a thinking budget, strict "
                    "tools or required tool calls: remove one of them",
                )
    return stop_conditions


def _read_stop_token_ids(fields: Fields) -> tuple[int, ...]:
    count = len(fields.array("stop_token_ids") or ())
    if count > MAX_STOP_TOKEN_IDS:
        raise invalid_request(
            "stop_token_ids",
            f"stop_token_ids must contain at most {MAX_STOP_TOKEN_IDS} IDs, not {count}",
        )
    return _read_token_ids(fields, "stop_token_ids") or ()


def _read_bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.strings("bad_words", MAX_BAD_WORDS)
    for word in words:
        if len(word) > MAX_BAD_WORD_CHARS or not word.strip(" "):
            raise invalid_request(
                "bad_words",
                f"bad_words must contain texts of 1 to {MAX_BAD_WORD_CHARS} characters, not only "
                f"spaces, and not {quote_value(word)}",
            )
    return words


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    # clients of llama.cpp send an empty array for none
    if fields.value("logit_bias") == []:
        return None
    biases = fields.nested("logit_bias")
    if biases is None:
        return None
    read: list[tuple[int, float]] = []
    for key, value in biases.items():
        path = biases.path(key[:20])
        # Each ID has only one spelling; "7" and "07" would be two biases for the same token.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            at = mark_client_text(path)
            raise invalid_request(
                path, f"{at}: keys are token IDs, such as '42', not {quote_value(key)}"
            )
        bias = as_number(value)
        if bias is None or not -100 <= bias <= 100:
            raise invalid_request(
                path, f"{path} must be a number from -100 to 100, not {quote_value(value)}"
            )
        read.append((int(key), bias))
    return tuple(read)
