"""`mlxrunner pull`, in this process and in its own process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from app import cli, store
from app.commands.pull import pull
from app.commands.servers import get_json, send_json
from app.core.errors import AppError
from app.store.hub import cache
from app.store.model_names import HubName, ModelNotFoundError
from tests import tiny
from tests.commands.thread_server import run_thread_server
from tests.models.gguf.raw_file import gguf as raw_gguf
from tests.models.gguf.raw_file import text_entry
from tests.server_process import ROOT, TIMEOUT
from tests.store.ollama_store import OllamaStore
from tests.store.stand_in import StandIn
from tests.terminal_process import TERMINAL_TYPE, open_terminal
from tests.waiting import wait_until

WEIGHTS = "model.safetensors"


@pytest.fixture
def commit(hub: StandIn, tiny_model: Path) -> str:
    return hub.add("org/tiny", tiny_model)


def test_pull_prints_commit_size_and_path(
    hub: StandIn, commit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull("org/tiny", None) == 0
    out, err = capsys.readouterr()
    assert err.startswith(
        f"org/tiny at commit {commit[:12]}: 4 files, 59.5 kB, 59.2 kB to download"
    )
    assert out.startswith("org/tiny is complete: 51.8 kB of weights in ")
    assert out.rstrip().endswith(commit)


def test_a_name_of_ollamas_library_stands_for_the_repository_in_mlx_format(
    hub: StandIn, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add("mlx-community/Qwen3-4B-4bit", tiny_model)
    with pytest.raises(ModelNotFoundError, match="run `mlxrunner pull qwen3:4b` to download mlx-"):
        store.find("qwen3:4b")
    assert pull("qwen3:4b", None) == 0
    out, err = capsys.readouterr()
    assert err.startswith(
        "mlxrunner: qwen3:4b in MLX's format is mlx-community/Qwen3-4B-4bit\n"
        f"mlx-community/Qwen3-4B-4bit at commit {commit[:12]}: "
    )
    assert out.startswith("mlx-community/Qwen3-4B-4bit is complete: ")
    assert store.find("qwen3:4b").name == "mlx-community/Qwen3-4B-4bit"


def test_an_unsupported_gguf_model_of_ollama_gives_way_to_the_one_in_mlx_format(
    hub: StandIn, tiny_model: Path, tmp_path: Path
) -> None:
    unknown = raw_gguf([text_entry("general.architecture", "plamo3")])
    hub.add("mlx-community/Qwen3-4B-4bit", tiny_model)
    ollama = OllamaStore(tmp_path / "ollama")
    ollama.write("qwen3:4b", [ollama.layer("model", unknown)])
    ollama.write("mine:4b", [ollama.layer("model", unknown)])
    with pytest.raises(AppError, match=r"'plamo3' are not .*; run `mlxrunner pull qwen3:4b` to"):
        store.find("qwen3:4b")
    pull("qwen3:4b", None)
    assert store.find("qwen3:4b").name == "mlx-community/Qwen3-4B-4bit"
    with pytest.raises(AppError, match="architecture 'plamo3' are not supported"):
        store.find("mine:4b")


def test_a_second_pull_only_verifies(
    hub: StandIn, commit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pull("org/tiny", None)
    capsys.readouterr()
    pull("org/tiny", None)
    assert ", already downloaded, verifying" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["org/tiny@{}", "org/tiny"])
def test_a_revision_is_part_of_the_name_or_an_option(
    hub: StandIn, commit: str, tmp_path: Path, name: str
) -> None:
    hub.add("org/tiny", tiny.write(tmp_path / "newer", seed=1))
    pull(name.format(commit), None if "@" in name else commit)
    files = cache.find(HubName(repo_id="org/tiny", revision=commit))
    assert files is not None
    assert files.path.name == commit


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        ("tiny", None, "has no known equivalent in MLX's format: pull a repository of the hub"),
        ("qwen3:5b", None, "did you mean qwen3:"),
        ("gema3", None, "did you mean gemma3, gemma3n, gemma4? Or pull a repository of the hub"),
        ("../tiny", None, "is not a Hugging Face model name"),
        ("org/tiny@a", "b", "are different revisions"),
        ("org/tiny", "../b", "is not the name of a branch"),
    ],
)
def test_an_invalid_name_is_rejected_before_any_request(
    hub: StandIn, name: str, revision: str | None, expected: str
) -> None:
    with pytest.raises(AppError) as caught:
        pull(name, revision)
    assert expected in caught.value.message
    assert hub.requests == []


def test_an_unsupported_architecture_is_not_downloaded(hub: StandIn, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    hub.add("org/odd", folder)
    with pytest.raises(AppError) as caught:
        pull("org/odd", None)
    assert "no_such_model" in caught.value.message
    assert "nothing was downloaded" in caught.value.message
    assert hub.downloads(WEIGHTS) == []


@pytest.fixture
def environment(hub: StandIn, tmp_path: Path) -> dict[str, str]:
    """The environment of a separate process, in which huggingface_hub is not patched."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**variables, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}


def test_a_pulled_model_is_served_without_the_hub(hub: StandIn, commit: str) -> None:
    assert cli.main(["pull", "org/tiny"]) == 0
    hub.close()
    with run_thread_server("org/tiny") as server:
        _, model = get_json(f"{server.url}/v1/models/org/tiny")
        assert model["id"] == "org/tiny"
        body = {"model": "org/tiny", "prompt": "Hi", "max_tokens": 3}
        status, answer = send_json("POST", server.url, "/v1/completions", body, None, TIMEOUT)
        assert status == 200, answer


def test_a_terminal_shows_the_bytes_and_the_rate_of_a_pull(
    hub: StandIn, commit: str, environment: dict[str, str], tmp_path: Path
) -> None:
    variables = {**environment, "NO_COLOR": "1", "TERM": TERMINAL_TYPE}
    with open_terminal("pull", "org/tiny", environ=variables) as terminal:
        terminal.wait_for(r"\r\[#{20}\] 59\.0 kB of 59\.0 kB \(100 %\), [\d.]+ [kM]?B/s\r\n")
        terminal.wait_for("org/tiny is complete")
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.output
        assert "config.json" not in terminal.output  # no progress bar of huggingface_hub
    assert (tmp_path / "home" / "hub" / "models--org--tiny" / "refs" / "main").read_text() == commit


def test_offline_mode_is_an_error_of_one_line(
    hub: StandIn, commit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # as HF_HUB_OFFLINE=1 does at the start
    assert cli.main(["pull", "org/tiny"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "mlxrunner: org/tiny needs a download, but HF_HUB_OFFLINE is set: unset it and try again"
    ]
    assert hub.requests == []


def test_ctrl_c_ends_a_download_and_keeps_the_partial_file(
    hub: StandIn,
    commit: str,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.faults.stall[WEIGHTS] = TIMEOUT
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "pull", "org/tiny"],
        cwd=ROOT,
        # so that the download neither continues nor starts again
        env={**environment, "HF_HUB_DOWNLOAD_TIMEOUT": f"{TIMEOUT:.0f}"},
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background ignores SIGINT, which child processes
        # inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: hub.downloads(f"{commit}/{WEIGHTS}"), limit=TIMEOUT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert (
        err.splitlines()[-1]
        == "mlxrunner: interrupted; run the command again to resume the download"
    )
    cache_of_process = tmp_path / "home" / "hub"
    assert list(cache_of_process.glob("*/blobs/*.incomplete"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache_of_process))
    hub.faults.stall.clear()
    assert pull("org/tiny", None) == 0
