"""`mlxrunner ps` and `mlxrunner stop` with a server in a thread."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli
from app.commands.loaded_models import RunningModel, render_running_models
from tests.commands.thread_server import ThreadServer, run_thread_server

ADMIN = "mr-0123456789abcdef0123456789abcdef"
USER = "mr-abcdefabcdefabcdefabcdefabcdefab"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ThreadServer]:
    environ = {"MLXRUNNER_API_KEY": ADMIN}
    with run_thread_server("builtin", str(tiny_model), environ=environ) as server:
        yield server


@pytest.fixture(autouse=True)
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture
def port(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLXRUNNER_API_KEY", ADMIN)
    return server.port


def test_the_table_lists_loaded_models_until_they_are_stopped(
    port: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # an answer of random weights fills the context, unless a schema ends it
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    assert cli.main(["stop", "builtin", "--port", port]) == 0
    capsys.readouterr()
    assert cli.main(["ps", "--port", port]) == 0
    assert capsys.readouterr().out == "NAME  SIZE  PROCESSOR  CONTEXT  UNTIL\n"
    assert cli.main(["stop", "builtin", "--port", port]) == 0
    assert capsys.readouterr().out == "builtin is not loaded\n"

    asked = ["run", tiny_model.name, "hello", "--format", str(schema)]
    assert cli.main([*asked, "--port", port]) == 0
    capsys.readouterr()
    assert cli.main(["ps", "--port", port, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["name"] == tiny_model.name
    assert row["state"] == "ready"
    assert row["processor"] == "CPU"
    assert row["context_length"] == 4096
    assert row["size"] > 0
    assert cli.main(["stop", tiny_model.name, "--port", port]) == 0
    assert capsys.readouterr().out == f"{tiny_model.name} is unloaded\n"


@pytest.mark.parametrize("spelling", ["relative", "absolute", "home", "alias"])
def test_a_folder_is_found_by_any_path(
    port: str,
    tiny_model: Path,
    spelling: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A folder was found by the name of the folder only, so `run` loaded it again."""
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    monkeypatch.chdir(tiny_model.parent)
    file = tmp_path / "server.toml"
    file.write_text(f'[[models]]\nname = "./{tiny_model.name}"\nalias = "builtin"\n')
    path, name, arguments = {
        "relative": (f"./{tiny_model.name}", tiny_model.name, ()),
        "absolute": (f"{tiny_model}/", tiny_model.name, ()),
        "home": (f"~/{tiny_model.name}", tiny_model.name, ()),
        # the server's folder of a model has priority over a name in a file
        "alias": (str(tiny_model), tiny_model.name, ("--config", str(file))),
    }[spelling]
    assert cli.main(["stop", name, "--port", port]) == 0
    capsys.readouterr()
    assert cli.main(["stop", path, "--port", port, *arguments]) == 0
    assert capsys.readouterr().out == f"{name} is not loaded\n"


def test_a_model_that_is_not_served_cannot_be_stopped(
    port: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["stop", "builtim", "--port", port]) == 1
    assert "does not serve builtim, but builtin, " in (err := capsys.readouterr().err)
    assert err.endswith("; did you mean builtin?\n")


@pytest.mark.parametrize("command", [["ps"], ["stop", "builtin"], ["run", "builtin", "hi"]])
def test_a_server_with_keys_requires_one(
    server: ThreadServer,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.delenv("MLXRUNNER_API_KEY", raising=False)
    assert cli.main([*command, "--port", server.port]) == 1
    assert capsys.readouterr().err == (
        f"mlxrunner: the server at {server.url} requires an API key: set MLXRUNNER_API_KEY to a "
        "valid one\n"
    )


def test_only_an_admin_key_may_stop_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    keys = tmp_path / "keys.toml"
    assert cli.main(["key", "anna", "--file", str(keys)]) == 0
    key = next(word for word in capsys.readouterr().out.split() if word.startswith("mr-"))
    with run_thread_server(api_keys=str(keys)) as server:
        monkeypatch.setenv("MLXRUNNER_API_KEY", key)
        assert cli.main(["stop", "builtin", "--port", server.port]) == 1
        assert "admin" in capsys.readouterr().err
        assert cli.main(["ps", "--port", server.port]) == 0
        assert "builtin" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["ps"], ["stop", "builtin"]])
def test_without_a_server_the_error_says_how_to_start_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
):
    assert "MLXRUNNER_API_KEY" not in os.environ
    assert cli.main([*command, "--port", "9"]) == 1
    assert "no server is running at http://127.0.0.1:9: start one" in capsys.readouterr().err


def test_the_table_shows_states_and_times():
    def row(state: str, **fields: object) -> RunningModel:
        values: dict[str, object] = {
            "name": "m",
            "size": 2_500_000_000,
            "processor": "GPU",
            "context_length": 32768,
            "expires_at": None,
            **fields,
        }
        return RunningModel(state=state, **values)  # pyright: ignore[reportArgumentType]  # by name

    rows = [
        row("ready"),
        row("ready", expires_at=1300.0),
        row("loading", progress=42, processor="", size=0),
        row("stalled"),
    ]
    lines = list(render_running_models(rows, 1000.0))
    assert lines[0] == "NAME  SIZE     PROCESSOR  CONTEXT  UNTIL"
    assert lines[1] == "m     2.50 GB  GPU        32768    forever"
    assert lines[2].endswith(" (in 5 min)")
    assert lines[3] == "m     -        -          32768    loading 42 %"
    assert lines[4].endswith("stalled")


def test_a_name_cannot_control_the_terminal():
    row = RunningModel(
        name="a\x1b[2J", state="ready", size=1, processor="", context_length=1, expires_at=None
    )
    assert list(render_running_models([row], 0.0))[1].startswith(r"a\x1b[2J ")
