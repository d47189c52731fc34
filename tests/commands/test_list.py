"""`mlxrunner list`: the table of local models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.commands.list import ListedModel, list_models, render_table
from app.store.hub.download import download
from app.store.hub.download_plan import plan_download
from app.store.model_names import HubName
from tests import tiny
from tests.server_process import ROOT, TIMEOUT, UNTRACED
from tests.store.ollama_store import OllamaStore, packed_folder
from tests.store.stand_in import StandIn


@pytest.fixture
def populated_stores(hub: StandIn, tiny_model: Path, tmp_path: Path) -> Path:
    """One complete model in each source, and a broken one in two of them."""
    hub.add("org/tiny", tiny_model)
    download(plan_download(HubName(repo_id="org/tiny")))
    hub.add("org/broken", tiny.write(tmp_path / "broken", seed=1))
    weights = download(plan_download(HubName(repo_id="org/broken"))) / "model.safetensors"
    weights.resolve().write_bytes(b"cut off")
    ollama = OllamaStore(tmp_path / "ollama")
    ollama.write("tiny:4b", ollama.model(packed_folder(tmp_path / "packed")))
    ollama.write("llama3.2", [ollama.layer("model", b"GGUF...")])
    return tmp_path


def test_every_source_is_listed_and_broken_models_come_last(
    populated_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_models(as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SOURCE", "SIZE", "ARCHITECTURE", "MODIFIED"]
    assert [line.split()[0] for line in lines[1:]] == [
        "builtin",
        "org/tiny",
        "tiny:4b",
        "org/broken",
        "llama3.2",
    ]
    assert "51.8 kB  llama " in lines[2]
    assert lines[4].startswith("org/broken (hub) cannot be served: ")
    assert lines[5].startswith("llama3.2 (ollama) cannot be served: llama3.2 is a GGUF model")
    assert all(len(line) <= 80 for line in lines[:4])


def test_the_json_has_the_same_models(
    populated_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list_models(as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["org/tiny"]["architecture"] == "llama"
    assert rows["org/tiny"]["bytes"] == sum(array.nbytes for array in tiny.weights().values())
    assert rows["org/tiny"]["problem"] is None
    assert Path(rows["tiny:4b"]["path"]).is_file()
    assert "is a GGUF model" in rows["llama3.2"]["problem"]


def test_a_long_name_is_on_its_own_line() -> None:
    long_name = "some-organisation/" + "a-very-long-name-of-a-model-" * 2 + "8bit"
    listed_models = [
        ListedModel(
            name=long_name, source="hub", path="", bytes=10**10, architecture="glm4_moe_lite"
        )
    ]
    head, name, rest = render_table(listed_models)
    assert name == long_name
    assert rest.split()[:4] == ["hub", "10.0", "GB", "glm4_moe_lite"]
    assert max(map(len, (head, rest))) <= 80


@pytest.mark.parametrize("command", [["list"], ["--help"], ["run", "--help"]])
def test_the_list_and_the_help_do_not_import_mlx(command: list[str], populated_stores: Path):
    """The import would take longer than the rest of the command."""
    code = (
        "import sys; from app.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name.partition('.')[0] == 'mlx' for name in sys.modules))"
    )
    environ = {**os.environ, **UNTRACED, "HF_HUB_CACHE": str(populated_stores / "hf" / "hub")}
    ended = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_an_architecture_that_is_not_supported_is_a_problem(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.write(tmp_path / "exotic", model_type="exotic")
    hub.add("org/exotic", folder)
    download(plan_download(HubName(repo_id="org/exotic")))
    list_models(as_json=False)
    assert "org/exotic (hub) cannot be served: " in capsys.readouterr().out
