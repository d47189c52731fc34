"""Values in words and in TOML: what is read, what is refused, and in which words."""

import math
import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from app.configuration import forms
from app.configuration.forms import MOST, Misread
from app.configuration.options import OPTIONS

BY_FIELD = {option.field: option for option in OPTIONS}

WHOLE = forms.whole(1)
TIME = forms.time()
KEEP = forms.time(zero=True, forever=True)
GIB = forms.size("GiB", 1 << 30)


def refusal(form: forms.Form, word: str) -> str:
    with pytest.raises(Misread) as caught:
        form.read(word)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (WHOLE, "0"),
        (WHOLE, "-1"),
        (WHOLE, "1.5"),
        (WHOLE, "9" * 5000),
        (WHOLE, "many"),
        (forms.whole(0, 65535), "70000"),
        (TIME, "0"),
        (TIME, "-1"),
        (TIME, "inf"),
        (TIME, "nan"),
        (TIME, "forever"),
        (TIME, "5 minutes"),
        (TIME, "5m5"),
        (TIME, str(2 * MOST)),
        (KEEP, "soon"),
        (KEEP, "nan"),
        (GIB, "0"),
        (GIB, "-1"),
        (GIB, "nan"),
        (GIB, "1e300"),
        (GIB, "1e-300"),
        (GIB, "6 GiB"),
        (forms.switch(), "maybe"),
        (forms.switch(), "2"),
        (forms.choice("a", "b"), "c"),
        (forms.choice("a", "b"), "A"),
        (forms.choice(4, 8), "3"),
        (forms.text("a name", "NAME"), " "),
        (forms.text("a name", "NAME"), "a\nb"),
        (forms.path(), ""),
        (forms.path(), "a\0b"),
        (forms.origins(), "https://a/"),
        (forms.origins(), "https://a/page"),
        (forms.origins(), "a.example"),
        (forms.origins(), "null"),
        (forms.origins(), "https://a b"),
        (forms.origins(), "https://me@a"),
        (forms.host_names(), "https://a"),
        (forms.host_names(), "a:8080"),
        (forms.host_names(), "a/b"),
        (forms.host_names(), "a."),
        (forms.address(), "localhost:4318"),
        (forms.address(), "ftp://a"),
        (forms.address(), "http://"),
        (forms.address(), "http://[::1"),
    ],
)
def test_a_word_that_is_none_is_refused_with_what_it_must_be(form, word):
    assert refusal(form, word).startswith(f"must be {form.what}")


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
        (forms.switch(), 1),
        (forms.switch(), "true"),
        (forms.choice(4, 8), "4"),
        (forms.choice(4, 8), 5),
        (forms.path(), 7),
        (forms.origins(), "https://a"),
        (forms.origins(), [1]),
        (forms.origins(), {"https://a": 1}),
    ],
)
def test_a_value_of_another_type_is_refused_in_a_file(form, value):
    with pytest.raises(Misread, match=r"^must be "):
        form.take(value)


def test_a_refusal_shows_what_was_written_but_not_all_of_it():
    assert refusal(WHOLE, "many") == "must be a whole number of 1 or more, not 'many'"
    assert len(refusal(WHOLE, "x" * 10_000)) < 200


def test_a_password_in_an_address_is_refused_and_never_told():
    told = refusal(forms.address(), "http://me:hunter2@collector:4318")
    assert "without a password" in told
    assert "hunter2" not in told
    assert "hunter2" not in refusal(forms.address(), "hunter2@collector")


def test_home_is_understood_where_no_shell_does_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert forms.path().read("~/keys.toml") == "/somewhere/keys.toml"
    assert forms.path().read("keys.toml") == "keys.toml"


def test_several_are_parted_by_commas():
    assert forms.host_names().read(" a, .b ,,c ") == ("a", ".b", "c")
    assert forms.host_names().take([]) == ()


NUMBERS = st.floats(min_value=1e-9, max_value=1e9)


@given(NUMBERS)
def test_any_time_that_was_read_can_be_written_and_read_again(number):
    for form in (TIME, KEEP):
        value = form.read(repr(number))
        assert through_a_file(form, value) == value


@given(NUMBERS)
def test_any_size_that_was_read_can_be_written_and_read_again(number):
    value = GIB.read(repr(number))
    assert through_a_file(GIB, value) == value


@given(st.text(min_size=1))
def test_any_text_is_refused_or_comes_back_as_it_was(word):
    for form in (forms.text("a name", "NAME"), forms.origins(), forms.host_names()):
        try:
            value = form.read(word)
        except Misread:
            continue
        assert through_a_file(form, value) == value


def through_a_file(form: forms.Form, value: object) -> object:
    return form.take(tomllib.loads(tomli_w.dumps({"key": form.give(value)}))["key"])
