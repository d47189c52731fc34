"""llama.cpp's native requests: converts JSON to a generate request.

Knows: the fields of POST /completion and /infill, their names and neutral values. Must not know:
response formats, tokenizers. Texts in a prompt and in `logit_bias` are converted to tokens later
(app/api/llamacpp/endpoints.py).

Fields with the same meaning in OpenAI's dialect are read by app/api/openai. Wire format:
tools/server/README.md of llama.cpp, and its server-schema.cpp of 2026-08.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from app.api.fields import (
    INT64,
    Fields,
    as_array,
    as_integer,
    as_number,
    invalid_request,
    quote_value,
)
from app.api.openai.request import read_keep_alive
from app.api.openai.sampling import build_sampling, build_stop_conditions
from app.api.openai.structured_outputs import build_grammar
from app.api.schema.decode import BodyDecoder
from app.api.schema.fields import decode_fields
from app.api.schema.generation import MAX_CHOICES, SAMPLING_FIELDS
from app.api.schema.openai import CommonFields
from app.core.ports import ModelCard
from app.core.request_context import add_notice
from app.core.requests import GenerateRequest
from app.core.sampling_params import INT32_MAX, SamplingParams, SamplingValue
from app.http.responses import JsonObject

_TOKEN_ID = re.compile("[0-9]{1,9}")
_SAMPLER_NAME = re.compile("[a-z_]{1,40}")

_SHARED = BodyDecoder(CommonFields)

# The fields of stop conditions and grammars that are the same in OpenAI's requests.
_SHARED_FIELDS = (
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "allowed_token_ids",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "grammar",
)

# The text and token IDs of one prompt, in order.
PromptParts = tuple[str | int, ...]

MAX_RESPONSE_FIELDS = 64

# Fields of samplers that this server does not have, with the values that turn them off, which are
# also their values in `generation_settings`.
MISSING_SAMPLERS: Mapping[str, float | bool] = {
    "dynatemp_range": 0.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "min_keep": 0,
    "post_sampling_probs": False,
}

# Parameters of these samplers, which have no effect while the sampler is off.
SAMPLER_PARAMETERS: Mapping[str, float] = {
    "dynatemp_exponent": 1.0,
    "xtc_threshold": 0.1,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_decay": 0.9,
}

# Integers that only concern slots, batches and time, which clients send with every request.
IGNORED_INTEGERS = (
    "id_slot",
    "n_discard",
    "n_cache_reuse",
    "n_indent",
    "t_max_prompt_ms",
    "t_max_predict_ms",
)

# The samplers that a list in `samplers` can turn off, and the parameters that they read.
SAMPLERS: Mapping[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "temperature": ("temperature",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    """A valid request.

    request: its prompt is empty until the parts are tokenized, except for an infill. prompts: the
    parts of each prompt. is_list: whether the client sent a list of prompts, and gets a list of
    responses. text_biases: texts whose tokens get a bias. settings: the effective settings, for
    `generation_settings`. return_tokens, response_fields: what the response contains.
    timings_per_token, return_progress: what the chunks of a stream contain.
    """

    request: GenerateRequest
    prompts: tuple[PromptParts, ...]
    is_list: bool
    text_biases: tuple[tuple[str, float], ...]
    settings: JsonObject
    stream: bool
    return_tokens: bool
    response_fields: tuple[str, ...]
    timings_per_token: bool
    return_progress: bool


def parse_completion(body: object, card: ModelCard) -> NativeRequest:
    """Parses the body of POST /completion. Raises AppError(INVALID) for an invalid request."""
    fields = Fields.from_value(body)
    prompts, is_list = _read_prompts(fields)
    parsed = _parse(fields, card, prompts, GenerateRequest(model=card.id, prompt=""))
    fields.check_unknown()
    return replace(parsed, is_list=is_list)


def parse_infill(body: object, card: ModelCard) -> NativeRequest:
    """Parses the body of POST /infill: `prompt` follows `input_prefix`, and the model fills in the
    text before `input_suffix`. Raises AppError(INVALID)."""
    fields = Fields.from_value(body)
    head = "".join(
        (
            *_read_extra_files(fields),
            fields.string("input_prefix") or "",
            fields.string("prompt") or "",
        )
    )
    suffix = fields.string("input_suffix") or ""
    if not head and not suffix:
        raise invalid_request("input_prefix", "input_prefix and input_suffix are both empty")
    request = GenerateRequest(model=card.id, prompt=head, suffix=suffix or None)
    parsed = _parse(fields, card, ((head,),), request)
    fields.check_unknown()
    return parsed


def build_settings(card: ModelCard, request: GenerateRequest | None = None) -> JsonObject:
    """Returns the effective settings of a request, or of one without options."""
    request = request or GenerateRequest(model=card.id, prompt="")
    sampling = SamplingParams.merge(card.defaults.sampling, request.sampling)
    limit = card.defaults.max_tokens if request.max_tokens is None else request.max_tokens
    num_predict = -1 if limit is None else limit
    return {
        "n_predict": num_predict,
        "max_tokens": num_predict,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **MISSING_SAMPLERS,
        **SAMPLER_PARAMETERS,
        "stop": [*(request.stop or card.defaults.stop_strings)],
        "n_keep": request.num_keep or 0,
        "ignore_eos": request.ignore_eos,
        "n_probs": request.top_logprobs or 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias],
    }


def _parse(
    fields: Fields, card: ModelCard, prompts: tuple[PromptParts, ...], request: GenerateRequest
) -> NativeRequest:
    """Reads all fields that both endpoints share."""
    fields.string("model")
    stream = fields.boolean("stream") or False
    max_tokens = _read_max_tokens(fields)
    id_biases, text_biases = _read_logit_bias(fields)
    sampling = _apply_samplers(fields, _read_sampling(fields))
    shared = decode_fields(fields, _SHARED, _SHARED_FIELDS)
    grammar = build_grammar(shared)
    conditions = build_stop_conditions(
        shared, max_tokens=max_tokens, constrained=grammar is not None
    )
    num_probs = fields.integer("n_probs", -1, INT32_MAX)
    num_probs = card.logprobs_limit.resolve("n_probs", num_probs) or 0
    request = replace(
        conditions.apply(request),
        sampling=sampling if id_biases is None else {**sampling, "logit_bias": id_biases},
        max_tokens=max_tokens,
        top_logprobs=num_probs or None,
        grammar=grammar,
        cache_prompt=fields.boolean("cache_prompt") is not False,
        num_keep=fields.integer("n_keep", -1, INT32_MAX),
        return_token_ids=True,
        keep_alive=read_keep_alive(fields),
    )
    parsed = NativeRequest(
        request=request,
        prompts=prompts,
        is_list=False,
        text_biases=text_biases,
        settings={**build_settings(card, request), "stream": stream},
        stream=stream,
        return_tokens=fields.boolean("return_tokens") or False,
        response_fields=fields.strings("response_fields", MAX_RESPONSE_FIELDS),
        timings_per_token=fields.boolean("timings_per_token") or False,
        return_progress=fields.boolean("return_progress") or False,
    )
    _check_remaining(fields)
    return parsed


def _read_max_tokens(fields: Fields) -> int | None:
    """Returns the maximum number of tokens. A negative number means the rest of the context."""
    limit = fields.integer("n_predict", -2, INT32_MAX)
    alias = fields.integer("max_tokens", -1, INT32_MAX)
    limit = alias if limit is None else limit
    return None if limit is None or limit < 0 else limit


def _read_sampling(fields: Fields) -> dict[str, SamplingValue]:
    """Reads the sampling parameters. `logit_bias` has more forms here, and a negative seed means a
    random one."""
    seedless = fields.without("logit_bias")
    if (as_integer(fields.value("seed")) or 0) < 0:
        seedless = seedless.without("seed")
    return build_sampling(decode_fields(seedless, _SHARED, SAMPLING_FIELDS))


def _apply_samplers(fields: Fields, sampling: dict[str, SamplingValue]) -> dict[str, SamplingValue]:
    """Applies `samplers`: a sampler that is not in the list is off. Their order here is fixed."""
    names = fields.array("samplers")
    if names is None:
        return sampling
    known = {name for name in names if isinstance(name, str)}
    if len(known) != len(names):
        raise invalid_request("samplers", "samplers must contain distinct names")
    neutral = SamplingParams()
    off: dict[str, SamplingValue] = {
        parameter: getattr(neutral, parameter)
        for name, parameters in SAMPLERS.items()
        if name not in known
        for parameter in parameters
    }
    missing = sorted(name for name in known - SAMPLERS.keys() if _SAMPLER_NAME.fullmatch(name))
    add_notice(
        "samplers: the order is fixed"
        + (f", not supported: {' '.join(missing)[:200]}" if missing else "")
    )
    return {**sampling, **off}


def _check_remaining(fields: Fields) -> None:
    fields.reject("post_sampling_probs", False)
    fields.reject("typ_p", 1)
    for name, neutral in MISSING_SAMPLERS.items():
        fields.reject(name, neutral, *((0,) if name == "top_n_sigma" else ()))
    for name in SAMPLER_PARAMETERS:
        fields.number(name, -1e6, 1e6)
    fields.strings("dry_sequence_breakers", 256)
    for name in IGNORED_INTEGERS:
        fields.integer(name, *INT64)
    fields.reject("n_cmpl", 1)
    fields.reject("lora", [])
    fields.reject("echo", False)
    fields.boolean("backend_sampling")


def _read_logit_bias(
    fields: Fields,
) -> tuple[tuple[tuple[int, float], ...] | None, tuple[tuple[str, float], ...]]:
    """Reads `logit_bias`: an object, or an array of pairs. A key is a token ID or a text, whose
    tokens all get the bias. `false` forbids a token."""
    value = fields.value("logit_bias")
    if value is None:
        return None, ()
    mapping = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    pairs: Sequence[Any] = (
        fields.array("logit_bias") or [] if mapping is None else [*map(list, mapping.items())]
    )
    ids: list[tuple[int, float]] = []
    texts: list[tuple[str, float]] = []
    for place, pair in enumerate(pairs):
        items = as_array(pair) or []
        bias = -100.0 if items[1:] == [False] else as_number(items[1]) if len(items) == 2 else None
        if bias is None or abs(bias) > 100:
            raise invalid_request(
                f"logit_bias.{place}",
                "logit_bias maps token IDs or texts to a number from -100 to 100, or to false",
            )
        key = items[0]
        token = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else as_integer(key)
        if token is not None and 0 <= token <= INT32_MAX:
            ids.append((token, bias))
        elif isinstance(key, str) and key:
            texts.append((key, bias))
        else:
            raise invalid_request(
                f"logit_bias.{place}", f"logit_bias has no token {quote_value(key)}"
            )
    return tuple(ids), tuple(texts)


def _read_prompts(fields: Fields) -> tuple[tuple[PromptParts, ...], bool]:
    """Reads `prompt`: a text, an array of token IDs and texts, an object with `prompt_string`, or
    an array of these. Returns whether it is the latter."""
    value: object = fields.required("prompt")
    items = as_array(value)
    if items is None:
        return (_read_parts(value, "prompt"),), False
    if items and all(_is_part(item) for item in items) and any(map(_is_token, items)):
        return (_read_parts(value, "prompt"),), False
    if not items or len(items) > MAX_CHOICES:
        raise invalid_request("prompt", f"prompt must contain 1 to {MAX_CHOICES} prompts")
    prompts = tuple(_read_parts(item, f"prompt.{place}") for place, item in enumerate(items))
    return prompts, True


def _read_parts(value: object, path: str) -> PromptParts:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, dict):
        fields = Fields.from_value(cast(object, value), path)
        text = fields.required_string("prompt_string")
        fields.reject("multimodal_data", [], instead="this server's models read text")
        fields.check_unknown()
        return (text,)
    items = as_array(value) or []
    parts = tuple(item for item in items if isinstance(item, str | int) and _is_part(item))
    if not items or len(parts) < len(items):
        expected = "a string or an array of token IDs and strings"
        raise invalid_request(path, f"{path} must be {expected}, not {quote_value(value)}")
    return parts


def _is_part(item: object) -> bool:
    return isinstance(item, str) or _is_token(item)


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= INT32_MAX


def _read_extra_files(fields: Fields) -> list[str]:
    """Reads `input_extra`, the text of other files, which comes before the prefix."""
    texts: list[str] = []
    for place, item in enumerate(fields.array("input_extra") or []):
        extra = Fields.from_value(item, f"input_extra.{place}")
        name, text = extra.string("filename"), extra.required_string("text")
        extra.integer("time", *INT64)
        extra.ignore_unknown()
        texts.append(f"--- {name or 'snippet'} ---\n{text}\n")
    return texts
