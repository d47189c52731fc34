"""Fields that every OpenAI request has besides its input: model, identifiers, metadata.

Knows: the fields that do not change the output, OpenAI's limits for them. Must not know: what is
requested.
"""

import math

from app.api.fields import Fields, invalid_request, quote_value
from app.core import units

IDENTIFIER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

# The only tier that exists here, under OpenAI's name.
SERVICE_TIER = "default"


def check_model(fields: Fields) -> None:
    """Checks that the field is present. The model itself was resolved before the body was read."""
    fields.required_string("model")


def read_keep_alive(fields: Fields) -> float | None:
    """Returns the seconds that the model stays loaded after this request, math.inf for
    indefinitely. Ollama's field: a number of seconds, or a text such as "90s", "5m" or "1h30m"; a
    negative value means indefinitely."""
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
    """Returns the tier to include in the response: OpenAI includes it if the request names one."""
    fields.reject("service_tier", "auto", SERVICE_TIER)
    return None if fields.value("service_tier") is None else SERVICE_TIER


def check_identifiers(fields: Fields) -> None:
    """Checks the fields that identify a caller. They are not used: cached prefixes are found by
    their tokens."""
    for identifier in IDENTIFIER_FIELDS:
        fields.string(identifier)


def check_metadata(fields: Fields) -> None:
    """Checks `metadata` against OpenAI's limits. It annotates stored responses and, as at OpenAI,
    does not change the output."""
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
