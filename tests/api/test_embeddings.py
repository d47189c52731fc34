"""POST /v1/embeddings: requests, responses, and that a disconnect cancels."""

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
from app.core.errors import AppError, ErrorKind
from app.core.ports import ResolvedModel
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
from app.core.settings import Settings
from tests.api.asgi import Conversation, Reply, send_request, serve_app
from tests.fakes import CARD, FakeGenerate, build_fake_app
from tests.rows import rows

Call = Callable[..., Reply]


def body(value: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": CARD.id, "input": value, **fields}


def parse(value: Any = "hello", **fields: Any) -> EmbedRequest:
    return parse_embeddings(json.dumps(body(value, **fields)).encode(), CARD.id).request


def contents(request: EmbedRequest) -> list[tuple[Any, str]]:
    return [(one.content, one.param) for one in request.inputs]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a text", [("a text", "input")]),
        ([1, 2, 3.0], [((1, 2, 3), "input")]),
        (["a", "b"], [("a", "input.0"), ("b", "input.1")]),
        ([[1], [2, 3]], [((1,), "input.0"), ((2, 3), "input.1")]),
        (["a", [7]], [("a", "input.0"), ((7,), "input.1")]),
        # tokens and texts in order, as in llama.cpp
        ([1, "a", 2], [((1, "a", 2), "input")]),
        ([["a", 1], [2]], [(("a", 1), "input.0"), ((2,), "input.1")]),
    ],
)
def test_every_form_of_input_is_parsed(value: Any, expected: Any):
    assert contents(parse(value)) == expected


def test_unset_fields_are_left_to_the_model():
    for request in (
        parse(),
        parse(pooling=None, dimensions=None, encoding_format=None, user=None),
    ):
        assert request == EmbedRequest(
            model=CARD.id, inputs=(EmbedInput(content="hello", param="input"),)
        )
    request = parse(pooling="last", dimensions=3, user="me")
    assert (request.pooling, request.dimensions) == ("last", 3)


@rows(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": {"text": "a"}}, "input.content"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", []]}, "input.1"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [1, "a", True]}, "input.2"),
        ({"input": [[1], ["a", -1]]}, "input.1.1"),
        ({"input": [1, -1]}, "input.1"),
        ({"input": [[1, 2.5]]}, "input.0.1"),
        ({"input": [True]}, "input.0"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"user": 5}, "user"),
        ({"truncate": True}, "truncate"),
        ({"model": 5}, "model"),
    ],
)
def test_an_invalid_field_is_named(call: Call, changes: dict[str, Any], param: str):
    reply = call("POST", "/v1/embeddings", {**body(), **changes})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_the_number_of_inputs_is_limited_as_at_openai(call: Call):
    reply = call("POST", "/v1/embeddings", body(["a"] * 2048))
    assert [one["index"] for one in reply.json["data"]] == list(range(2048))


def test_an_unknown_model_is_not_found(call: Call):
    reply = call("POST", "/v1/embeddings", body() | {"model": "other"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_the_response_has_openais_format(call: Call):
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


def test_floats_are_written_without_loss():
    """Parsed again, each float32 is bit-identical."""
    vector = struct.pack("<5f", 0.1, -1 / 3, 1e-38, 3.4e38, 0.0)
    embeddings = Embeddings(vectors=(vector,), prompt_tokens=1)
    parsed = parse_embeddings(json.dumps(body()).encode(), CARD.id)
    reply = json.loads(orjson.dumps(render_embeddings(parsed, embeddings)))
    assert struct.pack("<5f", *reply["data"][0]["embedding"]) == vector


@pytest.mark.parametrize(
    "kind", [ErrorKind.INVALID, ErrorKind.BUSY, ErrorKind.LOADING, ErrorKind.ENGINE]
)
def test_errors_of_the_model_reach_the_client(kind: ErrorKind):
    generate = FakeGenerate(open_error=AppError(kind, "no", param="dimensions"))
    reply = send_request(generate, "POST", "/v1/embeddings", body())
    assert reply.status in (400, 429, 500, 503)
    assert (reply.error["message"], reply.error["param"]) == ("no", "dimensions")


class Endless(FakeGenerate):
    """Embeds forever, and counts cancelled calls."""

    started: asyncio.Event
    cancelled = 0

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        self.started.set()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def sample_line(family: str, label: str) -> str:
    """A sample of the only model, as /metrics writes it."""
    return f'{family}{{engine="0",model_name="{CARD.id}",{label}}} 1.0'


def test_a_disconnect_cancels_and_is_counted():
    generate = Endless()

    async def run() -> Reply:
        app, generate.started = build_fake_app(generate, Settings()), asyncio.Event()
        conversation = Conversation(app, "POST", "/v1/embeddings", json.dumps(body()).encode())
        await generate.started.wait()
        conversation.incoming.put_nowait({"type": "http.disconnect"})
        await conversation.end()
        return await Conversation(app, "GET", "/metrics").end()

    metrics = asyncio.run(run()).body.decode()
    assert generate.cancelled == 1
    assert sample_line("mlxrunner_embedding_requests_total", 'outcome="cancelled"') in metrics


def test_every_outcome_is_counted(generate: FakeGenerate):
    rejecting = FakeGenerate(open_error=AppError(ErrorKind.BUSY, "no"))

    async def run(generate: FakeGenerate) -> str:
        app = build_fake_app(generate, Settings())
        await Conversation(app, "POST", "/v1/embeddings", json.dumps(body()).encode()).end()
        return (await Conversation(app, "GET", "/metrics").end()).body.decode()

    done = sample_line("mlxrunner_embedding_requests_total", 'outcome="done"')
    assert done in asyncio.run(run(generate))
    busy = sample_line("mlxrunner_request_errors_total", 'reason="server_busy"')
    assert busy in asyncio.run(run(rejecting))


def test_openais_client_reads_the_embeddings(generate: FakeGenerate):
    """It requests base64 by default and returns floats."""
    with (
        serve_app(build_fake_app(generate, Settings())) as url,
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


def test_an_input_may_be_an_object_as_in_llama_cpp(call: Call):
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    inputs = ["hello world", {"prompt_string": "hello world"}, {"content": parts}]
    generate = FakeGenerate()
    send_request(generate, "POST", "/v1/embeddings", {"input": inputs})
    send_request(generate, "POST", "/v1/embeddings", {"input": inputs[2]})
    contents = [[one.content for one in request.inputs] for request in generate.embedded]
    assert contents == [["hello world"] * 3, ["hello world"]]
    for wrong in ({"content": "a"}, {"content": [{"type": "image_url"}]}, {}):
        assert call("POST", "/v1/embeddings", {"input": wrong}).status == 400
