"""Fields that all dialects share: model, user, metadata, service tier, keep_alive."""

import json
import math
from typing import Any

import pytest

from app.api.openai.request import parse_chat
from app.core.errors import AppError, ErrorKind
from app.core.requests import GenerateRequest
from tests.rows import rows


def parse(**body: Any) -> GenerateRequest:
    content = json.dumps({"messages": [{"role": "user"}], **body}).encode()
    return parse_chat(content, "m").request


def check(**body: Any) -> None:
    parse(**body)


@pytest.mark.parametrize("body", [{"model": 5}, {"model": ["a"]}])
def test_a_model_is_a_text(body: Any):
    check(model="a/b")
    with pytest.raises(AppError) as caught:
        check(**body)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "model")


def test_the_limits_are_those_of_openai():
    check(metadata={str(n) * 32: "b" * 512 for n in range(10, 26)})
    check(user="u", safety_identifier="s", prompt_cache_key="k", metadata={})


@rows(
    ("body", "param"),
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
def test_an_invalid_field_is_named_in_the_error(body: Any, param: str):
    with pytest.raises(AppError) as caught:
        check(**body)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


@rows(
    ("value", "seconds"),
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
        (1e12, math.inf),
        ("90000000h", math.inf),
    ],
)
def test_keep_alive_has_the_syntax_of_ollama(value: Any, seconds: float | None):
    assert parse(keep_alive=value).keep_alive == seconds


@pytest.mark.parametrize("value", ["", "m", "5 m", "5d", "1e3", "forever", True, [], "9" * 5000])
def test_an_invalid_keep_alive_is_rejected(value: Any):
    with pytest.raises(AppError) as caught:
        check(keep_alive=value)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "keep_alive")
    assert len(caught.value.message) < 400
