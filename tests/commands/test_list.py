"""`mlxrunner list`: the table of local models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from app.commands.list import ListedModel, list_models, render_table
from app.store.hub.download import download
from app.store.hub.download_plan import plan_download
from app.store.model_names import HubName
from tests import tiny, tiny_vision
from tests.store.ollama_store import OllamaStore
from tests.store.stand_in import StandIn


@pytest.fixture
def populated_stores(hub: StandIn, tiny_model: Path, packed_model: Path, tmp_path: Path) -> Path:
    """One complete model in each source, and a broken one in two of them."""
    hub.add("org/tiny", tiny_model)
    download(plan_download(HubName(repo_id="org/tiny")))
    hub.add("org/broken", tiny.write(tmp_path / "broken", seed=1))
    weights = download(plan_download(HubName(repo_id="org/broken"))) / "model.safetensors"
    weights.resolve().write_bytes(b"cut off")
    ollama = OllamaStore(tmp_path / "ollama")
    ollama.write("tiny:4b", ollama.model(packed_model))
    ollama.write("llama3.2", [ollama.layer("model", b"GGUF...")])
    return tmp_path


def test_every_source_is_listed_and_broken_models_come_last(
    populated_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_models(as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SOURCE", "SIZE", "ARCHITECTURE", "VISION", "MODIFIED"]
    assert [line.split()[0] for line in lines[1:]] == [
        "builtin",
        "org/tiny",
        "tiny:4b",
        "org/broken",
        "llama3.2",
    ]
    assert "51.8 kB  llama " in lines[2]
    assert lines[4].startswith("org/broken (hub) cannot be served: ")
    assert lines[5].startswith("llama3.2 (ollama) cannot be served: ")
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
    assert "is not a usable GGUF file" in rows["llama3.2"]["problem"]


def test_a_model_that_processes_images_is_marked(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, folder in (
        ("org/vision", tiny_vision.write(tmp_path / "vision")),
        ("org/text", tiny.write(tmp_path / "text")),
    ):
        hub.add(name, folder)
        download(plan_download(HubName(repo_id=name)))
    list_models(as_json=False)
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["org/vision"][-3:-1] == ["qwen3_vl_text", "yes"]
    assert "yes" not in lines["org/text"]
    list_models(as_json=True)
    rows = {row["name"]: row["vision"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["org/vision"], rows["org/text"]) == (True, False)


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


def test_only_the_names_are_printed_for_shell_completion(
    populated_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This includes broken models, because no model is read."""
    assert list_models(as_json=False, names_only=True) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "builtin",
        "llama3.2",
        "org/broken",
        "org/tiny",
        "tiny:4b",
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": None}, "config.json has no model_type"),
        ({"model_type": "exotic"}, "model_type 'exotic' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights quantized with 'hqq'"),
    ],
)
def test_an_unsupported_model_is_listed_with_the_reason(
    hub: StandIn,
    tiny_model: Path,
    tmp_path: Path,
    change: dict[str, object],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny.write(tmp_path / "odd")
    hub.add("org/odd", folder)
    snapshot = download(plan_download(HubName(repo_id="org/odd")))
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text(json.dumps({**config, **change}))
    assert list_models(as_json=False) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "org/odd" in line]
    assert line.startswith("org/odd (hub) cannot be served: ")
    assert reason in line


# runs the commands in turn, and names those after which MLX is imported
COMMANDS_IN_TURN = """
import sys
from app.cli import main
for command_line in sys.argv[1:]:
    print("==", command_line)
    try:
        main(command_line.split())
    except SystemExit:
        pass
    if {"mlx", "mlx.core", "mlx.nn"} & sys.modules.keys():
        sys.exit(f"{command_line} imports MLX")
"""


def test_mlx_is_not_imported(populated_stores: Path) -> None:
    """It takes longer than everything else that these commands do."""
    commands = (
        *("list", "list --json", "list --names", "--help", "serve --help-all", "run --help"),
        "pull",
    )
    variables = {
        "HF_HUB_CACHE": str(constants.HF_HUB_CACHE),
        "OLLAMA_MODELS": str(populated_stores / "ollama"),
    }
    process = subprocess.run(
        [sys.executable, "-c", COMMANDS_IN_TURN, *commands],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    listed = process.stdout.partition("== list --json\n")[0]
    assert "org/tiny" in listed
    assert "tiny:4b" in listed
    marked = [line for line in process.stdout.splitlines() if line.startswith("== ")]
    assert marked == [f"== {command_line}" for command_line in commands]
