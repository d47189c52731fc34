"""Fields of other servers: each is accepted at its neutral values only. The server's table,
docs/api.md and openapi.yaml list the same fields."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from app.api.embeddings import parse_embeddings as parse_embeddings
from app.api.openai.compat_fields import COMPAT_FIELDS, CompatField, Endpoint
from app.api.openai.request import parse_chat, parse_completion
from app.api.responses.request import parse_responses_request as parse_response
from app.api.responses.store import ResponseStores
from app.core.errors import AppError, ErrorKind
from tests.api.test_fields_table import MINIMAL
from tests.fakes import CARD
from tests.openapi_document import read_openapi
from tests.rows import rows

ROOT = Path(__file__).parents[3]
SCHEMAS = {
    "chat": "ChatCompletionRequest",
    "completions": "CompletionRequest",
    "responses": "ResponseRequest",
    "embeddings": "EmbeddingRequest",
}
DOCUMENT = read_openapi()
ROWS = [(row, endpoint) for row in COMPAT_FIELDS for endpoint in row.endpoints]

# JSON values of every type, some of them close to the neutral ones
VALUES: list[Any] = [
    *(True, False, 0, 1, -1, 2, 0.5, 1e6, "", "x", "auto", "none", "false", "1"),
    *([], [0], ["x"], [None], {}, {"a": 1}, [[]]),
]
OF_KIND: dict[str, list[Any]] = {
    "number": [0, 1, -1, 0.25, 5.0, 1e300],
    "text": ["", "x", "left"],
    "texts": ["", "x", [], ["\n", "*"]],
    "boolean": [True, False],
    "object": [{}, {"a": 1}],
}


def row_id(row: tuple[CompatField, Endpoint]) -> str:
    return f"{row[1]}-{row[0].name}"


def accepted_values(row: CompatField) -> list[Any]:
    return [*row.neutral, *OF_KIND.get(row.any_type or "", ())]


def is_accepted(row: CompatField, value: Any) -> bool:
    match row.any_type:
        case None:
            return any(json.dumps(value) == json.dumps(neutral) for neutral in row.neutral)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "text":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "texts":
            texts: list[Any] = value if isinstance(value, list) else [value]
            return all(isinstance(text, str) for text in texts)


def parse(endpoint: Endpoint, **fields: Any) -> Any:
    """The parsed request: a minimal one with these fields added."""
    body, model = {**MINIMAL[endpoint], **fields}, CARD.id
    match endpoint:
        case "chat":
            return parse_chat(body, model)
        case "completions":
            return parse_completion(body, model)
        case "responses":
            return parse_response(
                body, model, ResponseStores().for_caller(""), context_shift=False
            ).request
        case "embeddings":
            return parse_embeddings(body, model)


@rows("pair", ROWS, ids=row_id)
def test_neutral_values_are_accepted(pair: tuple[CompatField, Endpoint]):
    row, endpoint = pair
    expected = parse(endpoint)
    for value in accepted_values(row):
        assert parse(endpoint, **{row.name: value}) == expected


@rows("pair", ROWS, ids=row_id)
def test_other_values_are_rejected_and_the_field_is_named(pair: tuple[CompatField, Endpoint]):
    row, endpoint = pair
    others = [value for value in VALUES if not is_accepted(row, value)]
    assert len(others) >= len(VALUES) - 8
    for value in others:
        with pytest.raises(AppError) as caught:
            parse(endpoint, **{row.name: value})
        found = (caught.value.kind, caught.value.param)
        assert found == (ErrorKind.INVALID, row.name), value


@rows("pair", ROWS, ids=row_id)
def test_openapi_accepts_the_same_values(pair: tuple[CompatField, Endpoint]):
    row, endpoint = pair
    schema = DOCUMENT["components"]["schemas"][SCHEMAS[endpoint]]["properties"][row.name]
    valid = jsonschema_rs.Draft202012Validator(schema).is_valid
    assert [value for value in [None, *accepted_values(row)] if not valid(value)] == []
    assert [value for value in VALUES if valid(value) != is_accepted(row, value)] == []


def test_no_field_is_in_the_table_twice():
    assert len({(row.name, endpoint) for row, endpoint in ROWS}) == len(ROWS)


def read_documented_table() -> list[tuple[str, str, str, str]]:
    """The table in docs/api.md: field, endpoints, accepted values, the servers that have it."""
    page = (ROOT / "docs/api.md").read_text("utf-8")
    _, _, rest = page.partition("\n## Fields of other servers\n")
    section, _, _ = rest.partition("\n## ")
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    table: list[tuple[str, str, str, str]] = []
    for field, endpoints, behavior, example in lines:
        # a colon within backticks is a part of the accepted value
        parts = re.fullmatch(r"\*\*accepted\*\* as ((?:`[^`]*`|[^`:])+): (.+)", behavior)
        assert parts, behavior
        accepted_as, reason = parts.groups()
        assert set(json.loads(example.strip("`"))) == {field.strip("`")}
        table.append(
            (field.strip("`"), endpoints, accepted_as, reason.rpartition("(")[2].rstrip(")"))
        )
    return table


def test_the_document_has_the_same_table():
    kinds = {
        "number": "a number",
        "boolean": "true or false",
        "text": "a string",
        "texts": "a string or a list of strings",
        "object": "an object",
    }
    assert read_documented_table() == [
        (
            row.name,
            ", ".join(row.endpoints),
            kinds[row.any_type]
            if row.any_type
            else " or ".join(f"`{json.dumps(v)}`" for v in row.neutral),
            ", ".join(row.servers),
        )
        for row in COMPAT_FIELDS
    ]
