"""A hub and a cache for each test, isolated from the folders of the user."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.store.asking import NAME
from tests.store.ollama_store import OllamaStore, packed_folder
from tests.store.stand_in import StandIn


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets constants of huggingface_hub: it reads the environment only when it is imported, which
    may have happened in another test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    # the size of one write, and so of the loss when a connection breaks; the default is 10 MB
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1_000)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _point_to(monkeypatch, "http://127.0.0.1:9")  # no server listens


@pytest.fixture
def hub(nowhere_else: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    _point_to(monkeypatch, stand_in.endpoint)
    yield stand_in
    stand_in.close()


@pytest.fixture
def remote(tmp_path: Path, tiny_model: Path) -> Path:
    """The files on the hub: a model, and many files that a model does not need."""
    folder = tmp_path / "remote"
    shutil.copytree(tiny_model, folder)
    for name in ("README.md", "pytorch_model.bin", "q4.gguf", "model.onnx", "train.py", "a.png"):
        (folder / name).write_bytes(b"not needed" * 500)
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"another cut" * 500)
    return folder


@pytest.fixture
def commit(hub: StandIn, remote: Path) -> str:
    return hub.add(NAME.repo_id, remote)


@pytest.fixture
def ollama(tmp_path: Path) -> OllamaStore:
    return OllamaStore(tmp_path / "ollama")


@pytest.fixture(scope="session")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folder(tmp_path_factory.mktemp("models") / "folder")


@pytest.fixture
def layers(ollama: OllamaStore, packed_model: Path) -> list[dict[str, Any]]:
    return ollama.model(packed_model)


def _point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
