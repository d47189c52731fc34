"""The list of models in Anthropic's format."""

from dataclasses import replace
from typing import Any

import pytest

from tests.api.asgi import send_request
from tests.fakes import CARD, FakeGenerate
from tests.test_openapi import schema_validator

CARDS = [replace(CARD, id=f"org/model-{n}") for n in range(5)]
VERSION = {"anthropic-version": "2026-10-21"}


def list_model_ids(query: str = "", status: int = 200) -> Any:
    reply = send_request(FakeGenerate(cards=CARDS), "GET", f"/v1/models?{query}", headers=VERSION)
    assert reply.status == status
    return reply.json


def ids(query: str) -> list[int]:
    return [int(one["id"][-1]) for one in list_model_ids(query)["data"]]


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "2099-01-01"])
def test_the_header_selects_the_format(version: str):
    generate = FakeGenerate(cards=CARDS)
    theirs = send_request(
        generate, "GET", "/v1/models", headers={"anthropic-version": version}
    ).json
    schema_validator("AnthropicModelList").validate(theirs)
    assert theirs["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert (theirs["first_id"], theirs["last_id"]) == ("org/model-0", "org/model-4")
    assert send_request(generate, "GET", "/v1/models").json["object"] == "list"
    assert generate.rescans == 2


def test_one_model_is_described():
    reply = send_request(
        FakeGenerate(cards=CARDS), "GET", "/v1/models/org/model-1", headers=VERSION
    )
    schema_validator("AnthropicModel").validate(reply.json)
    assert reply.json["id"] == "org/model-1"


def test_an_unknown_model_is_an_error_of_this_dialect():
    reply = send_request(FakeGenerate(), "GET", "/v1/models/claude-x", headers=VERSION)
    assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")


def test_a_model_is_loaded_in_the_same_way_with_the_header():
    reply = send_request(FakeGenerate(), "POST", "/v1/models/load", {"model": CARD.id}, VERSION)
    assert reply.status == 200


@pytest.mark.parametrize(
    ("query", "expected", "more"),
    [
        ("", [0, 1, 2, 3, 4], False),
        ("limit=2", [0, 1], True),
        ("limit=1000", [0, 1, 2, 3, 4], False),
        ("after_id=org/model-1", [2, 3, 4], False),
        ("after_id=org/model-1&limit=2", [2, 3], True),
        ("before_id=org/model-3&limit=2", [1, 2], True),
        ("before_id=org/model-2&limit=2", [0, 1], False),
        ("after_id=org/model-0&before_id=org/model-3", [1, 2], False),
        ("before_id=org/model-0", [], False),
    ],
)
def test_pages_are_selected_by_ids(query: str, expected: list[int], more: bool):
    assert ids(query) == expected
    assert list_model_ids(query)["has_more"] is more


def test_an_empty_page_has_no_ids():
    page = list_model_ids("after_id=org/model-4")
    assert (page["first_id"], page["last_id"]) == (None, None)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after_id=x", "before_id=x"])
def test_an_invalid_query_is_rejected(query: str):
    assert list_model_ids(query, 400)["error"]["message"].startswith(query.partition("=")[0])
