"""Values in words and in TOML: what is read, what is refused, and in which words."""

import math
import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from app.config import value_types
from app.config.options import OPTIONS
from app.config.value_types import MAX_NUMBER, InvalidOptionValue

BY_FIELD = {option.field: option for option in OPTIONS}

WHOLE = value_types.integer(1)
TIME = value_types.duration()
KEEP = value_types.duration(allow_zero=True, allow_forever=True)
GIB = value_types.size("GiB", 1 << 30)


def refusal(form: value_types.ValueType, word: str) -> str:
    with pytest.raises(InvalidOptionValue) as caught:
        form.parse_text(word)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (WHOLE, "0"),
        (WHOLE, "-1"),
        (WHOLE, "1.5"),
        (WHOLE, "9" * 5000),
        (WHOLE, "many"),
        (value_types.integer(0, 65535), "70000"),
        (TIME, "0"),
        (TIME, "-1"),
        (TIME, "inf"),
        (TIME, "nan"),
        (TIME, "forever"),
        (TIME, "5 minutes"),
        (TIME, "5m5"),
        (TIME, str(2 * MAX_NUMBER)),
        (KEEP, "soon"),
        (KEEP, "nan"),
        (GIB, "0"),
        (GIB, "-1"),
        (GIB, "nan"),
        (GIB, "1e300"),
        (GIB, "1e-300"),
        (GIB, "6 GiB"),
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
        (value_types.host_names(), "https://a"),
        (value_types.host_names(), "a:8080"),
        (value_types.host_names(), "a/b"),
        (value_types.host_names(), "a."),
        (value_types.url(), "localhost:4318"),
        (value_types.url(), "ftp://a"),
        (value_types.url(), "http://"),
        (value_types.url(), "http://[::1"),
    ],
)
def test_a_word_that_is_none_is_refused_with_what_it_must_be(form, word):
    assert refusal(form, word).startswith(f"must be {form.description}")


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (WHOLE, True),
        (WHOLE, 1.0),
        (WHOLE, "1"),
        (WHOLE, [1]),
        (TIME, False),
        (TIME, math.inf),
        (GIB, "6"),
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
def test_a_value_of_another_type_is_refused_in_a_file(form, value):
    with pytest.raises(InvalidOptionValue, match=r"^must be "):
        form.from_toml(value)


def test_a_refusal_shows_what_was_written_but_not_all_of_it():
    assert refusal(WHOLE, "many") == "must be a whole number of 1 or more, not 'many'"
    assert len(refusal(WHOLE, "x" * 10_000)) < 200


def test_a_password_in_an_address_is_refused_and_never_told():
    told = refusal(value_types.url(), "http://me:hunter2@collector:4318")
    assert "without a password" in told
    assert "hunter2" not in told
    assert "hunter2" not in refusal(value_types.url(), "hunter2@collector")


def test_home_is_understood_where_no_shell_does_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert value_types.path().parse_text("~/keys.toml") == "/somewhere/keys.toml"
    assert value_types.path().parse_text("keys.toml") == "keys.toml"


def test_several_are_parted_by_commas():
    assert value_types.host_names().parse_text(" a, .b ,,c ") == ("a", ".b", "c")
    assert value_types.host_names().from_toml([]) == ()


NUMBERS = st.floats(min_value=1e-9, max_value=1e9)


@given(NUMBERS)
def test_any_time_that_was_read_can_be_written_and_read_again(number):
    for form in (TIME, KEEP):
        value = form.parse_text(repr(number))
        assert through_a_file(form, value) == value


@given(NUMBERS)
def test_any_size_that_was_read_can_be_written_and_read_again(number):
    value = GIB.parse_text(repr(number))
    assert through_a_file(GIB, value) == value


@given(st.text(min_size=1))
def test_any_text_is_refused_or_comes_back_as_it_was(word):
    for form in (
        value_types.text("a name", "NAME"),
        value_types.origins(),
        value_types.host_names(),
    ):
        try:
            value = form.parse_text(word)
        except InvalidOptionValue:
            continue
        assert through_a_file(form, value) == value


def through_a_file(form: value_types.ValueType, value: object) -> object:
    return form.from_toml(tomllib.loads(tomli_w.dumps({"key": form.to_toml(value)}))["key"])
