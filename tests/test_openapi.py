"""openapi.yaml and the application say the same, route by route and answer by answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from starlette.routing import Route

from app.api.app import build_routes
from app.core.errors import AppError, ErrorKind
from app.core.server_stats import ConnectionStats, EventLoopLag
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.http.responses import ERROR_FORMATS
from tests.api.asgi import ask
from tests.fakes import FakeGenerate

TRANSCRIPTS = Path(__file__).parent / "transcripts"
DOCUMENT: Any = yaml.safe_load((Path(__file__).parents[1] / "openapi.yaml").read_text("utf-8"))
FOUND_BELOW = [
    kind
    for kind in ErrorKind
    if kind not in (ErrorKind.METHOD_NOT_ALLOWED, ErrorKind.NOT_FOUND, ErrorKind.MODEL_NOT_FOUND)
]
COMMENT_OR_END = (b": ", b"data: [DONE]")


def validator(schema: Any) -> Any:
    """For a schema that may point into the document. Draft 2020-12 is what OpenAPI 3.1 uses."""
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def named(name: str) -> Any:
    return validator({"$ref": f"#/components/schemas/{name}"})


def documented() -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }


def served() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    generate = FakeGenerate()
    for route in build_routes(
        generate, generate, Settings(), ConnectionStats(), ThreadPools(), EventLoopLag()
    ):
        assert isinstance(route, Route)
        assert route.methods is not None
        # HEAD comes with every GET, by the definition of HTTP.
        found |= {(method, route.path_format) for method in route.methods - {"HEAD"}}
    return found


def test_every_route_is_documented_and_every_documented_route_is_there():
    assert documented() == served()


def references(node: Any) -> Iterator[str]:
    match node:
        case {"$ref": str(reference)}:
            yield reference
        case dict():
            for value in node.values():
                yield from references(value)
        case list():
            for value in node:
                yield from references(value)
        case _:
            pass


def test_every_reference_leads_somewhere_and_every_component_is_used():
    used = set(references(DOCUMENT))
    for reference in used:
        node = DOCUMENT
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
    components = {
        f"#/components/{kind}/{name}"
        for kind, entries in DOCUMENT["components"].items()
        for name in entries
        if kind != "securitySchemes"  # which are named without a path
    }
    assert components == {"/".join(reference.split("/")[:4]) for reference in used}


def test_every_schema_is_a_schema():
    for name in DOCUMENT["components"]["schemas"]:
        named(name)  # raises if it is none


def test_every_example_is_valid():
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                validator(content["schema"]).validate(content["example"])
    invalid = DOCUMENT["components"]["responses"]["Invalid"]["content"]["application/json"]
    validator(invalid["schema"]).validate(invalid["example"])


def told_by_responses(suffix: str, answer: bytes) -> Iterator[tuple[str, Any]]:
    """What a transcript of /v1/responses holds, each with the name of its schema."""
    if suffix == ".json":
        body = json.loads(answer)
        yield "Response" if "object" in body else "Error", body
        return
    for event in answer.removesuffix(b"\n\n").split(b"\n\n"):
        if not event.startswith(b": "):
            yield "ResponseEventData", json.loads(event.partition(b"\ndata: ")[2])


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*")), ids=lambda path: path.name)
def test_every_transcript_is_as_documented(path: Path):
    whole = {"chat": "ChatCompletion", "completion": "Completion", "error": "Error"}
    dialect, _, kind = path.stem.partition("_")
    answer = path.read_bytes()
    if path.stem.startswith("responses"):
        for name, told in told_by_responses(path.suffix, answer):
            named(name).validate(told)
        return
    match path.suffix, kind.split("_")[0]:
        case ".json", kind:
            named(whole[kind]).validate(json.loads(answer))
        case ".sse", kind:
            for event in answer.removesuffix(b"\n\n").split(b"\n\n"):
                if event.startswith(COMMENT_OR_END):
                    continue
                payload = json.loads(event.removeprefix(b"data: "))
                named("Error" if "error" in payload else f"{whole[kind]}Chunk").validate(payload)
        case _:
            assert dialect.startswith("runner")
            for line in answer.splitlines():
                named("RunnerLine").validate(json.loads(line))


def examples() -> list[tuple[str, str, Any, str]]:
    """Every operation with its own example for a body: method, path, body, content type."""
    found: list[tuple[str, str, Any, str]] = []
    for method, path in sorted(documented()):
        operation = DOCUMENT["paths"][path][method.lower()]
        contents = operation.get("requestBody", {}).get("content", {"": {"example": None}})
        for kind, content in contents.items():
            found.append((method, path, content["example"], kind))
    return found


def with_model(body: Any) -> Any:
    """The examples name a model of their own."""
    served = FakeGenerate().list_models()[0].id
    return {**body, "model": served} if isinstance(body, dict) and "model" in body else body


# What needs a response that is kept, which tests/api/responses/test_endpoints.py has.
NEED_A_RESPONSE = "/v1/responses/{response_id}"


@pytest.mark.parametrize(("method", "path", "body", "kind"), examples())
def test_the_documented_examples_are_answered_as_documented(
    method: str, path: str, body: Any, kind: str
):
    if path.startswith(NEED_A_RESPONSE):
        pytest.skip("needs a response that is kept: see tests/api/responses/test_endpoints.py")
    if "200" not in DOCUMENT["paths"][path][method.lower()]["responses"]:
        pytest.skip("is always refused: see tests/api/responses/test_endpoints.py")
    generate = FakeGenerate()
    data = body.encode() if isinstance(body, str) else with_model(body)
    url = path.replace("{id}", generate.list_models()[0].id)
    reply = ask(generate, method, url, data, {"content-type": kind})
    assert reply.status == 200
    contents = DOCUMENT["paths"][path][method.lower()]["responses"]["200"]["content"]
    got = reply.headers["content-type"]
    assert got in contents
    if got == "application/json":
        validator(contents[got]["schema"]).validate(reply.json)


@pytest.mark.parametrize("kind", FOUND_BELOW)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/completion"]
)
def test_every_mistake_that_is_found_below_is_documented(path: str, kind: ErrorKind):
    generate = FakeGenerate(open_error=AppError(kind, "what", param="where"))
    operation = DOCUMENT["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["example"]
    reply = ask(generate, "POST", path, with_model(body))
    assert reply.status == ERROR_FORMATS[kind].status
    assert str(reply.status) in operation["responses"]
    named("Error").validate(reply.json)
    documented = DOCUMENT["components"]["responses"]
    name = operation["responses"][str(reply.status)]["$ref"].rpartition("/")[2]
    assert ("retry-after" in reply.headers) == (
        "Retry-After" in documented[name].get("headers", {})
    )
