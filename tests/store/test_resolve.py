"""From a name to files, or to one line that says what is wrong with the folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, Kind
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A model folder to be broken."""
    made = tmp_path / "model"
    made.mkdir()
    for file in tiny_model.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


def complaint(name: str) -> str:
    with pytest.raises(AppError) as caught:
        store.resolve(name)
    assert caught.value.kind is Kind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_is_named_after_itself(folder: Path) -> None:
    files = store.resolve(f"{folder}/.")
    assert (files.name, files.path) == ("model", folder)
    assert (files.context_length, files.vocab_size) == (4096, tiny.VOCAB)
    assert files.shards == (folder / "model.safetensors",)
    assert files.tokenizer_config["eos_token"] == "</s>"
    assert files.generation_config == {}
    assert files.template is None
    assert files.created > 0


def test_no_name_and_builtin_are_the_model_that_ships_with_the_project() -> None:
    assert store.resolve(None) == store.resolve("builtin")
    assert store.resolve(None).name == "builtin"


def test_a_separate_template_file_is_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }} é", encoding="utf-8")
    assert store.resolve(str(folder)).template == "{{ messages }} é"


def test_shards_are_those_of_the_index(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes(b"")
    (folder / "a.safetensors").write_bytes(b"")
    index: dict[str, Any] = {
        "weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [p.name for p in store.resolve(str(folder)).shards] == ["a.safetensors", "b.safetensors"]


def test_a_shard_that_the_index_names_must_be_there_and_inside(folder: Path) -> None:
    for name in ("gone.safetensors", "../model.safetensors"):
        index = {"weight_map": {"x": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert f"lacks {name}" in complaint(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in complaint(str(folder))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json: it is not a model folder"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", "{}", "max_position_embeddings must be a positive integer"),
        ("config.json", '{"max_position_embeddings": 8}', "vocab_size must be a positive integer"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("model.safetensors", None, "has no .safetensors file"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json cannot be read"),
        ("generation_config.json", "3", "generation_config.json is not a JSON object"),
        ("chat_template.jinja", "\udcff", "chat_template.jinja cannot be read"),
    ],
)
def test_what_is_missing_or_broken_is_named(
    folder: Path, file: str, content: str | None, words: str
) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert words in complaint(str(folder))


def test_a_name_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "is not a folder" in complaint(str(tmp_path / "nowhere"))
