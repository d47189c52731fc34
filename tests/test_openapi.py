"""openapi.yaml matches the application: its routes and its responses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route

from app.api.app import build_app
from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.http.responses import ERROR_FORMATS
from tests.api.asgi import send_request
from tests.fakes import FakeGenerate
from tests.openapi_document import read_openapi
from tests.rows import rows

TRANSCRIPTS = Path(__file__).parent / "transcripts"
DOCUMENT = read_openapi()
MODEL_ERRORS = [
    kind
    for kind in ErrorKind
    if kind not in (ErrorKind.METHOD_NOT_ALLOWED, ErrorKind.NOT_FOUND, ErrorKind.MODEL_NOT_FOUND)
]
COMMENT_OR_END = (b": ", b"data: [DONE]")


def validator(schema: Any) -> Any:
    """A validator of a schema with references into the document. OpenAPI 3.1 uses draft 2020-12."""
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def schema_validator(name: str) -> Any:
    return validator({"$ref": f"#/components/schemas/{name}"})


def list_documented_routes() -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }


def list_served_routes() -> set[tuple[str, str]]:
    routes: set[tuple[str, str]] = set()
    generate = FakeGenerate()
    for route in build_app(generate, generate, Settings()).routes:
        assert isinstance(route, Route)
        assert route.methods is not None
        # HEAD comes with every GET, by the definition of HTTP.
        routes |= {(method, route.path_format) for method in route.methods - {"HEAD"}}
    return routes


def test_the_documented_routes_are_the_served_ones():
    assert list_documented_routes() == list_served_routes()


def iter_references(node: Any) -> Iterator[str]:
    match node:
        case {"$ref": str(reference)}:
            yield reference
        case dict():
            for value in node.values():
                yield from iter_references(value)
        case list():
            for value in node:
                yield from iter_references(value)
        case _:
            pass


def test_every_reference_is_valid_and_every_component_is_used():
    used = set(iter_references(DOCUMENT))
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


def test_every_schema_is_valid():
    for name in DOCUMENT["components"]["schemas"]:
        schema_validator(name)  # raises if it is invalid


def test_every_example_is_valid():
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                validator(content["schema"]).validate(content["example"])
    invalid = DOCUMENT["components"]["responses"]["Invalid"]["content"]["application/json"]
    validator(invalid["schema"]).validate(invalid["example"])


def iter_response_objects(suffix: str, answer: bytes) -> Iterator[tuple[str, Any]]:
    """The objects of a transcript of /v1/responses, each with the name of its schema."""
    if suffix == ".json":
        body = json.loads(answer)
        yield "Response" if "object" in body else "Error", body
        return
    for event in answer.removesuffix(b"\n\n").split(b"\n\n"):
        if not event.startswith(b": "):
            yield "ResponseEventData", json.loads(event.partition(b"\ndata: ")[2])


@rows("path", sorted(TRANSCRIPTS.glob("*")), ids=lambda path: path.name)
def test_every_transcript_matches_the_document(path: Path):
    schema_names = {"chat": "ChatCompletion", "completion": "Completion", "error": "Error"}
    dialect, _, kind = path.stem.partition("_")
    answer = path.read_bytes()
    if path.stem.startswith("responses"):
        for name, payload in iter_response_objects(path.suffix, answer):
            schema_validator(name).validate(payload)
        return
    match path.suffix, kind.split("_")[0]:
        case ".json", kind:
            schema_validator(schema_names[kind]).validate(json.loads(answer))
        case ".sse", kind:
            for event in answer.removesuffix(b"\n\n").split(b"\n\n"):
                if event.startswith(COMMENT_OR_END):
                    continue
                payload = json.loads(event.removeprefix(b"data: "))
                schema_validator(
                    "Error" if "error" in payload else f"{schema_names[kind]}Chunk"
                ).validate(payload)
        case _:
            assert dialect.startswith("runner")
            for line in answer.splitlines():
                schema_validator("RunnerLine").validate(json.loads(line))


def examples() -> list[tuple[str, str, Any, str]]:
    """Every operation with its own example for a body: method, path, body, content type."""
    found: list[tuple[str, str, Any, str]] = []
    for method, path in sorted(list_documented_routes()):
        operation = DOCUMENT["paths"][path][method.lower()]
        contents = operation.get("requestBody", {}).get("content", {"": {"example": None}})
        for kind, content in contents.items():
            found.append((method, path, content["example"], kind))
    return found


def with_model(body: Any) -> Any:
    """The body with the name of the served model."""
    model = FakeGenerate().list_models()[0].id
    if not isinstance(body, dict):
        return body
    # of a creation, `from` is the served one
    names = {"from", "source"} & set(body) or {"model"} & set(body)
    return {**body, **dict.fromkeys(names, model)}


# Operations on a stored response, tested in tests/api/responses/test_endpoints.py.
NEED_A_RESPONSE = "/v1/responses/{response_id}"


@rows(("method", "path", "body", "kind"), examples())
def test_responses_to_the_documented_examples_match_the_document(
    method: str, path: str, body: Any, kind: str
):
    if path.startswith(NEED_A_RESPONSE):
        pytest.skip("needs a response that is kept: see tests/api/responses/test_endpoints.py")
    if "200" not in DOCUMENT["paths"][path][method.lower()]["responses"]:
        pytest.skip("is always refused: see tests/api/responses/test_endpoints.py")
    generate = FakeGenerate()
    data = body.encode() if isinstance(body, str) else with_model(body)
    url = path.replace("{id}", generate.list_models()[0].id).replace("{name}", "app.js")
    reply = send_request(generate, method, url, data, {"content-type": kind})
    assert reply.status == 200
    contents = DOCUMENT["paths"][path][method.lower()]["responses"]["200"].get("content")
    if contents is None:
        assert reply.body == b""
        return
    content_type = reply.headers["content-type"]
    assert content_type in contents
    if content_type == "application/json":
        validator(contents[content_type]["schema"]).validate(reply.json)


@rows("kind", MODEL_ERRORS)
@rows("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/completion"])
def test_every_error_of_the_model_is_documented(path: str, kind: ErrorKind):
    generate = FakeGenerate(open_error=AppError(kind, "what", param="where"))
    operation = DOCUMENT["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["example"]
    reply = send_request(generate, "POST", path, with_model(body))
    assert reply.status == ERROR_FORMATS[kind].status
    assert str(reply.status) in operation["responses"]
    schema_validator("Error").validate(reply.json)
    responses = DOCUMENT["components"]["responses"]
    name = operation["responses"][str(reply.status)]["$ref"].rpartition("/")[2]
    assert ("retry-after" in reply.headers) == ("Retry-After" in responses[name].get("headers", {}))
