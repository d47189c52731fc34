"""`mlxrunner rm` and `mlxrunner cp`."""

import shutil
from pathlib import Path

import pytest

from app import cli, store
from app.commands.pull import pull
from app.core.errors import AppError
from app.store.hub import cache
from app.store.installed import find_removable
from app.store.model_names import ModelNotFoundError
from tests.commands.thread_server import run_thread_server
from tests.store.ollama_store import OllamaStore
from tests.store.stand_in import StandIn

# a port on which no server listens
NOWHERE = ("--port", "9")


@pytest.fixture
def installed(hub: StandIn, tiny_model: Path, packed_model: Path, tmp_path: Path) -> Path:
    """A model in each store, and a folder."""
    hub.add("org/tiny", tiny_model)
    pull("org/tiny", None)
    ollama = OllamaStore(tmp_path / "ollama")
    ollama.write("tiny:4b", ollama.model(packed_model))
    shutil.copytree(packed_model, tmp_path / "packed")
    return tmp_path


def is_installed(name: str) -> bool:
    try:
        store.find(name)
    except ModelNotFoundError:
        return False
    return True


@pytest.mark.parametrize("name", ["org/tiny", "tiny:4b"])
def test_a_model_is_deleted(name: str, installed: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert is_installed(name)
    assert cli.main(["rm", name, *NOWHERE]) == 0
    assert capsys.readouterr().out == f"{name} is deleted\n"
    assert not is_installed(name)


def test_the_equivalent_of_a_library_name_is_deleted(
    hub: StandIn, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    hub.add("mlx-community/Qwen3-4B-4bit", tiny_model)
    pull("qwen3:4b", None)
    capsys.readouterr()
    assert cli.main(["rm", "qwen3:4b", *NOWHERE]) == 0
    assert capsys.readouterr().out == "mlx-community/Qwen3-4B-4bit is deleted\n"
    assert not is_installed("qwen3:4b")


def test_an_incomplete_download_can_be_deleted(
    hub: StandIn, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    hub.add("org/tiny", tiny_model)
    hub.faults.status["model.safetensors"] = 500
    with pytest.raises(Exception, match="500"):
        pull("org/tiny", None)
    assert cli.main(["rm", "org/tiny", *NOWHERE]) == 0
    with pytest.raises(ModelNotFoundError, match="was not found"):
        store.find("org/tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtin", "builtin is part of mlxrunner: it cannot be deleted"),
        ("{folder}/packed", "is a folder and not in a store: delete the folder itself"),
        (
            "org/tiny@main",
            "org/tiny@main is one revision: delete org/tiny, with all of them",
        ),
        ("org/other", "model org/other is not installed: run `mlxrunner list`"),
    ],
)
def test_a_model_that_cannot_be_deleted_is_refused_before_any_is(
    installed: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    assert cli.main(["rm", "tiny:4b", name.format(folder=installed), *NOWHERE]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert is_installed("tiny:4b")


@pytest.mark.parametrize(
    ("name", "owner"),
    [("tiny-Q4_0", "LM Studio"), ("org/mlx", "LM Studio"), ("org_tiny-Q8_0", "llama.cpp")],
)
def test_a_model_of_another_program_is_not_deleted(
    name: str, owner: str, hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was said not to be installed, although `list` shows it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    studio = tmp_path / ".lmstudio/models/org"
    files = [studio / "tiny-GGUF/tiny-Q4_0.gguf", studio / "mlx/config.json"]
    for path in (*files, tmp_path / "llama/org_tiny-Q8_0.gguf"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    with pytest.raises(AppError, match=f"{name} belongs to {owner}: delete it there, or .*/"):
        find_removable(name)


def test_a_folder_that_cannot_be_deleted_is_one_line(
    installed: Path, capsys: pytest.CaptureFixture[str]
):
    """A link in the cache means that another program has chosen the model's location."""
    folder = cache.repo_folder("org/tiny")
    folder.rename(installed / "elsewhere")
    folder.symlink_to(installed / "elsewhere")
    capsys.readouterr()
    assert cli.main(["rm", "org/tiny", *NOWHERE]) == 1
    assert capsys.readouterr().err == f"mlxrunner: org/tiny cannot be deleted: {folder}\n"
    assert is_installed("org/tiny")


def test_a_loaded_model_is_deleted_only_by_force(
    installed: Path, capsys: pytest.CaptureFixture[str]
):
    with run_thread_server("org/tiny") as server:
        port = server.arguments
        capsys.readouterr()
        assert cli.main(["rm", "org/tiny", *port]) == 1
        assert capsys.readouterr().err == (
            f"mlxrunner: the server at {server.url} has loaded org/tiny: run `mlxrunner stop "
            "org/tiny` first, or delete it with --force\n"
        )
        assert is_installed("org/tiny")
        assert cli.main(["stop", "org/tiny", *port]) == 0
        assert cli.main(["rm", "org/tiny", *port]) == 0
        assert not is_installed("org/tiny")


def test_force_deletes_a_loaded_model(installed: Path):
    with run_thread_server("org/tiny", environ={"MLXRUNNER_API_KEY": "mr-" + "a" * 32}) as server:
        port = server.arguments
        assert cli.main(["rm", "org/tiny", *port]) == 1  # without a key, the list is not visible
        assert cli.main(["rm", "--force", "org/tiny", *port]) == 0
        assert not is_installed("org/tiny")


@pytest.mark.parametrize("source", ["org/tiny", "tiny:4b", "{folder}/packed"])
def test_a_copy_has_the_same_weights(
    installed: Path, source: str, capsys: pytest.CaptureFixture[str]
):
    source = source.format(folder=installed)
    capsys.readouterr()
    assert cli.main(["cp", source, "mine:v1"]) == 0
    assert capsys.readouterr().out == f"{source} is copied to mine:v1\n"
    original, copied = store.find(source), store.resolve("mine:v1")
    assert copied.weight_bytes == original.weight_bytes
    assert copied.config == original.config
    assert cli.main(["rm", "mine:v1", *NOWHERE]) == 0
    assert is_installed(source)


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("org/tiny", "tiny:4b", "tiny:4b exists: choose another name, or delete it first"),
        ("org/tiny", "builtin", "builtin exists"),
        ("org/tiny", "a b", "'a b' is not a name: use name or name:tag"),
        ("org/other", "mine", "model org/other was not found"),
    ],
)
def test_a_copy_never_replaces_a_model(
    installed: Path,
    source: str,
    destination: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
):
    capsys.readouterr()
    assert cli.main(["cp", source, destination]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
