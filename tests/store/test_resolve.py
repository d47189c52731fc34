"""Resolving a name: the order of the sources, and the errors if no source has the model."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from app import store
from app.core.errors import AppError, ErrorKind
from app.store.hub import cache
from app.store.hub.download import download
from app.store.hub.download_plan import plan_download
from app.store.model_names import HubName, ModelNotFoundError
from tests import tiny
from tests.store.ollama_store import OllamaStore, packed_folder
from tests.store.stand_in import StandIn


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    return path


@pytest.fixture
def everywhere(hub: StandIn, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """org/tiny as a folder, in the Hugging Face cache and in Ollama's store."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "org" / "tiny")
    hub.add("org/tiny", folder)
    download(plan_download(HubName(repo_id="org/tiny")))
    ollama = OllamaStore(tmp_path / "ollama")
    ollama.write("org/tiny", ollama.model(packed_folder(tmp_path / "packed")))
    return tmp_path


def resolve_missing(name: str) -> ModelNotFoundError:
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve(name)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND
    assert "\n" not in caught.value.message
    return caught.value


def test_a_model_in_a_folder_has_the_name_of_the_folder(folder: Path) -> None:
    files = store.resolve(f"{folder}/.")
    assert (files.name, files.path) == ("model", folder)
    assert (files.context_length, files.vocab_size) == (4096, tiny.VOCAB)
    assert files.shards == (folder / "model.safetensors",)


def test_no_name_and_builtin_resolve_to_the_builtin_model() -> None:
    assert store.resolve(None) == store.resolve("builtin")
    assert store.resolve(None).name == "builtin"


def test_the_sources_are_searched_in_order(everywhere: Path) -> None:
    local = everywhere / "org" / "tiny"
    assert store.resolve("org/tiny").path == Path("org/tiny")
    (local / "config.json").unlink()  # no longer a model folder
    assert store.resolve("org/tiny").path.parent.name == "snapshots"
    shutil.rmtree(cache.cache_folder())
    assert store.resolve("org/tiny").path.parts[-3:] == ("org", "tiny", "latest")


def test_a_model_in_two_sources_is_listed_twice(everywhere: Path) -> None:
    found = [(entry.name, entry.source, entry.read().path) for entry in store.list_installed()]
    assert [(name, source) for name, source, _ in found] == [
        ("builtin", "built in"),
        ("org/tiny", "hub"),
        ("org/tiny", "ollama"),
    ]
    assert len({path for *_, path in found}) == 3


def test_the_error_for_a_folder_without_a_model_names_the_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    with pytest.raises(AppError) as caught:
        store.resolve("notes")
    assert caught.value.message == "notes has no config.json: it is not a model folder"


def test_a_folder_without_a_model_does_not_hide_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    error = resolve_missing("org/name")
    assert "the folder with this name contains no model" in error.message
    assert error.hub is not None


def test_a_missing_path_is_not_searched_in_other_sources(tmp_path: Path) -> None:
    message = resolve_missing(str(tmp_path / "org" / "name")).message
    assert message.endswith("is neither a folder nor a GGUF file: check the path")


def test_the_error_for_a_missing_hub_id_names_the_searched_sources_and_the_remedy() -> None:
    error = resolve_missing("org/name")
    assert error.hub == HubName(repo_id="org/name")
    for part in (
        "no such folder",
        f"not in the Hugging Face cache ({cache.cache_folder()})",
        "not in Ollama's store",
        "run `mlxrunner pull org/name` to download it",
    ):
        assert part in error.message


def test_a_missing_ollama_name_is_not_searched_on_the_hub() -> None:
    error = resolve_missing("mine:4b")
    assert error.hub is None
    assert "Hugging Face" not in error.message
    assert "download one with `mlxrunner pull org/name` or `ollama pull`" in error.message
    assert "did you mean" not in error.message


def test_resolving_makes_no_network_requests(hub: StandIn) -> None:
    resolve_missing("org/name")
    resolve_missing("org/name@main")
    list(store.list_installed())
    assert hub.requests == []


def test_an_unreadable_path_is_a_one_line_error() -> None:
    with pytest.raises(AppError) as caught:  # too long for any file system
        store.find("/" + "a" * 300)
    assert caught.value.message.startswith("/aaa")
    assert "\n" not in caught.value.message


def test_an_unreadable_repository_is_listed_beside_the_others(
    everywhere: Path,
) -> None:
    closed = cache.repo_folder("org/closed")
    closed.mkdir()
    (closed / "snapshots").symlink_to("a" * 300)  # unreadable, like a folder of another user
    entries = {entry.name: entry for entry in store.list_installed() if entry.source == "hub"}
    assert sorted(entries) == ["org/closed", "org/tiny"]
    assert entries["org/tiny"].read().name == "org/tiny"
    with pytest.raises(AppError) as caught:
        entries["org/closed"].read()
    assert f"{closed / 'snapshots'} cannot be read: " in caught.value.message


def test_an_unreadable_cache_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / ("a" * 300)))
    with pytest.raises(AppError, match="cannot be read: "):
        list(store.list_installed())


def test_the_error_for_a_mistyped_name_suggests_an_installed_model(everywhere: Path) -> None:
    assert resolve_missing("bultin").message.endswith("; did you mean builtin?")
    assert resolve_missing("org/tini").message.endswith("; did you mean org/tiny?")
    assert "did you mean" not in resolve_missing("someone/else").message
