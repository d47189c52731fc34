"""Fields of other servers that would change a response: each is accepted at its neutral values
only. The server's table and openapi.yaml list the same fields."""

import json
from typing import Any

import jsonschema_rs
import pytest

from app.api.embeddings import parse_embeddings as parse_embeddings
from app.api.openai.request import parse_chat, parse_completion
from app.api.responses.request import parse_responses_request as parse_response
from app.api.responses.store import ResponseStores
from app.api.schema.unsupported_fields import Endpoint, list_unsupported_fields
from app.core.errors import AppError, ErrorKind
from tests.api.test_fields_table import MINIMAL
from tests.fakes import CARD
from tests.openapi_document import read_openapi
from tests.rows import rows

SCHEMAS: dict[Endpoint, str] = {
    "chat": "ChatCompletionRequest",
    "completions": "CompletionRequest",
    "responses": "ResponseRequest",
    "embeddings": "EmbeddingRequest",
}
DOCUMENT = read_openapi()
ROWS = [
    (endpoint, name, neutral)
    for endpoint in SCHEMAS
    for name, neutral in list_unsupported_fields(endpoint).items()
]

# JSON values of every type, some of them close to the neutral ones
VALUES: list[Any] = [
    *(True, False, 0, 1, -1, 2, 0.5, 1e6, "", "x", "auto", "none", "false", "1"),
    *([], [0], ["x"], [None], {}, {"a": 1}, [[]]),
]


def is_accepted(neutral: tuple[object, ...], value: Any) -> bool:
    return any(json.dumps(value) == json.dumps(one) for one in neutral)


def parse(endpoint: Endpoint, **fields: Any) -> Any:
    """The parsed request: a minimal one with these fields added."""
    body, model = {**MINIMAL[endpoint], **fields}, CARD.id
    match endpoint:
        case "chat":
            return parse_chat(json.dumps(body).encode(), model)
        case "completions":
            return parse_completion(json.dumps(body).encode(), model)
        case "responses":
            return parse_response(
                json.dumps(body).encode(),
                model,
                ResponseStores().for_caller(""),
                context_shift=False,
            ).request
        case "embeddings":
            return parse_embeddings(json.dumps(body).encode(), model)


@rows(("endpoint", "name", "neutral"), ROWS)
def test_only_neutral_values_are_accepted(
    endpoint: Endpoint, name: str, neutral: tuple[object, ...]
):
    expected = parse(endpoint)
    for value in (None, *neutral):
        assert parse(endpoint, **{name: value}) == expected
    for value in VALUES:
        if is_accepted(neutral, value):
            continue
        with pytest.raises(AppError) as caught:
            parse(endpoint, **{name: value})
        assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, name), value


@rows(("endpoint", "name", "neutral"), ROWS)
def test_openapi_accepts_the_same_values(
    endpoint: Endpoint, name: str, neutral: tuple[object, ...]
):
    schema = DOCUMENT["components"]["schemas"][SCHEMAS[endpoint]]["properties"][name]
    valid = jsonschema_rs.Draft202012Validator(schema).is_valid
    assert [value for value in [None, *neutral] if not valid(value)] == []
    assert [value for value in VALUES if valid(value) != is_accepted(neutral, value)] == []
