"""What OpenAI's requests say beside the matter: for which model, who asks, and for what records.

Knows the fields that change no answer, and what OpenAI allows in them. Must not know: what is
asked for.
"""

import math
from collections.abc import Collection

from app.api.fields import Fields, invalid_request, quote_value
from app.core import units
from app.core.errors import AppError, ErrorKind

IDENTIFIER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

# The only tier there is, in OpenAI's word.
SERVICE_TIER = "default"


def read_model(fields: Fields, models: Collection[str]) -> str:
    """Raises AppError(MODEL_NOT_FOUND) for one that is not among `models`."""
    model = fields.required_string("model")
    if model not in models:
        raise model_not_found(model)
    return model


def model_not_found(model: str) -> AppError:
    return AppError(
        ErrorKind.MODEL_NOT_FOUND,
        f"the model {model[:200]!r} does not exist: GET /v1/models lists the available models",
        param="model",
    )


def read_keep_alive(fields: Fields) -> float | None:
    """Seconds that the model stays loaded after this request, math.inf for ever: Ollama's field. A
    number of seconds, or a text such as "90s", "5m" or "1h30m"; a negative one is for ever."""
    value = fields.value("keep_alive")
    if isinstance(value, str):
        seconds = units.parse_duration(value)
    else:
        seconds = fields.number("keep_alive", -(2.0**63), 2.0**63)
        if value is None:
            return None
    if seconds is None:
        wanted = 'a number of seconds or a duration such as "5m"'
        raise invalid_request(
            "keep_alive", f"keep_alive must be {wanted}, not {quote_value(value)}"
        )
    return math.inf if seconds < 0 else seconds


def read_service_tier(fields: Fields) -> str | None:
    """The tier to tell in the answer: OpenAI does so where the request names one."""
    fields.reject("service_tier", "auto", SERVICE_TIER)
    return None if fields.value("service_tier") is None else SERVICE_TIER


def check_identifiers(fields: Fields) -> None:
    """Names by which a caller is recognised. We serve whoever asks, and find cached prefixes by
    their tokens."""
    for identifier in IDENTIFIER_FIELDS:
        fields.string(identifier)


def check_metadata(fields: Fields) -> None:
    """Notes to oneself, for lists of stored answers. No answer depends on them, at OpenAI neither;
    so they are only held to OpenAI's limits."""
    metadata = fields.nested("metadata")
    if metadata is None:
        return
    pairs = list(metadata.items())
    if len(pairs) > 16:
        raise invalid_request("metadata", f"metadata must hold at most 16 pairs, not {len(pairs)}")
    for key, value in pairs:
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise invalid_request(
                metadata.path(key[:64]),
                "metadata maps keys of up to 64 characters to strings of up to 512 characters",
            )
