"""Formats sizes, counts and durations for display, and parses durations.

Knows: units. Must not know: the meaning of the values.
"""

import re

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_NUMBER_PATTERN = re.compile(r"-?\d{1,15}(?:\.\d{1,9})?", re.ASCII)
_PART_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(ms|s|m|h)", re.ASCII)
_DURATION_PATTERN = re.compile(rf"-?(?:{_PART_PATTERN.pattern}){{1,4}}", re.ASCII)


def parse_duration(text: str) -> float | None:
    """Parses a number of seconds, or a duration in Go's format (time.ParseDuration), as used by
    Ollama: "90s", "5m", "1h30m". The smallest unit is "ms". Returns None for invalid text."""
    if _NUMBER_PATTERN.fullmatch(text):
        return float(text)
    if not _DURATION_PATTERN.fullmatch(text):
        return None
    total = sum(
        float(number) * _SECONDS_PER_UNIT[unit] for number, unit in _PART_PATTERN.findall(text)
    )
    return -total if text.startswith("-") else total


_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB")
_COUNT_SUFFIXES = ("", "K", "M", "B", "T")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Formats bytes in decimal units, like Hugging Face, Ollama and the macOS Finder: 1.23 GB. The
    result has at least three digits."""
    return _format_scaled(count, _DECIMAL_UNITS, " ")


def format_memory(count: float) -> str:
    """Formats bytes in binary units, like `--memory`: 1.23 GiB. The value of `--memory 6` is
    therefore displayed as 6."""
    return _format_scaled(count, _BINARY_UNITS, " ", base=1024)


def format_count(count: float) -> str:
    """Formats a number of parameters: 1.24B, 8.03B, 355M."""
    return _format_scaled(count, _COUNT_SUFFIXES, "")


def pluralize(count: int, noun: str) -> str:
    """Formats a count with a noun: "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_duration(seconds: float) -> str:
    """Formats a duration: 12 s, 3 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _format_scaled(count: float, units: tuple[str, ...], separator: str, base: int = 1000) -> str:
    unit = 0
    # 999.5 would be rounded to 1000
    while count >= 999.5 and unit < len(units) - 1:
        count /= base
        unit += 1
    digits = 0 if unit == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f}{separator}{units[unit]}".rstrip()
