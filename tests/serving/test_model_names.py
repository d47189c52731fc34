"""The names of models in requests, over HTTP: each route resolves its model once."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app.core.settings import Settings
from app.serving.registry import ModelRegistry
from app.serving.router import ModelRouter
from tests import tiny
from tests.api.asgi import Conversation, Reply
from tests.fakes import CARD, FakeGenerate, FakeModel, build_fake_app
from tests.rows import rows
from tests.serving.test_router import with_router

HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Route:
    """A route that names a model. body: None for a GET. name: reads the name in the answer."""

    method: str
    path: str
    body: Any = None
    name: Callable[[Reply], str] | None = None

    def build_request(self, model: str) -> tuple[str, str, bytes]:
        """The method, path and body of a request for this model."""
        path = self.path.replace("{model}", model)
        if self.body is None:
            return self.method, path, b""
        body = self.body if "{model}" in self.path else {**self.body, "model": model}
        return self.method, path, json.dumps(body).encode()


def read_model(reply: Reply) -> str:
    return reply.json["model"]


def read_id(reply: Reply) -> str:
    return reply.json["id"]


def read_chunks(reply: Reply) -> str:
    [name] = {
        json.loads(line.removeprefix(b"data: "))["model"]
        for line in reply.body.splitlines()
        if line.startswith(b"data: {")
    }
    return name


def read_response_events(reply: Reply) -> str:
    [name] = {
        event["response"]["model"]
        for line in reply.body.splitlines()
        if line.startswith(b"data: {") and "response" in (event := json.loads(line[6:]))
    }
    return name


SHORT = {"max_tokens": 2, "temperature": 0}
ROUTES = {
    "chat": Route("POST", "/v1/chat/completions", {"messages": HI, **SHORT}, read_model),
    "chat, streamed": Route(
        "POST", "/v1/chat/completions", {"messages": HI, "stream": True, **SHORT}, read_chunks
    ),
    "completions": Route("POST", "/v1/completions", {"prompt": "hi", **SHORT}, read_model),
    "completions, streamed": Route(
        "POST", "/v1/completions", {"prompt": "hi", "stream": True, **SHORT}, read_chunks
    ),
    "responses": Route(
        "POST", "/v1/responses", {"input": "hi", "max_output_tokens": 16}, read_model
    ),
    "responses, streamed": Route(
        "POST",
        "/v1/responses",
        {"input": "hi", "stream": True, "max_output_tokens": 16},
        read_response_events,
    ),
    "input_tokens": Route("POST", "/v1/responses/input_tokens", {"input": "hi"}),
    "embeddings": Route("POST", "/v1/embeddings", {"input": "hi"}, read_model),
    "tokenize": Route("POST", "/v1/tokenize", {"prompt": "hi"}),
    "tokenize, with pieces": Route("POST", "/tokenize", {"content": "hi", "with_pieces": True}),
    "tokenize, a conversation": Route("POST", "/tokenize", {"messages": HI}),
    "tokenize, by the query": Route("POST", "/v1/tokenize?model={model}", {"prompt": "hi"}),
    "detokenize": Route("POST", "/v1/detokenize", {"tokens": [104, 105]}),
    "detokenize, by the query": Route("POST", "/detokenize?model={model}", [104, 105]),
    "tokenizer_info": Route("GET", "/tokenizer_info?model={model}"),
    "models": Route("GET", "/v1/models/{model}", None, read_id),
    "load": Route("POST", "/v1/models/load", {}, read_id),
    "unload": Route("POST", "/v1/models/unload", {}, read_id),
    "defaults": Route("POST", "/v1/models/defaults", {"defaults": {"aliases": ["m"]}}, read_id),
}
for_each_route = rows("route", ROUTES.values(), ids=list(ROUTES))


class RecordingGenerate:
    """A `FakeGenerate` that records the models passed to its methods."""

    def __init__(self, *names: str) -> None:
        self.fake = FakeGenerate(cards=[replace(CARD, id=name) for name in names])
        self.models: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.fake, name)

        def record(*args: Any, **kwargs: Any) -> Any:
            self.models += [arg.card.id for arg in args if isinstance(arg, FakeModel)]
            return method(*args, **kwargs)

        return record


async def send(app: Any, route: Route, model: str) -> Reply:
    return await Conversation(app, *route.build_request(model)).end()


@for_each_route
@rows("name", ["org/m", "org/m:latest"])
def test_every_route_accepts_a_name_with_ollamas_tag(route: Route, name: str):
    """The response has the name without the tag."""
    generate = RecordingGenerate("first", "org/m", "last")
    reply = asyncio.run(send(build_fake_app(generate, Settings()), route, name))
    assert reply.status == 200
    assert set(generate.models) == {"org/m"}
    assert {request.model for request in generate.fake.opened} <= {"org/m"}
    assert {request.model for request in generate.fake.tokenized_chats} <= {"org/m"}
    if route.name is not None:
        assert route.name(reply) == "org/m"


@for_each_route
def test_a_model_with_the_tag_in_its_name_is_preferred(route: Route):
    generate = RecordingGenerate("m", "m:latest")
    reply = asyncio.run(send(build_fake_app(generate, Settings()), route, "m:latest"))
    assert reply.status == 200
    assert set(generate.models) == {"m:latest"}


@for_each_route
@rows("name", ["none", "first:8b", "../../etc", "x" * 5000])
def test_every_route_rejects_an_unknown_model(route: Route, name: str):
    generate = RecordingGenerate("first")
    reply = asyncio.run(send(build_fake_app(generate, Settings()), route, name))
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert reply.error["param"] == "model"
    assert len(reply.error["message"]) < 400
    assert generate.models == []


@for_each_route
def test_every_route_resolves_its_model_once(route: Route):
    generate = RecordingGenerate("first", "m")
    asyncio.run(send(build_fake_app(generate, Settings()), route, "m:latest"))
    assert generate.fake.resolved == ["m:latest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models. "c" has a different tokenizer than the default model."""
    root = tmp_path_factory.mktemp("names")
    for seed, name in enumerate("abc"):
        tiny.write(root / name, seed=seed)
    tokenizer = root / "c" / "tokenizer.json"
    changed = {
        **json.loads(tokenizer.read_text()),
        "normalizer": {"type": "Prepend", "prepend": "x"},
    }
    tokenizer.write_text(json.dumps(changed))
    return root


def test_a_real_router_accepts_names_with_ollamas_tag(folder: Path):
    async def use(router: ModelRouter) -> dict[str, Reply]:
        app = build_fake_app(router, Settings())
        replies: dict[str, Reply] = {}
        for name, route in ROUTES.items():
            replies[name] = await send(app, route, "c:latest")
            assert replies[name].status == 200, name
            if route.name is not None:
                assert route.name(replies[name]) == "c", name
        return replies

    replies = with_router(folder, use, preload="c")
    for name in ("tokenize", "tokenize, by the query"):
        assert replies[name].json["tokens"] == [*b"xhi"]
    assert replies["unload"].json["state"] == "unloaded"


LOOKUPS = (
    (ModelRegistry, "find"),
    (ModelRegistry, "discover"),
    (ModelRegistry, "rescan"),
    (ModelRouter, "resolve"),
    (ModelRouter, "list_models"),
    (ModelRouter, "list_model_states"),
)


def count_lookups(
    folder: Path, route: Route, monkeypatch: pytest.MonkeyPatch, *, num_others: int
) -> Counter[str]:
    """The lookups of one request while this many other models are registered."""
    calls: Counter[str] = Counter()

    def count(owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[f"{owner.__name__}.{name}"] += 1
            return original(*args, **kwargs)

        return counting

    async def use(router: ModelRouter) -> None:
        assert len(router.list_models()) == 1 + num_others
        app = build_fake_app(router, Settings())
        with monkeypatch.context() as patch:
            for owner, name in LOOKUPS:
                patch.setattr(owner, name, count(owner, name))
            assert (await send(app, route, "a")).status == 200

    with_router(folder, use, names="a", num_others=num_others)
    return calls


@pytest.mark.product
@pytest.mark.parametrize("name", ["chat", "chat, streamed", "responses", "embeddings", "models"])
def test_the_cost_of_a_request_is_independent_of_the_number_of_models(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Every request listed all models, some of them three times."""
    alone = count_lookups(folder, ROUTES[name], monkeypatch, num_others=0)
    among_many = count_lookups(folder, ROUTES[name], monkeypatch, num_others=299)
    assert alone == among_many
    assert alone["ModelRouter.resolve"] == alone["ModelRegistry.discover"] == 1
    assert 1 <= alone["ModelRegistry.find"] <= 2
    assert alone["ModelRouter.list_models"] == alone["ModelRouter.list_model_states"] == 0
