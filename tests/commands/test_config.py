"""`mlxrunner config`: the same settings as a table, as JSON, and as a file."""

import json
from pathlib import Path

import pytest

from app import cli
from app.config.options import OPTIONS

FILE = """\
max_body = 2
keep_alive = "forever"

[[models]]
name = "org/a"
alias = "a"
memory = 1.5

[[defaults]]
name = "a"
system = "Be\\nbrief."
temperature = 1
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line with settings from every source."""
    (tmp_path / "a.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLXRUNNER_LOG_LEVEL", "error")
    monkeypatch.setenv("MLXRUNNER_API_KEYS", "ada=mr-hunter2-of-24-letters")
    return ["config", "--config", "a.toml", "--port", "9"]


INVALID_ARGUMENTS = {
    "an origin that browsers write otherwise": ["--cors-origin", "https://A.example.org"],
    "an origin with the usual port": ["--cors-origin", "https://a.example.org:443"],
    "a name with two dots": ["--allowed-host", "a..example.org"],
    "a certificate without its key": ["--tls-cert", "cert.pem"],
    "a certificate that is not there": ["--tls-cert", "cert.pem", "--tls-key", "key.pem"],
    "a file of keys that is not there": ["--api-keys", "keys.toml"],
    "a file of keys that is none": ["--api-keys", "broken.toml"],
    "an address reachable from other machines": ["--host", "0.0.0.0"],
    "all pages without keys": ["--cors-origin", "*"],
}


@pytest.mark.usefixtures("no_early_process")
@pytest.mark.parametrize("arguments", INVALID_ARGUMENTS.values(), ids=INVALID_ARGUMENTS)
def test_it_rejects_the_settings_that_serve_rejects_with_the_same_message(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[[keys")
    (tmp_path / "broken.toml").chmod(0o600)
    results: list[tuple[object, str, list[str]]] = []
    for subcommand in (["config"], ["config", "--json"], ["serve", "--port", "0"]):
        try:
            status: object = cli.main([*subcommand, *arguments])
        except SystemExit as exit_:
            status = exit_.code
        output = capfd.readouterr()
        results.append((status, output.out, output.err.splitlines()))
    config, as_json, serve = results
    assert config == as_json == serve
    status, out, [line] = serve
    assert status in (1, 2)
    assert out == ""
    assert line.startswith("mlxrunner: ")


def test_an_invalid_key_of_the_environment_is_rejected_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXRUNNER_API_KEYS", "ada=short")
    assert cli.main(["config"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "MLXRUNNER_API_KEYS: entry 1" in output.err
    assert "short" not in output.err.replace("shorter", "")


def run_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(command) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_the_table_has_each_setting_with_its_value_and_source(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [tuple(row.split("  ")) for row in run_command(command, capsys).splitlines()]
    cells = [tuple(cell.strip() for cell in row if cell.strip()) for row in rows]
    assert {
        ("SETTING", "VALUE", "FROM"),
        ("models[0].name", "org/a", "a.toml:4"),
        ("models[0].alias", "a", "a.toml:4"),
        ("models[0].memory", "1.5 GiB", "a.toml:4"),
        ("defaults[0].system", "Be brief.", "a.toml:9"),
        ("defaults[0].temperature", "1", "a.toml:9"),
        ("port", "9", "--port"),
        ("log_level", "error", "MLXRUNNER_LOG_LEVEL"),
        ("max_body", "2 MiB", "a.toml:1"),
        ("keep_alive", "forever", "a.toml:2"),
        ("host", "127.0.0.1", "default"),
        ("access_log", "on", "default"),
        ("memory", "chosen from the device", "default"),
        ("keys", "set (hidden)", "MLXRUNNER_API_KEYS"),
    } <= set(cells)
    assert {option.field for option in OPTIONS} <= {cell[0] for cell in cells}


def test_the_json_has_values_units_and_sources(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(run_command([*command, "--json"], capsys))
    assert config["models"] == {
        "value": [{"name": "org/a", "alias": "a", "memory": 1.5}],
        "from": "a.toml:4",
    }
    assert config["defaults"] == {
        "value": [{"name": "a", "system": "Be\nbrief.", "temperature": 1}],
        "from": "a.toml:9",
    }
    assert list(config["settings"]) == [option.field for option in OPTIONS]
    assert config["settings"]["port"] == {"value": 9, "unit": None, "from": "--port"}
    assert config["settings"]["max_body"] == {"value": 2, "unit": "MiB", "from": "a.toml:1"}
    assert config["settings"]["memory"] == {"value": None, "unit": "GiB", "from": "default"}
    assert config["secrets"] == ["MLXRUNNER_API_KEYS"]


def test_the_file_alone_gives_the_same_settings(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "b.toml").write_text(run_command([*command, "--toml"], capsys))
    before = json.loads(run_command([*command, "--json"], capsys))
    monkeypatch.delenv("MLXRUNNER_LOG_LEVEL")
    after = json.loads(run_command(["config", "--config", "b.toml", "--json"], capsys))
    assert get_values(after) == get_values(before)
    assert {one["from"].split(":")[0] for one in after["settings"].values()} == {"b.toml"}


@pytest.mark.parametrize("options", [[], ["--json"], ["--toml"]])
def test_no_key_is_ever_shown(
    options: list[str], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "hunter2" not in run_command([*command, *options], capsys)


def test_without_arguments_it_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = run_command(["config"], capsys).splitlines()[1:]
    assert first.split() == ["models", "the", "built-in", "model", "default"]
    assert all(row.endswith("  default") for row in rest)


@pytest.mark.parametrize(
    ("variable", "word", "message"),
    [
        ("MLXRUNNER_CONFIG", "none.toml", "none.toml: No such file or directory"),
        ("MLXRUNNER_PORT", "x", "MLXRUNNER_PORT: must be an integer"),
        ("MLXRUNNER_MULTI_USER", "yes", "--multi-user needs --cache slots"),
    ],
)
def test_an_error_is_one_line_and_status_1(
    variable: str,
    word: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, word)
    for command in ("config", "serve", "show"):
        assert cli.main([command]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"mlxrunner: {message}")


def get_values(config: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
    settings = {field: one["value"] for field, one in config["settings"].items()}
    tables = {name: config[name]["value"] for name in ("models", "defaults")}
    return {**settings, **tables}
