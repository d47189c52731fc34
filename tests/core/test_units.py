"""Formatting of numbers."""

import pytest

from app.core.units import format_bytes, format_count, format_duration, format_memory
from tests.rows import rows


@rows(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (4_600_000_000, "4.60 GB"),
        (2_500_000_000_000_000, "2500 TB"),
    ],
)
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1000, "0.98 KiB"),
        (6 << 30, "6.00 GiB"),
        (int(6.5 * (1 << 30)), "6.50 GiB"),
        (999 << 30, "999 GiB"),
    ],
)
def test_memory_is_formatted_in_the_unit_of_the_settings(count: int, text: str) -> None:
    assert format_memory(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (1_771_200, "1.77M"), (8_030_261_248, "8.03B")]
)
def test_parameter_counts_have_the_usual_suffixes(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (7_500, "2 h 05 min")]
)
def test_durations_are_rounded_to_a_readable_precision(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
