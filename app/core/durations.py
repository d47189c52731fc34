"""Durations as people write them.

Knows: units of time. Must not know: what is timed.
"""

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
