"""Durations as people write them."""

import pytest

from app.core.units import parse_duration


@pytest.mark.parametrize(
    ("text", "meant"),
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
def test_a_number_or_units_are_understood(text, meant):
    assert parse_duration(text) == meant


@pytest.mark.parametrize(
    "text", ["", "s", "m5", "5 m", "5m5", "1d", "1e3", "inf", "nan", "five", "٣", "1m\n", "9" * 40]
)
def test_what_is_no_duration_is_none(text):
    assert parse_duration(text) is None
