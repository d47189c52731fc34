"""llama.cpp's native requests: converts their structs to a generate request.

Knows: the fields of POST /completion and /infill. Must not know:
response formats, tokenizers. Strings in a prompt and in `logit_bias` are converted to tokens later
(app/api/llamacpp/endpoints.py).

The modules in app/api/openai convert the fields that have the same meaning in OpenAI's dialect.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from msgspec import structs

from app.api.embeddings import get_text_of_object
from app.api.fields import as_array, as_integer, as_number, invalid_request, quote_value
from app.api.openai.request import get_keep_alive
from app.api.openai.sampling import build_sampling, build_stop_conditions, to_tuple
from app.api.openai.structured_outputs import build_grammar
from app.api.schema.base import NULL
from app.api.schema.decode import decode_json, require
from app.api.schema.generation import MAX_CHOICES
from app.api.schema.llamacpp import (
    INFILL,
    MISSING_SAMPLERS,
    NATIVE,
    SAMPLER_PARAMETERS,
    InfillBody,
    NativeFields,
)
from app.core.ports import ModelCard
from app.core.request_context import add_notice
from app.core.requests import GenerateRequest
from app.core.sampling_params import INT32_MAX, SamplingParams, SamplingValue
from app.http.responses import JsonObject

_TOKEN_ID = re.compile("[0-9]{1,9}")
_SAMPLER_NAME = re.compile("[a-z_]{1,40}")

# The text and token IDs of one prompt, in order.
PromptParts = tuple[str | int, ...]

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
    `generation_settings`. return_tokens, response_fields: the contents of the response.
    timings_per_token, return_progress: the contents of the chunks of a stream.
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


def parse_completion(data: bytes | bytearray, card: ModelCard) -> NativeRequest:
    """Parses the body of POST /completion. Raises AppError(INVALID) for an invalid request."""
    body = NATIVE.decode(data)
    prompts, is_list = _build_prompts(require(decode_json(body.prompt), "prompt"))
    parsed = _build(body, card, prompts, GenerateRequest(model=card.id, prompt=""))
    return replace(parsed, is_list=is_list)


def parse_infill(data: bytes | bytearray, card: ModelCard) -> NativeRequest:
    """Parses the body of POST /infill: `prompt` follows `input_prefix`, and the model fills in the
    text before `input_suffix`. Raises AppError(INVALID)."""
    body = INFILL.decode(data)
    head = "".join((*_list_extra_files(body), body.input_prefix or "", body.prompt or ""))
    suffix = body.input_suffix or ""
    if not head and not suffix:
        raise invalid_request("input_prefix", "input_prefix and input_suffix are both empty")
    request = GenerateRequest(model=card.id, prompt=head, suffix=suffix or None)
    return _build(body, card, ((head,),), request)


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


def _build(
    body: NativeFields,
    card: ModelCard,
    prompts: tuple[PromptParts, ...],
    request: GenerateRequest,
) -> NativeRequest:
    """Converts all fields that both endpoints share."""
    max_tokens = _get_max_tokens(body)
    id_biases, text_biases = _build_logit_bias(decode_json(body.logit_bias))
    # a negative seed means a random one
    seed = None if (body.seed or 0) < 0 else body.seed
    sampling = build_sampling(structs.replace(body, logit_bias=NULL, seed=seed))
    sampling = _apply_samplers(body.samplers, sampling)
    grammar = build_grammar(body)
    conditions = build_stop_conditions(body, max_tokens=max_tokens, constrained=grammar is not None)
    request = replace(
        request,
        **conditions,
        sampling=sampling if id_biases is None else {**sampling, "logit_bias": id_biases},
        max_tokens=max_tokens,
        top_logprobs=card.logprobs_limit.resolve("n_probs", body.n_probs) or None,
        grammar=grammar,
        cache_prompt=body.cache_prompt is not False,
        num_keep=body.n_keep,
        return_token_ids=True,
        keep_alive=get_keep_alive(body.keep_alive, body.ttl),
    )
    stream = body.stream or False
    return NativeRequest(
        request=request,
        prompts=prompts,
        is_list=False,
        text_biases=text_biases,
        settings={**build_settings(card, request), "stream": stream},
        stream=stream,
        return_tokens=body.return_tokens or False,
        response_fields=to_tuple(body.response_fields),
        timings_per_token=body.timings_per_token or False,
        return_progress=body.return_progress or False,
    )


def _get_max_tokens(body: NativeFields) -> int | None:
    """Returns the maximum number of tokens. A negative number means the rest of the context."""
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    return None if limit is None or limit < 0 else limit


def _apply_samplers(
    names: Sequence[str] | None, sampling: dict[str, SamplingValue]
) -> dict[str, SamplingValue]:
    """Applies `samplers`: a sampler that is not in the list is off. Their order here is fixed."""
    if names is None:
        return sampling
    known = set(names)
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


def _build_logit_bias(
    value: object,
) -> tuple[tuple[tuple[int, float], ...] | None, tuple[tuple[str, float], ...]]:
    """Converts `logit_bias`: an object, or an array of pairs. A key is a token ID or a string,
    whose tokens all get the bias. `false` forbids a token."""
    if value is None:
        return None, ()
    mapping = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    pairs: Sequence[Any] | None = (
        as_array(cast(object, value)) if mapping is None else [*map(list, mapping.items())]
    )
    if pairs is None:
        shown = quote_value(cast(object, value))
        raise invalid_request("logit_bias", f"logit_bias must be an array, not {shown}")
    ids: list[tuple[int, float]] = []
    texts: list[tuple[str, float]] = []
    for place, pair in enumerate(pairs):
        items = as_array(pair) or []
        bias = -100.0 if items[1:] == [False] else as_number(items[1]) if len(items) == 2 else None
        if bias is None or abs(bias) > 100:
            raise invalid_request(
                f"logit_bias.{place}",
                "logit_bias maps token IDs or strings to a number from -100 to 100, or to false",
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


def _build_prompts(value: object) -> tuple[tuple[PromptParts, ...], bool]:
    """Converts `prompt`: a string, an array of token IDs and strings, an object with
    `prompt_string`, or an array of these. Returns whether it is the latter."""
    items = as_array(value)
    if items is None:
        return (_build_parts(value, "prompt"),), False
    if items and all(_is_part(item) for item in items) and any(map(_is_token, items)):
        return (_build_parts(value, "prompt"),), False
    if not items or len(items) > MAX_CHOICES:
        raise invalid_request("prompt", f"prompt must contain 1 to {MAX_CHOICES} prompts")
    prompts = tuple(_build_parts(item, f"prompt.{place}") for place, item in enumerate(items))
    return prompts, True


def _build_parts(value: object, path: str) -> PromptParts:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if fields.get("multimodal_data"):
            at = f"{path}.multimodal_data"
            raise invalid_request(at, f"{at} is not supported: this server's models read text")
        text = require(fields.get("prompt_string"), f"{path}.prompt_string")
        return (get_text_of_object({"prompt_string": text}, path),)
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


def _list_extra_files(body: InfillBody) -> list[str]:
    """Returns the texts of other files, which come before the prefix."""
    return [
        f"--- {extra.filename or 'snippet'} ---\n{extra.text}\n" for extra in body.input_extra or ()
    ]
