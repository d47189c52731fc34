"""What OpenAI's requests say beside the matter: for which model, who asks, and for what records.

Knows the fields that change no answer, and what OpenAI allows in them. Must not know: what is
asked for.
"""

import math
from collections.abc import Collection

from app.api.fields import Fields, invalid, shown
from app.core import durations
from app.core.errors import AppError, Kind

IDENTIFIERS = ("user", "safety_identifier", "prompt_cache_key")

# The only tier there is, in OpenAI's word.
TIER = "default"


def read_model(fields: Fields, models: Collection[str]) -> str:
    """Raises AppError(MODEL_NOT_FOUND) for one that is not among `models`."""
    model = fields.required_string("model")
    if model not in models:
        raise unknown_model(model)
    return model


def unknown_model(model: str) -> AppError:
    return AppError(
        Kind.MODEL_NOT_FOUND,
        f"the model {model[:200]!r} does not exist: GET /v1/models lists the available models",
        param="model",
    )


def read_keep_alive(fields: Fields) -> float | None:
    """Seconds that the model stays loaded after this request, math.inf for ever: Ollama's field. A
    number of seconds, or a text such as "90s", "5m" or "1h30m"; a negative one is for ever."""
    value = fields.value("keep_alive")
    if isinstance(value, str):
        seconds = durations.seconds(value)
    else:
        seconds = fields.number("keep_alive", -(2.0**63), 2.0**63)
        if value is None:
            return None
    if seconds is None:
        wanted = 'a number of seconds or a duration such as "5m"'
        raise invalid("keep_alive", f"keep_alive must be {wanted}, not {shown(value)}")
    return math.inf if seconds < 0 else seconds


def read_tier(fields: Fields) -> str | None:
    """The tier to tell in the answer: OpenAI does so where the request names one."""
    fields.refuse("service_tier", "auto", TIER)
    return None if fields.value("service_tier") is None else TIER


def check_caller(fields: Fields) -> None:
    """Names by which a caller is recognised. We serve whoever asks, and find cached prefixes by
    their tokens."""
    for identifier in IDENTIFIERS:
        fields.string(identifier)


def check_metadata(fields: Fields) -> None:
    """Notes to oneself, for lists of stored answers. No answer depends on them, at OpenAI neither;
    so they are only held to OpenAI's limits."""
    metadata = fields.nested("metadata")
    if metadata is None:
        return
    pairs = list(metadata.items())
    if len(pairs) > 16:
        raise invalid("metadata", f"metadata must hold at most 16 pairs, not {len(pairs)}")
    for key, value in pairs:
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise invalid(
                metadata.path(key[:64]),
                "metadata maps keys of up to 64 characters to strings of up to 512 characters",
            )
