"""Values as text and in TOML: parsing, and error messages."""

import math
import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from app.config import value_types
from app.config.options import OPTIONS
from app.config.value_types import MAX_NUMBER, InvalidOptionValue
from tests.rows import rows

BY_FIELD = {option.field: option for option in OPTIONS}

INTEGER = value_types.integer(1)
TIME = value_types.duration()
KEEP_ALIVE = value_types.duration(allow_zero=True, allow_forever=True)
GIB = value_types.size("GiB", 1 << 30)


def refusal(value_type: value_types.ValueType, text: str) -> str:
    with pytest.raises(InvalidOptionValue) as caught:
        value_type.parse_text(text)
    return str(caught.value)


@rows(
    ("value_type", "text"),
    [
        (INTEGER, "0"),
        (INTEGER, "-1"),
        (INTEGER, "1.5"),
        (INTEGER, "9" * 5000),
        (INTEGER, "many"),
        (value_types.integer(0, 65535), "70000"),
        (TIME, "0"),
        (TIME, "-1"),
        (TIME, "inf"),
        (TIME, "nan"),
        (TIME, "forever"),
        (TIME, "5 parsecs"),
        (TIME, "minutes"),
        (TIME, "5m5"),
        (TIME, str(2 * MAX_NUMBER)),
        (KEEP_ALIVE, "soon"),
        (KEEP_ALIVE, "nan"),
        (GIB, "0"),
        (GIB, "-1"),
        (GIB, "nan"),
        (GIB, "1e300"),
        (GIB, "1e-300"),
        (GIB, "6 GiP"),
        (GIB, "GB"),
        (GIB, "6 i"),
        (value_types.count(1), "8x"),
        (value_types.count(1), "0.5k1"),
        (value_types.count(1), "1.5"),
        (value_types.count(1000), "0.9k"),
        (value_types.boolean(), "maybe"),
        (value_types.boolean(), "2"),
        (value_types.choice("a", "b"), "c"),
        (value_types.choice("a", "b"), "A"),
        (value_types.choice(4, 8), "3"),
        (value_types.text("a name", "NAME"), " "),
        (value_types.text("a name", "NAME"), "a\nb"),
        (value_types.path(), ""),
        (value_types.path(), "a\0b"),
        (value_types.origins(), "https://a/"),
        (value_types.origins(), "https://a/page"),
        (value_types.origins(), "a.example"),
        (value_types.origins(), "null"),
        (value_types.origins(), "https://a b"),
        (value_types.origins(), "https://me@a"),
        (value_types.origins(), "https://A.example"),
        (value_types.origins(), "https://*.example.org"),
        (value_types.origins(), "https://a.example:443"),
        (value_types.origins(), "http://a.example:80"),
        (value_types.origins(), "https://"),
        (value_types.host_names(), "https://a"),
        (value_types.host_names(), "a:8080"),
        (value_types.host_names(), "a/b"),
        (value_types.host_names(), "a."),
        (value_types.host_names(), "*"),
        (value_types.host_names(), "*.example.org"),
        (value_types.host_names(), "a b"),
        (value_types.host_names(), "..a"),
        (value_types.host_names(), "a..b"),
        (value_types.host_names(), "."),
        (value_types.host_names(), "[::1]"),
        (value_types.host_names(), "é.a"),
        (value_types.url(), "localhost:4318"),
        (value_types.url(), "ftp://a"),
        (value_types.url(), "http://"),
        (value_types.url(), "http://[::1"),
    ],
)
def test_an_invalid_text_is_rejected_with_a_description_of_the_type(value_type, text):
    assert refusal(value_type, text).startswith(f"must be {value_type.description}")


@rows(
    ("value_type", "value"),
    [
        (INTEGER, True),
        (INTEGER, 1.0),
        (INTEGER, "1"),
        (INTEGER, [1]),
        (TIME, False),
        (TIME, math.inf),
        (GIB, "six"),
        (GIB, True),
        (value_types.count(1), 1.0),
        (value_types.count(1), True),
        (value_types.boolean(), 1),
        (value_types.boolean(), "true"),
        (value_types.choice(4, 8), "4"),
        (value_types.choice(4, 8), 5),
        (value_types.path(), 7),
        (value_types.origins(), "https://a"),
        (value_types.origins(), [1]),
        (value_types.origins(), {"https://a": 1}),
    ],
)
def test_a_toml_value_of_another_type_is_rejected(value_type, value):
    with pytest.raises(InvalidOptionValue, match=r"^must be "):
        value_type.from_toml(value)


def test_an_error_shows_the_value_truncated():
    assert refusal(INTEGER, "many") == "must be an integer of 1 or more, not 'many'"
    assert len(refusal(INTEGER, "x" * 10_000)) < 200


def test_a_password_in_a_url_is_rejected_and_not_shown():
    message = refusal(value_types.url(), "http://me:hunter2@collector:4318")
    assert "without a password" in message
    assert "hunter2" not in message
    assert "hunter2" not in refusal(value_types.url(), "hunter2@collector")


def test_a_tilde_in_a_path_is_expanded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert value_types.path().parse_text("~/keys.toml") == "/somewhere/keys.toml"
    assert value_types.path().parse_text("keys.toml") == "keys.toml"


def test_lists_are_comma_separated():
    assert value_types.host_names().parse_text(" a, .b ,,c ") == ("a", ".b", "c")
    assert value_types.host_names().from_toml([]) == ()


NUMBERS = st.floats(min_value=1e-9, max_value=1e9)


@given(NUMBERS)
def test_any_duration_survives_a_toml_round_trip(number):
    for value_type in (TIME, KEEP_ALIVE):
        value = value_type.parse_text(repr(number))
        assert round_trip(value_type, value) == value


@given(NUMBERS)
def test_any_size_survives_a_toml_round_trip(number):
    value = GIB.parse_text(repr(number))
    assert round_trip(GIB, value) == value


@given(st.text(min_size=1))
def test_any_accepted_text_survives_a_toml_round_trip(text):
    for value_type in (
        value_types.text("a name", "NAME"),
        value_types.origins(),
        value_types.host_names(),
    ):
        try:
            value = value_type.parse_text(text)
        except InvalidOptionValue:
            continue
        assert round_trip(value_type, value) == value


def round_trip(value_type: value_types.ValueType, value: object) -> object:
    return value_type.from_toml(
        tomllib.loads(tomli_w.dumps({"key": value_type.to_toml(value)}))["key"]
    )


@rows(
    ("value_type", "text", "value"),
    [
        (value_types.count(1), "8192", 8192),
        (value_types.count(1), "8k", 8000),
        (value_types.count(1), "8K", 8192),
        (value_types.count(1), "128K", 131072),
        (value_types.count(1), "1.5k", 1500),
        (value_types.count(1), "1_000", 1000),
        (value_types.count(1), "2 M", 2 << 20),
        (GIB, "6", 6 << 30),
        (GIB, "6GB", 6_000_000_000),
        (GIB, "6 GiB", 6 << 30),
        (GIB, "6g", 6 << 30),
        (GIB, "512MB", 512_000_000),
        (GIB, "512 mib", 512 << 20),
        (GIB, "0.5TB", 500_000_000_000),
        (value_types.size("MiB", 1 << 20), "512KB", 512_000),
        (TIME, "90s", 90.0),
        (TIME, "5m", 300.0),
        (TIME, "5 min", 300.0),
        (TIME, "5 minutes", 300.0),
        (TIME, "1 h 30 m", 5400.0),
        (TIME, "1h30m", 5400.0),
        (TIME, "2 days", 172_800.0),
        (TIME, "250ms", 0.25),
        (TIME, "250 milliseconds", 0.25),
        (TIME, "1.5 Hours", 5400.0),
        (TIME, "90 SEC", 90.0),
    ],
)
def test_values_are_accepted_as_people_type_them(value_type, text, value):
    """In every source: a file has the text as a string."""
    assert value_type.parse_text(text) == value_type.from_toml(text) == value


NUMBERS = [
    option for option in OPTIONS if option.value_type.unit or option.value_type.metavar == "N"
]


@rows("option", NUMBERS, ids=lambda option: option.field)
def test_every_size_count_and_duration_has_units(option):
    """Except the port, which is no quantity."""
    words = {"s": "2 min", "GiB": "2GB", "MiB": "2MB", "tokens": "2k", "": "2k"}
    if option.field == "port":
        with pytest.raises(InvalidOptionValue):
            option.parse_text("2k")
    else:
        assert option.parse_text(words[option.value_type.unit]) > 0
