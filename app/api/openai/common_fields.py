"""Fields that every OpenAI request has in addition to its input: model, identifiers, metadata.

Knows: the fields that do not change the output, OpenAI's limits for them. Must not know: the
content of the request.
"""

import math

from app.api.fields import Fields, invalid_request, quote_value
from app.core import units

IDENTIFIER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

# The only tier of this server, under OpenAI's name.
SERVICE_TIER = "default"


def check_model(fields: Fields) -> None:
    """Checks that the field is present. The model itself was resolved before the body was read."""
    fields.required_string("model")


def read_keep_alive(fields: Fields) -> float | None:
    """Returns the number of seconds that the model stays loaded after this request; math.inf means
    forever. This field is Ollama's. It is a number of seconds, or a text such as "90s", "5m" or
    "1h30m". A negative value means forever. `ttl` is the name of this field in LM Studio."""
    seconds, ttl = _read_seconds(fields, "keep_alive"), _read_seconds(fields, "ttl")
    if seconds is not None and ttl is not None and seconds != ttl:
        raise invalid_request("ttl", "keep_alive and ttl are aliases: keep one of them")
    return ttl if seconds is None else seconds


def _read_seconds(fields: Fields, name: str) -> float | None:
    value = fields.value(name)
    if isinstance(value, str):
        seconds = units.parse_duration(value)
    else:
        seconds = fields.number(name, -(2.0**63), 2.0**63)
        if value is None:
            return None
    if seconds is None:
        expected = 'a number of seconds or a duration such as "5m"'
        raise invalid_request(name, f"{name} must be {expected}, not {quote_value(value)}")
    return math.inf if seconds < 0 else seconds


def read_service_tier(fields: Fields) -> str | None:
    """Returns the tier to include in the response. As with OpenAI, it is included only if the
    request names one."""
    fields.reject("service_tier", "auto", SERVICE_TIER)
    return None if fields.value("service_tier") is None else SERVICE_TIER


def check_identifiers(fields: Fields) -> None:
    """Checks the fields that identify a caller. They are not used, because cached prefixes are
    found by their tokens."""
    for identifier in IDENTIFIER_FIELDS:
        fields.string(identifier)


def check_metadata(fields: Fields) -> None:
    """Checks `metadata` against OpenAI's limits. It annotates stored responses. As with OpenAI, it
    does not change the output."""
    metadata = fields.nested("metadata")
    if metadata is None:
        return
    pairs = list(metadata.items())
    if len(pairs) > 16:
        raise invalid_request(
            "metadata", f"metadata must contain at most 16 pairs, not {len(pairs)}"
        )
    for key, value in pairs:
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise invalid_request(
                metadata.path(key[:64]),
                "metadata maps keys of up to 64 characters to strings of up to 512 characters",
            )
