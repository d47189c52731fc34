"""Ollama's `options`, `keep_alive`, `think` and `format`.

Knows: their names, types and defaults. Must not know: prompts, responses.

If a request omits an option, the model's recommended value applies. If there is none, Ollama's
default applies.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from msgspec import Raw

from app.api.fields import INT64, as_mapping, invalid_request, quote_value
from app.api.openai.sampling import to_tuple
from app.api.openai.structured_outputs import ANY_OBJECT_SCHEMA, build_json_schema
from app.api.schema import ollama as schema
from app.api.schema.decode import decode_json
from app.core.errors import AppError
from app.core.models import ModelDetails
from app.core.requests import JsonSchema, ReasoningOptions
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob, SamplingValue

log = logging.getLogger(__name__)

# Ollama's own defaults, where they differ from ours (api/types.go, DefaultOptions)
DEFAULT_OPTIONS: Mapping[str, SamplingValue] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repeat_last_n": 64,
}

MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions:
    """The options of a request. sampling: all parameters, with defaults filled in. max_tokens,
    max_context, num_keep: see `GenerateRequest`."""

    sampling: Mapping[str, SamplingValue]
    max_tokens: int | None
    max_context: int | None
    num_keep: int | None
    stop: tuple[str, ...]


def build_options(options: schema.OllamaOptions | None, details: ModelDetails) -> OllamaOptions:
    """Raises AppError(INVALID) for a value out of range."""
    options = options or schema.OllamaOptions()
    requested = {
        knob.name: value
        for knob in SAMPLING_KNOBS
        if (value := _get_knob(options, knob)) is not None
    }
    sampling = {**DEFAULT_OPTIONS, **details.defaults, **requested}
    if (seed := sampling.get("seed")) is not None and isinstance(seed, int) and seed < 0:
        sampling["seed"] = None
    num_predict = _truncate(options.num_predict, "num_predict")
    return OllamaOptions(
        sampling=sampling,
        # a number below 1 means no limit
        max_tokens=num_predict if num_predict is not None and num_predict > 0 else None,
        max_context=_get_context(options, details),
        num_keep=_truncate(options.num_keep, "num_keep"),
        stop=_build_stop(options),
    )


def _get_knob(options: schema.OllamaOptions, knob: SamplingKnob) -> float | int | None:
    """As in Ollama, 0 disables a penalty whose range excludes 0."""
    name = knob.runner_name or knob.name
    value = getattr(options, name)
    if knob.kind is int:
        value = _truncate(value, name)
    if value is None or (knob.off is not None and value <= knob.off):
        return None if value is None else knob.default
    if value == 0 and knob.low > 0:
        return knob.default
    if knob.name != "seed" and not knob.low <= value <= knob.trusted_high:
        allowed = f"from {knob.low:g} to {knob.trusted_high:g}"
        raise invalid_request(
            f"options.{name}", f'option "{name}" must be {allowed}, not {quote_value(value)}'
        )
    return value


def _truncate(value: schema.Integer, name: str, at: str = "options.") -> int | None:
    """Returns an integer without its fractional part."""
    low, high = INT64 if name == "seed" else schema.EXACT_INTEGERS
    if value is not None and not low <= value <= high:
        raise invalid_request(f"{at}{name}", schema.INTEGER_MESSAGE.format(name=name))
    return None if value is None else int(value)


def _get_context(options: schema.OllamaOptions, details: ModelDetails) -> int | None:
    """Returns `num_ctx`, a limit on the total number of prompt and output tokens. A value above the
    context length is ignored instead of rejected, because clients send it with every request."""
    limit = _truncate(options.num_ctx, "num_ctx")
    if limit is None or limit < 1:
        return None
    if limit > details.context_length:
        log.debug("num_ctx is %d; the context stays %d", limit, details.context_length)
        return None
    return limit


def _build_stop(options: schema.OllamaOptions) -> tuple[str, ...]:
    texts = tuple(text for text in to_tuple(options.stop) if text)
    if len(texts) > MAX_STOP_STRINGS:
        raise invalid_request(
            "options.stop",
            f"options.stop must contain at most {MAX_STOP_STRINGS} strings, not {len(texts)}",
        )
    return texts


def build_reasoning(think: bool | str | None, details: ModelDetails) -> ReasoningOptions:
    """Converts `think`. Unlike in OpenAI's API, a reasoning model reasons unless `think` is false.
    Raises AppError(INVALID)."""
    if details.reasoning == "none":
        if not think:
            return ReasoningOptions()
        raise capability_error(details, "thinking", "think")
    if think is False:
        if details.reasoning == "optional":
            return ReasoningOptions(effort="none")
        return ReasoningOptions(token_budget=0)
    if isinstance(think, str):
        return ReasoningOptions(effort=think)
    return ReasoningOptions(effort="medium" if details.reasoning == "optional" else None)


def capability_error(details: ModelDetails, capability: str, param: str) -> AppError:
    return invalid_request(param, f'"{details.name}" does not support {capability}')


def build_format(value: Raw) -> JsonSchema | None:
    """Converts `format`: "json" or a JSON schema."""
    format_: object = decode_json(value)
    if format_ is None or format_ == "":
        return None
    if format_ == "json":
        return JsonSchema(text=ANY_OBJECT_SCHEMA, param="format")
    if not isinstance(format_, dict):
        shown = quote_value(format_)
        raise invalid_request(
            "format", f'invalid format: {shown}; expected "json" or a valid JSON Schema object'
        )
    return build_json_schema(as_mapping(cast(object, format_), "format"), "format")


def get_top_logprobs(body: schema.OllamaPromptBody) -> int | None:
    """Returns None if no log probabilities are requested."""
    top = _truncate(body.top_logprobs, "top_logprobs", at="") or 0
    if not 0 <= top <= 20:
        raise invalid_request("top_logprobs", "top_logprobs must be between 0 and 20")
    return top if body.logprobs else None


def limit_keep_alive(seconds: float | None, details: ModelDetails, *, admin: bool) -> float | None:
    """Returns the keep-alive that the caller may set, in seconds. Without admin access, a caller
    can only extend the keep-alive, up to the operator's setting."""
    if seconds is None or admin:
        return seconds
    if seconds < details.keep_alive:
        log.info("%s: a shorter keep_alive needs an admin key: ignored", details.name)
        return None
    return details.keep_alive
