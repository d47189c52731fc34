"""POST /v1/embeddings: what clients may send, what they get, and that leaving cancels."""

import asyncio
import base64
import itertools
import json
import struct
from collections.abc import Callable
from typing import Any

import openai
import orjson
import pytest

from app.api.embeddings import parse_embeddings, render_embeddings
from app.core.embeddings import Embeddings, EmbedInput, EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.ports import ResolvedModel
from app.core.settings import Settings
from tests.api.asgi import Conversation, Reply, ask, serving
from tests.fakes import CARD, FakeGenerate, build_fake_app

Call = Callable[..., Reply]


def body(value: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": CARD.id, "input": value, **fields}


def understood(value: Any = "hello", **fields: Any) -> EmbedRequest:
    return parse_embeddings(body(value, **fields), CARD.id).request


def contents(request: EmbedRequest) -> list[tuple[Any, str]]:
    return [(one.content, one.param) for one in request.inputs]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("a text", [("a text", "input")]),
        ([1, 2, 3.0], [((1, 2, 3), "input")]),
        (["a", "b"], [("a", "input.0"), ("b", "input.1")]),
        ([[1], [2, 3]], [((1,), "input.0"), ((2, 3), "input.1")]),
        (["a", [7]], [("a", "input.0"), ((7,), "input.1")]),
    ],
)
def test_every_form_of_input_is_understood(value: Any, wanted: Any):
    assert contents(understood(value)) == wanted


def test_what_is_not_said_is_left_to_the_model():
    for request in (
        understood(),
        understood(pooling=None, dimensions=None, encoding_format=None, user=None),
    ):
        assert request == EmbedRequest(
            model=CARD.id, inputs=(EmbedInput(content="hello", param="input"),)
        )
    asked = understood(pooling="last", dimensions=3, user="me")
    assert (asked.pooling, asked.dimensions) == ("last", 3)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", []]}, "input.1"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [1, "a"]}, "input.1"),
        ({"input": [1, -1]}, "input.1"),
        ({"input": [[1, 2.5]]}, "input.0.1"),
        ({"input": [True]}, "input.0"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"user": 5}, "user"),
        ({"truncate": True}, "truncate"),
        ({"model": None}, "model"),
    ],
)
def test_what_is_wrong_is_named(call: Call, changes: dict[str, Any], param: str):
    reply = call("POST", "/v1/embeddings", {**body(), **changes})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_as_many_inputs_as_openai_takes_are_taken(call: Call):
    reply = call("POST", "/v1/embeddings", body(["a"] * 2048))
    assert [one["index"] for one in reply.json["data"]] == list(range(2048))


def test_an_unknown_model_is_not_found(call: Call):
    reply = call("POST", "/v1/embeddings", body() | {"model": "other"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_the_answer_is_openais(call: Call):
    reply = call("POST", "/v1/embeddings", body(["ab", "abc"]))
    assert reply.json == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.0, 2.0, 0.5, -0.25]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 3.0, 0.5, -0.25]},
        ],
        "model": CARD.id,
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


def test_base64_holds_the_same_numbers(call: Call):
    plain, packed = (
        [
            one["embedding"]
            for one in call("POST", "/v1/embeddings", body(["ab", "abc"], encoding_format=form))
            .json["data"]
        ]
        for form in ("float", "base64")
    )  # fmt: skip
    assert [list(struct.unpack("<4f", base64.b64decode(one))) for one in packed] == plain


def test_floats_are_written_so_that_none_is_lost():
    """Read back, a float32 is the same to the bit."""
    vector = struct.pack("<5f", 0.1, -1 / 3, 1e-38, 3.4e38, 0.0)
    found = Embeddings(vectors=(vector,), prompt_tokens=1)
    parsed = parse_embeddings(body(), CARD.id)
    reply = json.loads(orjson.dumps(render_embeddings(parsed, found)))
    assert struct.pack("<5f", *reply["data"][0]["embedding"]) == vector


@pytest.mark.parametrize(
    "kind", [ErrorKind.INVALID, ErrorKind.BUSY, ErrorKind.LOADING, ErrorKind.ENGINE]
)
def test_what_is_refused_below_is_told_above(kind: ErrorKind):
    generate = FakeGenerate(open_error=AppError(kind, "no", param="dimensions"))
    reply = ask(generate, "POST", "/v1/embeddings", body())
    assert reply.status in (400, 429, 500, 503)
    assert (reply.error["message"], reply.error["param"]) == ("no", "dimensions")


class Endless(FakeGenerate):
    """Embeds for ever, and notes who stops waiting."""

    asked: asyncio.Event
    cancelled = 0

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def counted(family: str, label: str) -> str:
    """A sample of the one model, as /metrics writes it."""
    return f'{family}{{engine="0",model_name="{CARD.id}",{label}}} 1.0'


def test_a_client_that_leaves_cancels_and_is_counted():
    generate = Endless()

    async def run() -> Reply:
        app, generate.asked = build_fake_app(generate, Settings()), asyncio.Event()
        sent = Conversation(app, "POST", "/v1/embeddings", json.dumps(body()).encode())
        await generate.asked.wait()
        sent.incoming.put_nowait({"type": "http.disconnect"})
        await sent.end()
        return await Conversation(app, "GET", "/metrics").end()

    metrics = asyncio.run(run()).body.decode()
    assert generate.cancelled == 1
    assert counted("mlxrunner_embedding_requests_total", 'outcome="cancelled"') in metrics


def test_each_end_is_counted(generate: FakeGenerate):
    refused = FakeGenerate(open_error=AppError(ErrorKind.BUSY, "no"))

    async def run(generate: FakeGenerate) -> str:
        app = build_fake_app(generate, Settings())
        await Conversation(app, "POST", "/v1/embeddings", json.dumps(body()).encode()).end()
        return (await Conversation(app, "GET", "/metrics").end()).body.decode()

    done = counted("mlxrunner_embedding_requests_total", 'outcome="done"')
    assert done in asyncio.run(run(generate))
    busy = counted("mlxrunner_request_errors_total", 'reason="server_busy"')
    assert busy in asyncio.run(run(refused))


def test_openais_client_reads_them(generate: FakeGenerate):
    """It asks for base64 of its own accord, and hands out floats."""
    with (
        serving(build_fake_app(generate, Settings())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.embeddings.create
        answers = [
            create(model=CARD.id, input=["ab", "abc"]),
            create(model=CARD.id, input=["ab", "abc"], encoding_format="float"),
        ]
        short = create(model=CARD.id, input=[1, 2], dimensions=2, user="me")
    for one, other in itertools.pairwise(answers):
        assert [e.embedding for e in one.data] == [e.embedding for e in other.data]
    assert answers[0].data[1].embedding == [1.0, 3.0, 0.5, -0.25]
    assert answers[0].usage.prompt_tokens == 5
    assert short.data[0].embedding == [0.0, 2.0]
    assert generate.embedded[-1].inputs == (EmbedInput(content=(1, 2), param="input"),)
