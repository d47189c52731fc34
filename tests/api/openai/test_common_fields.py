"""Who asks, for which model, and for what records."""

import math
from typing import Any

import pytest

from app.api.fields import Fields
from app.api.openai.common_fields import (
    check_identifiers,
    check_metadata,
    check_model,
    read_keep_alive,
    read_service_tier,
)
from app.core.errors import AppError, ErrorKind


def check(**given: Any) -> None:
    fields = Fields.from_value(given)
    check_identifiers(fields)
    check_metadata(fields)
    read_service_tier(fields)
    fields.reject_unknown()


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": 5}, {"model": ["a"]}])
def test_a_model_must_be_named(given: Any):
    check_model(Fields.from_value({"model": "a/b"}))
    with pytest.raises(AppError) as caught:
        check_model(Fields.from_value(given))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "model")


def test_the_tier_is_told_where_one_was_named():
    assert read_service_tier(Fields.from_value({})) is None
    assert [
        read_service_tier(Fields.from_value({"service_tier": it})) for it in ("auto", "default")
    ] == [
        "default",
        "default",
    ]


def test_what_openai_allows_is_welcome():
    check(metadata={str(n) * 32: "b" * 512 for n in range(10, 26)})
    check(user="u", safety_identifier="s", prompt_cache_key="k", metadata={})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"user": 5}, "user"),
        ({"safety_identifier": {}}, "safety_identifier"),
        ({"prompt_cache_key": 1}, "prompt_cache_key"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": False}}, "metadata.a"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {"a" * 65: "b"}}, "metadata." + "a" * 64),
        ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"service_tier": 1}, "service_tier"),
    ],
)
def test_a_wrong_record_is_named(given: Any, param: str):
    with pytest.raises(AppError) as caught:
        check(**given)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (1.5, 1.5),
        (-1, math.inf),
        ("00", 0),
        ("300", 300),
        ("-2", math.inf),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("-1m", math.inf),
    ],
)
def test_a_model_is_kept_for_as_long_as_ollamas_clients_say(given: Any, seconds: float | None):
    assert read_keep_alive(Fields.from_value({"keep_alive": given})) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 m", "5d", "1e3", "forever", True, [], "9" * 5000])
def test_a_time_that_nobody_understands_is_refused(given: Any):
    with pytest.raises(AppError) as caught:
        read_keep_alive(Fields.from_value({"keep_alive": given}))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "keep_alive")
    assert len(caught.value.message) < 400
