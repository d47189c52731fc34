"""Ollama's `options`, `keep_alive`, `think` and `format`.

Knows: their names, types and defaults. Must not know: prompts, responses.

If a request omits an option, the model's recommended value applies. If there is none, Ollama's
default applies.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from app.api.fields import INT64, Fields, as_array, as_number, invalid_request, quote_value
from app.api.openai.structured_outputs import ANY_OBJECT_SCHEMA
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

# Accepted, but without effect: settings of llama.cpp's loader, and samplers that Ollama removed.
IGNORED_OPTIONS = frozenset(
    {
        *("num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "numa"),
        *("low_vram", "f16_kv", "vocab_only", "logits_all", "draft_num_predict", "num_gqa"),
        *("typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline"),
    }
)

MAX_STOP_STRINGS = 64

EXACT_INTEGERS = (-(2**53), 2**53)

THINK_LEVELS = ("low", "medium", "high", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions:
    """The options of a request. sampling: all parameters, with defaults filled in. max_tokens,
    max_context, num_keep: see `GenerateRequest`."""

    sampling: Mapping[str, SamplingValue]
    max_tokens: int | None
    max_context: int | None
    num_keep: int | None
    stop: tuple[str, ...]


def read_options(body: Fields, details: ModelDetails) -> OllamaOptions:
    """Reads `options`. Raises AppError(INVALID) for a value of the wrong type or out of range."""
    fields = body.nested("options") or Fields({}, "options")
    requested = {
        knob.name: value
        for knob in SAMPLING_KNOBS
        if (value := _read_knob(fields, knob)) is not None
    }
    sampling = {**DEFAULT_OPTIONS, **details.defaults, **requested}
    if (seed := sampling.get("seed")) is not None and isinstance(seed, int) and seed < 0:
        sampling["seed"] = None
    num_predict = _read_integer(fields, "num_predict")
    options = OllamaOptions(
        sampling=sampling,
        # a number below 1 means no limit
        max_tokens=num_predict if num_predict is not None and num_predict > 0 else None,
        max_context=_read_context(fields, details),
        num_keep=_read_integer(fields, "num_keep"),
        stop=_read_stop(fields),
    )
    fields.ignore_unknown(*IGNORED_OPTIONS)
    return options


def _read_knob(fields: Fields, knob: SamplingKnob) -> float | int | None:
    """Reads a sampling parameter. As in Ollama, 0 disables a penalty whose range excludes 0."""
    name = knob.runner_name or knob.name
    value = _read_integer(fields, name) if knob.kind is int else _read_float(fields, name)
    if value is None or (knob.off is not None and value <= knob.off):
        return None if value is None else knob.default
    if value == 0 and knob.low > 0:
        return knob.default
    if knob.name == "seed":
        return value
    if not knob.low <= value <= knob.trusted_high:
        allowed = f"from {knob.low:g} to {knob.trusted_high:g}"
        raise _invalid_option(fields, name, f"must be {allowed}, not {quote_value(value)}")
    return value


def _read_float(fields: Fields, name: str) -> float | None:
    value = fields.value(name)
    if value is None:
        return None
    number = as_number(value)
    if number is None:
        raise _invalid_option(fields, name, "must be of type float32")
    return number


def _read_integer(fields: Fields, name: str) -> int | None:
    """Reads an integer. As in Ollama, a fractional part is truncated. Counts are limited to the
    integers that a float64 represents exactly (RFC 8259, section 6); a seed has 64 bits."""
    value = fields.value(name)
    if value is None:
        return None
    number = value if isinstance(value, int) and not isinstance(value, bool) else as_number(value)
    low, high = INT64 if name == "seed" else EXACT_INTEGERS
    if number is None or not low <= number <= high:
        raise _invalid_option(fields, name, "must be of type integer")
    return int(number)


def _invalid_option(fields: Fields, name: str, why: str) -> AppError:
    return invalid_request(fields.path(name), f'option "{name}" {why}')


def _read_context(fields: Fields, details: ModelDetails) -> int | None:
    """Reads `num_ctx`, a limit on the total number of prompt and output tokens. A value above the
    context length is ignored instead of rejected, because clients send it with every request."""
    limit = _read_integer(fields, "num_ctx")
    if limit is None or limit < 1:
        return None
    if limit > details.context_length:
        log.debug("num_ctx is %d; the context stays %d", limit, details.context_length)
        return None
    return limit


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value: object = fields.value("stop")
    if value is None:
        return ()
    array = as_array(value)
    values = [value] if array is None else array
    texts = [text for text in values if text != ""]
    return Fields({"stop": texts}, "options").strings("stop", MAX_STOP_STRINGS)


def read_think(fields: Fields, details: ModelDetails) -> ReasoningOptions:
    """Reads `think`. Unlike in OpenAI's API, a reasoning model reasons unless `think` is false.
    Raises AppError(INVALID)."""
    value = fields.value("think")
    if value is None or value is True or value in THINK_LEVELS:
        if details.reasoning == "none":
            if value is None:
                return ReasoningOptions()
            raise capability_error(details, "thinking", "think")
        if value in THINK_LEVELS:
            return ReasoningOptions(effort=value)
        return ReasoningOptions(effort="medium" if details.reasoning == "optional" else None)
    if value is False:
        match details.reasoning:
            case "none":
                return ReasoningOptions()
            case "optional":
                return ReasoningOptions(effort="none")
            case "always":
                return ReasoningOptions(token_budget=0)
    raise invalid_request(
        "think",
        f'think must be true, false, "low", "medium", "high" or "max", not {quote_value(value)}',
    )


def capability_error(details: ModelDetails, capability: str, param: str) -> AppError:
    return invalid_request(param, f'"{details.name}" does not support {capability}')


def read_format(fields: Fields) -> JsonSchema | None:
    """Reads `format`: "json" or a JSON schema."""
    value = fields.value("format")
    if value is None or value == "":
        return None
    if value == "json":
        return JsonSchema(text=ANY_OBJECT_SCHEMA, param="format")
    if not isinstance(value, dict):
        shown = quote_value(value)
        raise invalid_request(
            "format", f'invalid format: {shown}; expected "json" or a valid JSON Schema object'
        )
    return JsonSchema(text=orjson.dumps(fields.mapping("format")).decode(), param="format")


def read_top_logprobs(fields: Fields) -> int | None:
    """Reads `logprobs` and `top_logprobs`. Returns None if no log probabilities are requested."""
    enabled = fields.boolean("logprobs")
    top = _read_integer(fields, "top_logprobs") or 0
    if not 0 <= top <= 20:
        raise invalid_request("top_logprobs", "top_logprobs must be between 0 and 20")
    return top if enabled else None


def limit_keep_alive(seconds: float | None, details: ModelDetails, *, admin: bool) -> float | None:
    """Returns the keep-alive that the caller may set, in seconds. Without admin access, a caller
    can only extend the keep-alive, up to the operator's setting."""
    if seconds is None or admin:
        return seconds
    if seconds < details.keep_alive:
        log.info("%s: a shorter keep_alive needs an admin key: ignored", details.name)
        return None
    return details.keep_alive
