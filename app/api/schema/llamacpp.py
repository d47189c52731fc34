"""The request bodies of llama.cpp's own API: POST /completion and /infill.

Knows: their fields, those of samplers that this server does not have, the values that turn these
off. Must not know: how the values are used.

Format: tools/server/README.md of llama.cpp, and its server-schema.cpp of 2026-08.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta, Raw

from app.api.schema.base import (
    NULL,
    Item,
    Text,
    describe,
    ignore_fields,
    refer,
    reject_fields,
)
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import NumKeep, ReturnProgress
from app.api.schema.openai import ConstrainedFields
from app.core.sampling_params import INT32_MAX

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


class NativeFields(ConstrainedFields, kw_only=True, frozen=True):
    """The fields that both endpoints share."""

    unsupported: ClassVar = {
        **reject_fields(**{name: (neutral,) for name, neutral in MISSING_SAMPLERS.items()}),
        **reject_fields(top_n_sigma=(-1.0, 0), typ_p=(1,), n_cmpl=(1,), lora=([],), echo=(False,)),
    }
    # parameters of samplers that are off; slots, batches and time, which clients send with every
    # request
    ignored = ignore_fields(
        "id_slot n_discard n_cache_reuse n_indent t_max_prompt_ms t_max_predict_ms "
        "backend_sampling dry_sequence_breakers " + " ".join(SAMPLER_PARAMETERS)
    )

    n_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None,
        describe(
            "The maximum number of output tokens. A negative number means the rest of the context."
        ),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None,
        describe("Another name for `n_predict`, which takes precedence."),
    ] = None
    samplers: Annotated[
        list[str] | None,
        describe(
            "Samplers that are not in this list are off: `penalties`, `top_k`, `top_p`, `min_p` "
            "and `temperature`. Their order is fixed. Others have no effect, and a notice names "
            "them.",
            message="samplers must contain distinct names",
            exact={"type": ["array", "null"], "items": {"type": "string"}, "uniqueItems": True},
        ),
    ] = None
    logit_bias: Annotated[
        Raw,
        describe(
            "Maps tokens to a number that is added to their logits, or to `false`, which forbids "
            "them. A token is an ID or a string, whose tokens all get the bias.",
            exact=refer("NativeLogitBias")[0],
        ),
    ] = NULL
    n_probs: Annotated[
        Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None,
        describe(
            "Return the probabilities of this many most likely tokens for each position.",
            schema={"minimum": 0, "maximum": 20},
        ),
    ] = None
    n_keep: NumKeep = None
    return_tokens: Annotated[bool | None, describe("Return the IDs of the output tokens.")] = None
    response_fields: Annotated[
        Text | Annotated[list[Text], Meta(max_length=MAX_RESPONSE_FIELDS)] | None,
        describe(
            "The fields of the response, such as `content` or `timings/prompt_n`.",
            expected="a string or an array of strings, none of them empty",
        ),
    ] = None
    return_progress: ReturnProgress = None
    timings_per_token: Annotated[bool | None, describe("Add `timings` to each chunk.")] = None


class NativeBody(NativeFields, kw_only=True, frozen=True):
    """The body of POST /completion."""

    prompt: Annotated[
        Raw,
        describe(
            "A string, an array of token IDs and strings, an object with `prompt_string`, or up to "
            "128 of these. A list of prompts returns a list of completions.",
            exact=refer("NativePrompts")[0],
        ),
    ]


class ExtraFile(Item, kw_only=True, frozen=True):
    """Another file, which comes before the prefix."""

    ignored = ignore_fields("time")

    text: str
    filename: str | None = None


class InfillBody(NativeFields, kw_only=True, frozen=True):
    """The body of POST /infill: the model fills in the text before `input_suffix`."""

    prompt: Annotated[str | None, describe("The text after `input_prefix`.")] = None
    input_prefix: Annotated[
        str | None, describe("The text before the output.", schema={"minLength": 1})
    ] = None
    input_suffix: Annotated[str | None, describe("The text after the output.")] = None
    input_extra: Annotated[list[ExtraFile] | None, describe("The texts of other files.")] = None


NATIVE = BodyDecoder(NativeBody)
INFILL = BodyDecoder(InfillBody)
