"""Ollama's names of models and their repositories on the hub."""

import pytest

from app.store.library_names import find_equivalent, list_library, suggest_names
from app.store.model_names import HubName, parse_hub_name
from tests.rows import rows


@rows(
    ("name", "repository"),
    [
        ("qwen3:4b", "Qwen3-4B-4bit"),
        ("QWEN3:4B", "Qwen3-4B-4bit"),
        ("qwen3", "Qwen3-8B-4bit"),
        ("qwen3:latest", "Qwen3-8B-4bit"),
        ("library/qwen3:4b", "Qwen3-4B-4bit"),
        ("qwen3:4b-q4_K_M", "Qwen3-4B-4bit"),
        ("qwen3:4b-q8_0", "Qwen3-4B-8bit"),
        ("qwen3:4b-fp16", "Qwen3-4B-bf16"),
        ("qwen3:4b-instruct-2507-q8_0", "Qwen3-4B-Instruct-2507-8bit"),
        ("llama3.1:8b-instruct-q4_K_M", "Meta-Llama-3.1-8B-Instruct-4bit"),
        ("gemma3:4b-it-fp16", "gemma-3-4b-it-bf16"),
        ("gpt-oss:20b", "gpt-oss-20b-MXFP4-Q8"),
    ],
)
def test_a_name_has_an_equivalent(name: str, repository: str):
    assert find_equivalent(name) == HubName(repo_id=f"mlx-community/{repository}")


@rows(
    "name",
    [
        *("qwen3:5b", "qwen3:4b-q2_K", "gpt-oss:20b-q8_0", "someone/qwen3:4b", "org/name"),
        *("example.com/library/qwen3:4b", "builtin", "tiny", "", "a/b/c/d"),
    ],
)
def test_any_other_name_has_none(name: str):
    assert find_equivalent(name) is None


def test_every_row_is_the_name_of_a_repository():
    library = list_library()
    assert len(library) > 70
    assert all(parse_hub_name(str(name)) == name for name in library.values())


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("qwn3:4b", "qwen3:4b"), ("gema3", "gemma3"), ("llama3.2:4b", "llama3.2:3b")],
)
def test_the_most_similar_names_are_suggested(name: str, suggested: str):
    assert suggest_names(name)[0] == suggested


def test_a_name_like_none_of_the_table_has_no_suggestion():
    assert suggest_names("xyzzy:1b") == []
