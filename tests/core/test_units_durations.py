"""Parsing of durations."""

from app.core.units import parse_duration
from tests.rows import rows


@rows(
    ("text", "expected"),
    [
        ("0", 0),
        ("90", 90),
        ("1.5", 1.5),
        ("-1", -1),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h0m0.5s", 3600.5),
        ("500ms", 0.5),
        ("-1m", -60),
    ],
)
def test_numbers_and_units_are_parsed(text, expected):
    assert parse_duration(text) == expected


@rows(
    "text", ["", "s", "m5", "5 m", "5m5", "1d", "1e3", "inf", "nan", "five", "٣", "1m\n", "9" * 40]
)
def test_an_invalid_duration_is_none(text):
    assert parse_duration(text) is None
