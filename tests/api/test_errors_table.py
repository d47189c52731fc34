"""The table of errors in docs/api.md: each row is correct, and there is no other error.

The raised errors are read from the sources: every `AppError` that names its kind. An error that is
passed on has the kind and code of the original one.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import pytest

from app.core.errors import AppError, ErrorKind
from app.http.responses import ERROR_FORMATS
from tests.api.asgi import send_request
from tests.fakes import CARD, FakeGenerate
from tests.rows import rows

ROOT = Path(__file__).parents[2]

CHAT = {"model": CARD.id, "messages": [{"role": "user", "content": "hi"}]}

# Errors with a different status than their kind's, because HTTP defines one: sent by the connection
# (tests/http/test_connection.py) and by /health (tests/api/test_status.py).
OTHER_STATUSES = {
    "request_header_fields_too_large": {431},
    "invalid_http": {400, 501, 505},
    "too_many_connections": {503},
    "engine_error": {500, 503},
}


@dataclass(frozen=True)
class Row:
    """code: None if there is none. retry_after: always, sometimes or never."""

    status: int
    code: str | None
    type: str
    retry_after: str

    def __str__(self) -> str:
        return f"{self.status}-{self.code}"


@dataclass(frozen=True)
class Raised:
    """An error as the product code creates it. waits: whether it has retry_after."""

    kind: ErrorKind
    code: str | None
    waits: bool


def read_rows() -> list[Row]:
    text = (ROOT / "docs/api.md").read_text("utf-8")
    _, _, table = text.partition("| Status | Code | Type | What happened | Retry-After |\n")
    rows: list[Row] = []
    for line in table.split("\n\n")[0].splitlines()[1:]:
        status, code, type_, _, retry_after = line.strip("| ").split(" | ")
        assert retry_after in ("always", "sometimes", "never"), line
        code_or_none = None if code == "–" else code.strip("`")
        rows.append(Row(int(status), code_or_none, type_.strip("`"), retry_after))
    return rows


def iter_raised_errors() -> Iterator[Raised]:
    trees = [ast.parse(file.read_text("utf-8")) for file in (ROOT / "app").rglob("*.py")]
    constants = {name: value for tree in trees for name, value in iter_assignments(tree.body)}
    for tree in trees:
        # a name has the value assigned in its own file, else that of a constant of another file
        names = {**constants, **dict(iter_assignments(ast.walk(tree)))}
        for call in ast.walk(tree):
            match call:
                case ast.Call(func=ast.Name(id="AppError"), args=[ast.Attribute(attr=kind), *_]):
                    if kind not in ErrorKind.__members__:
                        continue
                    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
                    for code in possible_codes(arguments.get("code"), names) or [
                        ERROR_FORMATS[ErrorKind[kind]].code
                    ]:
                        yield Raised(ErrorKind[kind], code, "retry_after" in arguments)


def iter_assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value


def possible_codes(value: ast.expr | None, names: Mapping[str, ast.expr]) -> list[str]:
    """The strings that an expression may evaluate to."""
    match value:
        case None:
            return []
        case ast.Name(id=name):
            return possible_codes(names[name], names)
        case ast.IfExp(body=one, orelse=other):
            return [*possible_codes(one, names), *possible_codes(other, names)]
        case ast.Constant(value=str(text)):
            return [text]
        case _:
            raise AssertionError(f"cannot tell the possible codes of {ast.unparse(value)}")


ROWS = read_rows()


@pytest.fixture(scope="module")
def raised_errors() -> frozenset[Raised]:
    return frozenset(iter_raised_errors())


def test_the_table_lists_exactly_the_raised_errors(raised_errors: frozenset[Raised]):
    expected = {
        (status, one.code)
        for one in raised_errors
        for status in OTHER_STATUSES.get(one.code or "", {ERROR_FORMATS[one.kind].status})
    }
    assert {(row.status, row.code) for row in ROWS} == expected


@rows("row", ROWS, ids=str)
def test_a_client_gets_the_error_of_the_row(row: Row, raised_errors: frozenset[Raised]):
    HTTPStatus(row.status)
    for one in (one for one in raised_errors if one.code == row.code):
        assert row.type == ERROR_FORMATS[one.kind].type
        if row.retry_after == "never" and row.status == ERROR_FORMATS[one.kind].status:
            assert not one.waits
        for wait in (None, 7) if row.retry_after == "sometimes" else (None,):
            error = AppError(one.kind, "what", code=one.code, retry_after=wait)
            reply = send_request(
                FakeGenerate(open_error=error), "POST", "/v1/chat/completions", CHAT
            )
            assert reply.error["code"] == row.code
            if row.code not in OTHER_STATUSES:
                assert reply.status == row.status
            waits = row.retry_after == "always" or wait is not None
            assert ("retry-after" in reply.headers) == waits
            assert ("x-should-retry" in reply.headers) == (row.status == 504)
