"""POST /v1/rerank: requests and responses in the formats of Jina, Cohere and llama.cpp."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from app.api.rerank import PATHS, parse_ranking, render_ranking
from app.core.errors import AppError, ErrorKind
from app.core.requests import Embeddings, EmbedInput
from tests.api.asgi import Reply
from tests.fakes import CARD

Call = Callable[..., Reply]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": CARD.id, "query": "why", "documents": ["a", "b", "c"], **fields}


def scores(*values: float) -> Embeddings:
    return Embeddings(vectors=tuple(struct.pack("<f", v) for v in values), prompt_tokens=9)


@pytest.mark.parametrize("name", ["documents", "texts"])
def test_documents_are_texts_or_objects(name: str) -> None:
    given = {"query": "why", name: ["a", {"text": "b", "title": "B"}]}
    request = parse_ranking(json.dumps(given).encode(), CARD.id).request
    assert request.query == "why"
    assert request.inputs == (
        EmbedInput(content="a", param=f"{name}.0"),
        EmbedInput(content="b", param=f"{name}.1"),
    )


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"query": None}, "query", "query"),
        ({"query": ""}, "query", "must not be empty"),
        ({"documents": None}, "documents", "a list of texts"),
        ({"documents": []}, "documents", "a list of texts"),
        ({"documents": "a"}, "documents", "an array"),
        ({"documents": ["a", ""]}, "documents.1", "must be a string"),
        ({"documents": ["a", 3]}, "documents.1", "must be a string"),
        ({"documents": [{"title": "a"}]}, "documents.0.text", "text"),
        ({"documents": ["a"] * 1001}, "documents", "at most 1000"),
        ({"top_n": 0}, "top_n", "top_n"),
        ({"return_documents": "yes"}, "return_documents", "return_documents"),
    ],
)
def test_an_invalid_field_is_named(changes: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(AppError, match=message) as caught:
        parse_ranking(json.dumps(body(**changes)).encode(), CARD.id)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


def test_the_best_documents_come_first_and_equal_ones_keep_their_order() -> None:
    parsed = parse_ranking(json.dumps(body(top_n=2, return_documents=True)).encode(), CARD.id)
    rendered = render_ranking(parsed, scores(0.25, 0.5, 0.5))
    assert rendered["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    assert rendered["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_without_top_n_all_documents_are_returned_without_their_texts() -> None:
    rendered = render_ranking(
        parse_ranking(json.dumps(body()).encode(), CARD.id), scores(0.25, 0.5, 0.125)
    )
    assert rendered["results"] == [
        {"index": 1, "relevance_score": 0.5},
        {"index": 0, "relevance_score": 0.25},
        {"index": 2, "relevance_score": 0.125},
    ]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_answers(path: str, call: Call) -> None:
    reply = call("POST", path, body(documents=["b", "abc", "ab"]))
    assert reply.status == 200
    assert [result["index"] for result in reply.json["results"]] == [1, 2, 0]
