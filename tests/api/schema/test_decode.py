"""Bodies are decoded to structs, and errors name the field, the valid values and the value that was
sent."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Raw

from app.api.schema.base import NULL, Item, Options, describe, reject_fields
from app.api.schema.decode import BodyDecoder, decode_json, decode_object
from app.core.errors import AppError, ErrorKind
from app.core.request_context import REQUEST_CONTEXT, RequestContext
from tests.rows import rows


class Cat(Item, kw_only=True, frozen=True, tag_field="kind", tag="cat"):
    """An animal."""

    ignored: ClassVar[Mapping[str, str]] = {"color": "No effect."}

    lives: Annotated[int, Meta(ge=1, le=9)] | None = None


class Dog(Item, kw_only=True, frozen=True, tag_field="kind", tag="dog"):
    """Another animal."""

    name: str


class Box(Options, kw_only=True, frozen=True):
    """An object of options."""

    width: int | None = None


class Example(Options, kw_only=True, frozen=True):
    """A body."""

    unsupported = reject_fields(magic=(False, 1), audio=(), functions="use animals")

    animals: Annotated[list[Cat | Dog], Meta(min_length=1)]
    size: Annotated[float, Meta(ge=0, le=2)] | None = None
    count: Annotated[int, Meta(ge=0, le=100)] | None = None
    ids: Annotated[list[int], Meta(max_length=4)] | None = None
    mode: Literal["fast", "slow"] | None = None
    texts: Annotated[
        str | list[Annotated[str, Meta(min_length=1)]] | None, describe(expected="texts")
    ] = None
    inner_box: Box | None = None
    free: Raw = NULL


DECODER = BodyDecoder(Example)
CAT = {"kind": "cat"}


def decode(decoder: BodyDecoder[Example] = DECODER, **fields: Any) -> Example:
    return decoder.decode(json.dumps({"animals": [CAT], **fields}).encode())


def get_error(**fields: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        decode(**fields)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


@rows(
    ("fields", "param", "message"),
    [
        ({"size": 3}, "size", "size must be a number from 0 to 2, not 3"),
        ({"size": "x"}, "size", "size must be a number from 0 to 2, not 'x'"),
        ({"count": True}, "count", "count must be an integer from 0 to 100, not true"),
        ({"count": 0.5}, "count", "count must be an integer from 0 to 100, not 0.5"),
        ({"count": 2**70}, "count", "count must be an integer from 0 to 100, not 1.18"),
        ({"mode": "quick"}, "mode", "mode must be 'fast' or 'slow', not 'quick'"),
        ({"ids": [1, "a"]}, "ids.1", "ids.1 must be a 64-bit integer, not 'a'"),
        ({"ids": [1] * 5}, "ids", "ids must contain at most 4 items, not 5"),
        ({"ids": 5}, "ids", "ids must be an array, not 5"),
        ({"texts": ["a", ""]}, "texts", "texts must be texts, not ''"),
        ({"texts": [None]}, "texts", "texts must be texts, not null"),
        ({"inner_box": []}, "inner_box", "inner_box must be an object, not an empty array"),
        ({"inner_box": {"width": {"a": 1}}}, "inner_box.width", "not an object"),
        ({"animals": []}, "animals", "animals must contain at least 1 items, not 0"),
        ({"animals": None}, "animals", "animals is missing"),
        ({"animals": [CAT, 5]}, "animals.1", "animals.1 must be an object, not 5"),
        ({"animals": [{}]}, "animals.0.kind", "animals.0.kind is missing"),
        ({"animals": [{"kind": "cow"}]}, "animals.0.kind", "must be 'cat' or 'dog', not 'cow'"),
        ({"animals": [{"kind": "dog"}]}, "animals.0.name", "animals.0.name is missing"),
        ({"animals": [{"lives": 10, **CAT}]}, "animals.0.lives", "an integer from 1 to 9, not 10"),
    ],
)
def test_an_error_has_the_path_what_is_valid_and_what_was_sent(
    fields: Any, param: str, message: str
):
    error = get_error(**fields)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null"])
def test_a_body_is_an_object(body: bytes):
    with pytest.raises(AppError, match="the body must be an object"):
        DECODER.decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": tru}',
        b'{"animals": [{"kind": "\xff"}]}',
        b'{"animals": [{"kind": "cat"}], "\xff": 1}',
        b'{"animals": [{"kind": "cat", "\xff": 1}]}',
        b'{"animals": [{"kind": "cat"}], "size": "\xff"}',
        b'{"animals": [{"kind": "cat"}], "magic": "\xff"}',
        b"[" * 5000 + b"]" * 5000,
        b'{"animals": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_an_error_of_invalid_json_does_not_reference_the_body(body: bytes):
    with pytest.raises(AppError) as caught:
        DECODER.decode(body)
    assert caught.value.kind is ErrorKind.INVALID
    assert (caught.value.__context__, caught.value.__cause__) == (None, None)


BODY = {"animals": [{**CAT, "lives": 2.0}], "texts": ["é"], "size": 1, "innerBox": {"width": 1}}
TEXT = json.dumps(BODY, ensure_ascii=False).encode()


@given(st.data())
def test_any_bytes_are_a_body_or_an_error(data: st.DataObject):
    at = data.draw(st.integers(0, len(TEXT)))
    end = data.draw(st.integers(at, min(at + 4, len(TEXT))))
    piece = data.draw(st.binary(max_size=4) | st.sampled_from([b"null", b"1.5", b'"', b"[[", b"{"]))
    with suppress(AppError):  # the only exception
        DECODER.decode(TEXT[:at] + piece + TEXT[end:])


def test_json_has_one_type_of_number():
    assert decode(count=7.0, ids=[1, 2.0, 3e0]).ids == [1, 2, 3]
    assert decode(count=7.0).count == 7
    box = decode(inner_box={"width": 1e2}, size=2.0).inner_box
    assert box is not None
    assert box.width == 100


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_an_integer_is_never_rounded(number: float):
    try:
        count = decode(count=number).count
    except AppError:
        assert number not in range(101)
    else:
        assert count == number
        assert isinstance(count, int)


def test_a_large_body_is_not_decoded_again_for_its_error():
    error = get_error(size=3, texts="x" * 1_000_000)
    assert (error.param, error.message) == ("size", "size must be a number from 0 to 2")


def test_a_hostile_body_fails_at_its_first_value():
    body = b'{"animals": [' + b",".join([b"[]"] * 1_000_000) + b"]}"
    with pytest.raises(AppError) as caught:
        DECODER.decode(body)
    assert caught.value.param == "animals.0"


@rows(
    ("fields", "param", "message"),
    [
        ({"magic": True}, "magic", "magic does not support true: leave it out, or use false or 1"),
        ({"magic": "x" * 1000}, "magic", "magic does not support this value"),
        ({"audio": {}}, "audio", "audio is not supported: leave it out"),
        ({"functions": []}, "functions", "functions is not supported: use animals"),
        ({"coun": 5}, "coun", "unknown field 'coun': did you mean 'count'?"),
        ({"magi": 5}, "magi", "unknown field 'magi': did you mean 'magic'?"),
        ({"inner_box": {"widht": 5}}, "inner_box.widht", "did you mean 'width'?"),
    ],
)
def test_unsupported_and_misspelled_fields_are_rejected(fields: Any, param: str, message: str):
    error = get_error(**fields)
    assert error.param == param
    assert message in error.message


def test_unknown_fields_are_reported_at_every_level():
    context = RequestContext(id="r")
    token = REQUEST_CONTEXT.set(context)
    try:
        animals = [{**CAT, "color": "red", "live": 1}, {"kind": "dog", "name": "Rex", "nam": 1}]
        decode(animals=animals, inner_box={"flux": [1]}, other={}, magic=False, nothing=None)
    finally:
        REQUEST_CONTEXT.reset(token)
    assert context.build_notice() == (
        "ignored unknown fields: other, animals.live, animals.nam, inner_box.flux"
    )


def test_names_may_be_in_camel_case():
    camel = BodyDecoder(Example, camel_case=True)
    assert decode(camel, innerBox={"width": 5}).inner_box == Box(width=5)
    assert decode(camel, innerBox={"width": 5}, inner_box=None).inner_box == Box(width=5)
    assert decode(camel, innerBox={"width": 5}, inner_box={}).inner_box == Box()


def test_free_json_is_decoded_when_it_is_used():
    free = decode(free={"a": [1.0, None]}).free
    assert decode_json(free) == {"a": [1.0, None]}
    assert decode_object(free, "free") == {"a": [1.0, None]}
    assert decode_object(decode().free, "free") is None
    with pytest.raises(AppError) as caught:
        decode_object(decode(free=[]).free, "free")
    assert caught.value.param == "free"
