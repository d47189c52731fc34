"""Prompts of completions."""

import json
from typing import Any

import pytest

from app.api.openai.request import parse_completion
from app.core.errors import AppError, ErrorKind
from app.core.requests import PromptBatch
from tests.rows import rows


def read(**body: Any) -> tuple[Any, int]:
    request = parse_completion(json.dumps(body).encode(), "m").request
    return request.prompt, request.n


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", "hi"),
        ("", ""),
        (["hi"], "hi"),
        ([5, 6.0], (5, 6)),
        ([[5, 6]], (5, 6)),
        (["a", "b", "a"], PromptBatch(prompts=("a", "b", "a"))),
        ([[1], [2, 3]], PromptBatch(prompts=((1,), (2, 3)))),
        (["a", [2, 3]], PromptBatch(prompts=("a", (2, 3)))),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_them(prompt: Any, expected: Any):
    assert read(prompt=prompt) == (expected, 1)


def test_n_may_be_as_large_as_openai_allows():
    assert read(prompt="a", n=128)[1] == 128
    assert len(read(prompt=["a"] * 128)[0].prompts) == 128
    assert read(prompt=["a", "b"], n=64)[1] == 64


@rows(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": ["a", []]}, "prompt.1"),
        ({"prompt": ["a", 5]}, "prompt.1"),
        ({"prompt": ["a", None]}, "prompt.1"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [None]}, "prompt.0"),
        ({"prompt": [2**31]}, "prompt.0"),
        ({"prompt": [[0.5]]}, "prompt.0.0"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", "b"], "n": 65}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
    ],
)
def test_an_invalid_prompt_is_named(body: Any, param: str):
    with pytest.raises(AppError) as caught:
        read(**body)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
