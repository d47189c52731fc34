"""Durations as people write them.

Knows: units of time. Must not know: what is timed.
"""

import re

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_NUMBER_PATTERN = re.compile(r"-?\d{1,15}(?:\.\d{1,9})?", re.ASCII)
_PART_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(ms|s|m|h)", re.ASCII)
_DURATION_PATTERN = re.compile(rf"-?(?:{_PART_PATTERN.pattern}){{1,4}}", re.ASCII)


def parse_duration(text: str) -> float | None:
    """A bare number of seconds, or Go's way down to milliseconds (time.ParseDuration), which is
    Ollama's too: "90s", "5m", "1h30m". None for what is neither."""
    if _NUMBER_PATTERN.fullmatch(text):
        return float(text)
    if not _DURATION_PATTERN.fullmatch(text):
        return None
    total = sum(
        float(number) * _SECONDS_PER_UNIT[unit] for number, unit in _PART_PATTERN.findall(text)
    )
    return -total if text.startswith("-") else total
