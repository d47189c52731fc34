"""Durations as people write them.

Knows: units of time. Must not know: what is timed.
"""

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_BARE = re.compile(r"-?\d{1,15}(?:\.\d{1,9})?", re.ASCII)
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(ms|s|m|h)", re.ASCII)
_PARTS = re.compile(rf"-?(?:{_PART.pattern}){{1,4}}", re.ASCII)


def seconds(text: str) -> float | None:
    """A bare number of seconds, or Go's way down to milliseconds (time.ParseDuration), which is
    Ollama's too: "90s", "5m", "1h30m". None for what is neither."""
    if _BARE.fullmatch(text):
        return float(text)
    if not _PARTS.fullmatch(text):
        return None
    total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return -total if text.startswith("-") else total


def written(duration: float) -> str:
    """What `seconds` reads as `duration`; "forever" for math.inf. The largest unit that it is a
    whole number of."""
    if math.isinf(duration):
        return "forever"
    for unit in ("h", "m", "s"):
        count = duration / _UNITS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{duration:.9f}".rstrip("0").rstrip(".")
