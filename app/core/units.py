"""Formats sizes, counts and durations for display, and parses them.

Knows: units. Must not know: the meaning of the values.
"""

import re

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

# Ollama's longest duration, 292 years: Go's 63 bits of nanoseconds
LONGEST_DURATION = 2.0**63 / 1e9

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


_SPOKEN_PART = re.compile(
    r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*"
    r"(ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)(?![a-z])",
    re.ASCII | re.IGNORECASE,
)
_SPOKEN_SECONDS = {"ms": 0.001, "mil": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_COUNT_PATTERN = re.compile(r"(\d(?:_?\d){0,14}(?:\.\d{1,9})?)\s*([kKmM]?)", re.ASCII)
# as in vLLM: 1k is 1000 and 1K is 1024
_COUNT_FACTORS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}

_BYTES_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?b?)", re.ASCII | re.IGNORECASE)
_BYTES_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_spoken_duration(text: str) -> float | None:
    """Parses a duration as people write it: everything that `parse_duration` accepts, and "5 min",
    "90 seconds", "1 h 30 m", "2 days". Returns None for invalid text."""
    seconds, end = 0.0, 0
    while found := _SPOKEN_PART.match(text, end):
        number, unit = float(found[1]), found[2].lower()
        key = unit if unit == "ms" else unit[:3] if unit.startswith("mil") else unit[0]
        seconds, end = seconds + number * _SPOKEN_SECONDS[key], found.end()
    return seconds if end and not text[end:].strip() else parse_duration(text)


def parse_count(text: str) -> int | None:
    """Parses a count, as vLLM does: 8192, 8k (8000), 8K (8192), 1.5k, 1m. Returns None for invalid
    text and for a fraction of one."""
    found = _COUNT_PATTERN.fullmatch(text.strip())
    if found is None:
        return None
    count = float(found[1]) * _COUNT_FACTORS[found[2]]
    return int(count) if count == int(count) and ("." not in found[1] or found[2]) else None


def parse_bytes(text: str) -> float | None:
    """Parses a size with a unit: 6GB (decimal), 6 GiB and 6G (binary). Returns the number of bytes.
    Returns None for invalid text and for a number without a unit."""
    found = _BYTES_PATTERN.fullmatch(text.strip())
    if (
        found is None
        or not (found[2] or found[3])
        or (found[3].lower().startswith("i") and not found[2])
    ):
        return None
    base = 1000 if found[2] and found[3].lower() == "b" else 1024
    return float(found[1]) * base ** _BYTES_EXPONENTS[found[2].lower()]


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
