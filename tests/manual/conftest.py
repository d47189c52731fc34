"""The hub, the models and the server that the blocks of the manual use."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.clients.conftest import clients_python, node
from tests.server_process import ServerProcess, run_server
from tests.store.stand_in import StandIn

__all__ = ["clients_python", "node"]

# The names of models on the hub, and in Ollama's library, that the manual uses.
HUB_MODELS = ("mlx-community/Qwen3-4B-4bit", "org/model", "some-org/a-large-model")

# The folders with models in the home of a reader.
HOME_MODELS = ("models/some-llama", "models/llama", "models/some-coder")

# Coding agents need a long context, and --quantize needs widths that are multiples of 64.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 65_536,
}


@pytest.fixture(scope="session")
def manual_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manual") / "model"
    return tiny.write(folder, **SIZES)


@pytest.fixture(scope="session")
def manual_hub(manual_model: Path) -> Iterator[StandIn]:
    hub = StandIn()
    for name in HUB_MODELS:
        hub.add(name, manual_model)
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def hub_cache(
    tmp_path_factory: pytest.TempPathFactory, manual_hub: StandIn, manual_model: Path
) -> Path:
    """The Hugging Face cache of a reader who has pulled the models of the hub."""
    cache = tmp_path_factory.mktemp("cache") / "hub"
    for name, repository in manual_hub.repositories.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        commit = repository.refs["main"]
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text(commit, "utf-8")
        shutil.copytree(manual_model, folder / "snapshots" / commit)
    return cache


@pytest.fixture(scope="session")
def manual_server(
    tmp_path_factory: pytest.TempPathFactory, hub_cache: Path
) -> Iterator[ServerProcess]:
    """The server that a block finds at 127.0.0.1:8080: with the built-in model, and with others,
    which are loaded by the first request."""
    home = tmp_path_factory.mktemp("home")
    models = ("builtin", *HUB_MODELS[:2])
    environment = {"HOME": str(home), "HF_HUB_CACHE": str(hub_cache)}
    with run_server(*models, "--max-tokens", "50", environ=environment) as server:
        yield server


@pytest.fixture(scope="session")
def memo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of one run share (READER_MEMO)."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "memo"
    folder.mkdir(exist_ok=True)
    return folder
