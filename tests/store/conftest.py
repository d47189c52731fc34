"""A hub and a cache of a test's own, and no folder of the person who runs the tests."""

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
    """huggingface_hub reads the environment when it is imported, which another test may have
    caused: its constants are what counts."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    # what of a body is written at once, and so is lost when it breaks off: less than 10 MB here
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1_000)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _point_to(monkeypatch, "http://127.0.0.1:9")  # nobody listens


@pytest.fixture
def hub(nowhere_else: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    _point_to(monkeypatch, made.endpoint)
    yield made
    made.close()


@pytest.fixture
def remote(tmp_path: Path, tiny_model: Path) -> Path:
    """What lies on the hub: a model, and much that no model needs."""
    made = tmp_path / "remote"
    shutil.copytree(tiny_model, made)
    for name in ("README.md", "pytorch_model.bin", "q4.gguf", "model.onnx", "train.py", "a.png"):
        (made / name).write_bytes(b"not needed" * 500)
    (made / "original").mkdir()
    (made / "original" / "consolidated.safetensors").write_bytes(b"another cut" * 500)
    return made


@pytest.fixture
def commit(hub: StandIn, remote: Path) -> str:
    return hub.add(NAME.repo_id, remote)


@pytest.fixture
def ollama(tmp_path: Path) -> OllamaStore:
    return OllamaStore(tmp_path / "ollama")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folder(tmp_path_factory.mktemp("models") / "folder")


@pytest.fixture
def layers(ollama: OllamaStore, packed: Path) -> list[dict[str, Any]]:
    return ollama.model(packed)


def _point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
