"""Parsing of model names."""

from pathlib import Path

import pytest

from app.core.errors import AppError, ErrorKind
from app.store.model_names import (
    HubName,
    OllamaName,
    parse_hub_name,
    parse_model_name,
    parse_ollama_name,
)
from tests.rows import rows


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/7", "org/name", "refs/pr/7"),
        ("org/name_1.5@" + "a" * 40, "org/name_1.5", "a" * 40),
    ],
)
def test_a_hub_id_has_an_organisation_and_perhaps_a_revision(
    text: str, repo: str, revision: str | None
) -> None:
    assert parse_hub_name(text) == HubName(repo_id=repo, revision=revision)
    assert str(parse_hub_name(text)) == text


@rows(
    ("text", "shown"),
    [
        ("org/name/4bit", "org/name/4bit"),
        ("org/name/8bit@main", "org/name/8bit@main"),
        ("org/name/mxfp4", "org/name/mxfp4"),
        ("org/name/bf16", "org/name/bf16"),
        ("hf.co/org/name", "org/name"),
        ("huggingface.co/org/name/6bit", "org/name/6bit"),
    ],
)
def test_a_folder_of_a_repository_and_the_address_of_the_hub_are_recognized(
    text: str, shown: str
) -> None:
    name = parse_model_name(text).hub
    assert name is not None
    assert str(name) == shown
    assert parse_hub_name(shown) == name


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name", ("registry.ollama.ai", "library", "name", "latest")),
        ("name:4b", ("registry.ollama.ai", "library", "name", "4b")),
        ("me/name", ("registry.ollama.ai", "me", "name", "latest")),
        ("example.org/me/name:q4", ("example.org", "me", "name", "q4")),
        ("localhost:5000/me/name", ("localhost:5000", "me", "name", "latest")),
        ("localhost:5000/me/name:q4_K_M", ("localhost:5000", "me", "name", "q4_K_M")),
    ],
)
def test_an_ollama_name_is_completed(text: str, parts: tuple[str, str, str, str]) -> None:
    host, namespace, model, tag = parts
    found = OllamaName(host=host, namespace=namespace, model=model, tag=tag)
    assert parse_ollama_name(text) == found
    assert str(found) == text


INVALID_NAMES = [
    "../name",
    "org/..",
    "../../etc/passwd",
    "org/../name",
    "org//name",
    "/org/name",
    "org/name/",
    "org/name/4bit/",
    "org/name/4bit/8bit",
    "org/na me",
    "org/name\n",
    "org/ñame",
    "org/-name",
    "org\\name",
    "org/.name",
    "org/name@",
    "org/name@../main",
    "org/name@a/.git",
    "org/name:..",
    "name:",
    ":tag",
    "name:a/b",
    "a/b/c/d",
    "ex ample.org/me/name",
    "-host/me/name",
    "x" * 300,
]


@rows("text", INVALID_NAMES)
def test_no_name_leads_out_of_a_store(text: str) -> None:
    """Names such as org/-name are invalid on the hub and in Ollama."""
    assert parse_hub_name(text) is None
    assert parse_ollama_name(text) is None


@pytest.mark.parametrize("text", ["/a/model", "./model", "../model", "~/model", ".", "..", "/"])
def test_a_path_is_a_folder_and_nothing_else(text: str) -> None:
    name = parse_model_name(text)
    assert name.folder == Path(text).expanduser()
    assert (name.hub, name.ollama) == (None, None)


def test_an_ambiguous_name_is_a_candidate_for_each_source() -> None:
    name = parse_model_name("org/name")
    assert name.folder == Path("org/name")
    assert name.hub == HubName(repo_id="org/name")
    assert name.ollama == parse_ollama_name("org/name")
    assert parse_model_name("org/name@main").ollama is None
    assert parse_model_name("org/name:tag").hub is None
    assert parse_model_name("name").hub is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not the name of a model"),
        (" ", "is not the name of a model"),
        ("a\0b", "is not the name of a model"),
        ("https://huggingface.co/org/name", "use only the name, such as org/name"),
        ("org/../name", "nor a valid model name"),
        ("~nobody-of-this-name/model", "is not a folder"),
    ],
)
def test_an_invalid_name_is_a_one_line_error(text: str, message: str) -> None:
    with pytest.raises(AppError) as caught:
        parse_model_name(text)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_folder_with_an_odd_name_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model!").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_model_name("my model!").folder == Path("my model!")
