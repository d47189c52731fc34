"""Request bodies: values are counted before they are parsed, and the memory of all bodies is
bounded."""

import asyncio
import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, ErrorKind
from app.core.settings import MEBIBYTE, Settings
from app.core.thread_pools import ThreadPools
from app.http.body import (
    MAX_FIELDS,
    MAX_ITEMS,
    BodyMemoryBudget,
    FieldCounter,
    RequestBodies,
)
from tests.api.asgi import Conversation, Reply
from tests.fakes import CARD, FakeGenerate, build_fake_app

CHAT = "/v1/chat/completions"
SCOPE = {"headers": [(b"content-type", b"application/json")]}

values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text('a",:[{}]\\\n"ü'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('k",:[\\'), inner, max_size=4)
    ),
    max_leaves=20,
)


def count_parsed_objects(value: Any) -> int:
    """The number of objects that a parser builds for a value, including keys."""
    if isinstance(value, dict):
        return 1 + sum(1 + count_parsed_objects(one) for one in value.values())
    return 1 + sum(map(count_parsed_objects, value)) if isinstance(value, list) else 1


def test_a_text_with_many_commas_is_one_value():
    async def run() -> Reply:
        message = {"role": "user", "content": "so, it: goes [on], " * 100_000}
        body = json.dumps({"model": "fake/model", "messages": [message]}).encode()
        return await Conversation(
            build_fake_app(FakeGenerate(), Settings()), "POST", CHAT, body
        ).end()

    assert asyncio.run(run()).status == 200


def count_structure(value: Any) -> int:
    """The number of objects, arrays and keys in a value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count_structure, value.values()))
    return 1 + sum(map(count_structure, value)) if isinstance(value, list) else 0


def feed_in_parts(text: bytes, *cuts: int) -> FieldCounter:
    counter = FieldCounter()
    for start, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        counter.feed(text[start:end], before=text[:start])
    return counter


@given(value=values, data=st.data(), ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_fields_are_counted_outside_of_strings(
    value: Any, data: st.DataObject, ascii: bool, indent: int | None
):
    # its brackets would exceed the limit if strings were not detected
    long = "{" * (MAX_FIELDS + 1)
    text = json.dumps([value, long, value], ensure_ascii=ascii, indent=indent).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    counter = feed_in_parts(text, *cuts)
    assert counter.fields == 1 + 2 * count_structure(value)
    assert counter.items <= 2 + 2 * count_parsed_objects(value)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (b'["' + b"[{:," * MAX_ITEMS + b'"]', True),
        (b"[" + b'"\\"[{:,",' * MAX_FIELDS + b"1]", True),
        (b"[" + b'"","\\\\",' * MAX_FIELDS + b"1]", True),
        (b"[" + b'"\\\\",[],' * MAX_FIELDS + b"1]", False),
        (b"[" + b'"\\"",{},' * MAX_FIELDS + b"1]", False),
        (b"{" + b'"a":1,' * MAX_FIELDS + b'"a":1}', False),
        (b"[" + b"1," * MAX_ITEMS + b"1]", True),
        (b"[" + b"1,1," * MAX_ITEMS + b"1]", False),
        (b"[" + b'"",' * 2 * MAX_ITEMS + b"1]", False),
    ],
    ids=range(9),
)
def test_the_number_of_fields_and_items_is_limited(text: bytes, is_valid: bool):
    cuts = range(65_536, len(text), 65_536)
    if is_valid:
        feed_in_parts(text, *cuts)
        return
    with pytest.raises(AppError, match="send fewer at a time") as caught:
        feed_in_parts(text, *cuts)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.INVALID, "too_many_values")


def test_invalid_json_is_counted():
    random.seed(1)
    for _ in range(200):
        content = bytes(random.choices(b'"\\,:[]{}ax\xff\xc3', k=50))
        string = b'"' + b"{" * (MAX_FIELDS + 1) + b'"'
        feed_in_parts(string + content, 20, len(string), len(string) + 20)


def split_body(body: bytes, size: int = 65536) -> list[dict[str, Any]]:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return [
        {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
        for index, part in enumerate(parts)
    ]


def send_body(body: bytes, **settings: Any) -> tuple[Reply, int]:
    """The reply, and how many parts of the body were read."""

    async def run() -> tuple[Reply, int]:
        app = build_fake_app(FakeGenerate(), Settings(**settings))
        conversation = Conversation(app, "POST", CHAT, None)
        parts = split_body(body)
        for part in parts:
            conversation.incoming.put_nowait(part)
        reply = await conversation.end()
        num_unread = sum(
            conversation.incoming.get_nowait()["type"] == "http.request"
            for _ in range(conversation.incoming.qsize())
        )
        return reply, len(parts) - num_unread

    return asyncio.run(run())


def test_a_body_with_too_many_values_is_rejected_while_it_arrives():
    """Ten million bytes of empty lists were parsed on the event loop: 3 s of delay for every
    client, and 2 GB of memory, of which 0.7 GB were never freed."""
    body = b'{"messages": [' + b",".join([b"[]"] * 3_000_000) + b"]}"
    reply, read = send_body(body)
    assert reply.status == 400
    assert reply.error["code"] == "too_many_values"
    assert read < len(split_body(body)) / 10


def test_a_prompt_of_ids_as_long_as_the_context_is_admitted():
    longest = 400_000
    generate = FakeGenerate(cards=[CARD, type(CARD)(id="long", created=1, context_length=longest)])

    async def run() -> Reply:
        body = {"model": "fake/model", "prompt": [65] * longest, "max_tokens": 1}
        app = build_fake_app(generate, Settings())
        data = json.dumps(body).encode()
        return await Conversation(app, "POST", "/v1/completions", data).end()

    assert asyncio.run(run()).status == 200
    assert len(generate.opened) == 1


def test_2048_inputs_of_a_hundred_ids_each_are_admitted():
    async def run() -> Reply:
        body = {"model": "fake/model", "input": [[65] * 100] * 2048}
        app = build_fake_app(FakeGenerate(), Settings())
        return await Conversation(app, "POST", "/v1/embeddings", json.dumps(body).encode()).end()

    assert asyncio.run(run()).status == 200


class Incoming:
    """The receive side of a request, which the test feeds part by part."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def receive(self) -> Any:
        return await self.parts.get()

    def send(self, body: bytes, *, more: bool = True) -> None:
        self.parts.put_nowait({"type": "http.request", "body": body, "more_body": more})


def build_scope(caller: str = "") -> Any:
    return {**SCOPE, "state": {"caller": caller}}


def build_request_bodies(**settings: Any) -> RequestBodies:
    return RequestBodies(Settings(**settings), ThreadPools())


def test_a_new_limit_applies_to_later_bodies():
    async def receive(bodies: RequestBodies) -> object:
        incoming = Incoming()
        incoming.send(b'"' + b"x" * 98 + b'"', more=False)
        return await bodies.decode(build_scope(), incoming.receive, orjson.loads)

    async def run() -> None:
        bodies = build_request_bodies(max_body=99)
        with pytest.raises(AppError, match="larger than the limit of 99 bytes"):
            await receive(bodies)
        bodies.apply(Settings(max_body=100))
        assert await receive(bodies) == "x" * 98

    asyncio.run(run())


def test_bodies_in_flight_are_bounded_and_a_rejected_one_is_released():
    """Fourteen bodies of ten megabytes each increased the process by 2 GB."""

    async def run() -> None:
        bodies = build_request_bodies(max_body=10 * MEBIBYTE)
        large = b'"' + b"x" * (10 * MEBIBYTE - 2) + b'"'
        done = asyncio.Event()

        async def read() -> object:
            incoming = Incoming()
            incoming.send(large, more=False)
            async with bodies.receive_json(build_scope(), incoming.receive) as body:
                await body.decode(orjson.loads)
                await done.wait()
            return None

        reading = [asyncio.create_task(read()) for _ in range(14)]
        while sum(task.done() for task in reading) < 2 or bodies.decoding:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        errors = [task.exception() for task in reading if task.done()]
        assert len(errors) == 2, "of 128 MiB, twelve have 120"
        for error in errors:
            assert isinstance(error, AppError)
            assert (error.kind, error.code) == (ErrorKind.OVERLOADED, "too_many_bodies")
            assert error.retry_after == 1
        assert bodies.in_flight == 12
        assert bodies.reserved_bytes <= 128 * MEBIBYTE
        small = Incoming()
        small.send(b"[]", more=False)
        assert await bodies.decode(build_scope(), small.receive, orjson.loads) == [], (
            "small bodies are still accepted"
        )
        done.set()
        await asyncio.gather(*reading, return_exceptions=True)
        assert (bodies.in_flight, bodies.reserved_bytes, bodies.decoding) == (0, 0, 0)

    asyncio.run(run())


def test_one_key_may_use_half_of_the_memory_for_bodies():
    budget = BodyMemoryBudget(100)
    budget.reserve("anna", 50)
    with pytest.raises(AppError, match="try again"):
        budget.reserve("anna", 1)
    budget.reserve("ben", 50)
    with pytest.raises(AppError, match="try again"):
        budget.reserve("cleo", 1)
    budget.release("anna", 50)
    budget.reserve("cleo", 50)
    assert budget.used == 100


def test_an_arriving_body_does_not_block_the_decoding_of_others():
    async def run() -> None:
        bodies = build_request_bodies()
        slow, quick = Incoming(), Incoming()
        large = b'"' + b"x" * 2 * MEBIBYTE + b'"'
        slow.send(large[:-1])
        arriving = asyncio.create_task(bodies.decode(build_scope(), slow.receive, orjson.loads))
        await asyncio.sleep(0)
        quick.send(large, more=False)
        assert await bodies.decode(build_scope(), quick.receive, orjson.loads) == "x" * 2 * MEBIBYTE
        assert not arriving.done()
        slow.send(b'"', more=False)
        await arriving

    asyncio.run(run())


def test_a_disconnect_while_the_body_waits_cancels_the_request():
    generate = FakeGenerate()

    async def run() -> None:
        app = build_fake_app(generate, Settings())
        content = "x" * 2 * MEBIBYTE
        message = {"role": "user", "content": content}
        data = json.dumps({"model": "fake/model", "messages": [message]}).encode()
        conversations = [Conversation(app, "POST", CHAT, data) for _ in range(8)]
        conversations[-1].disconnect()
        await asyncio.gather(
            *(conversation.task for conversation in conversations), return_exceptions=True
        )
        assert [conversation.reply.status for conversation in conversations[:-1]] == [200] * 7
        assert conversations[-1].reply.status == 0

    asyncio.run(run())
    assert len(generate.opened) == 7


def test_the_error_of_invalid_json_does_not_reference_the_body():
    """The parser's error references the entire text: as the context of our error, it stayed in
    memory as long as the request."""

    async def find_nothing(model: str | None) -> None:
        assert model is None

    async def run() -> AppError:
        incoming = Incoming()
        incoming.send(b"x" * 100_000, more=False)
        with pytest.raises(AppError) as caught:
            async with build_request_bodies().receive_json(build_scope(), incoming.receive) as body:
                await body.read(find_nothing, lambda data, model: None)
        return caught.value

    error = asyncio.run(run())
    assert "not valid JSON" in str(error)
    assert (error.__context__, error.__cause__) == (None, None)


@pytest.mark.parametrize("size", [10, 2 * MEBIBYTE])
def test_the_model_of_a_body_is_resolved_before_it_is_read(size: int):
    async def run() -> None:
        incoming = Incoming()
        data = json.dumps({"prompt": "x" * size, "model": "a"}).encode()
        incoming.send(data, more=False)

        async def find(model: str | None) -> str:
            return f"found {model}"

        async with build_request_bodies().receive_json(build_scope(), incoming.receive) as body:
            assert await body.read(find, lambda data, found: (bytes(data), found)) == (
                "found a",
                (data, "found a"),
            )
            assert not body.data, "the bytes are released"

    asyncio.run(run())
