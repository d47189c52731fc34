"""`mlxrunner config`: the same facts as a table, as JSON, and as a file."""

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
"""


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Something of each source."""
    (tmp_path / "a.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLXRUNNER_LOG_LEVEL", "error")
    monkeypatch.setenv("MLXRUNNER_API_KEYS", "ada=mr-hunter2-of-24-letters")
    return ["config", "--config", "a.toml", "--port", "9"]


SERVE_REFUSES = {
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


@pytest.mark.parametrize("words", SERVE_REFUSES.values(), ids=SERVE_REFUSES)
def test_it_refuses_what_serve_refuses_in_the_same_words(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[[keys")
    (tmp_path / "broken.toml").chmod(0o600)
    said: list[tuple[object, str, list[str]]] = []
    for command in (["config"], ["config", "--json"], ["serve", "--port", "0"]):
        try:
            status: object = cli.main([*command, *words])
        except SystemExit as exit_:
            status = exit_.code
        output = capfd.readouterr()
        said.append((status, output.out, output.err.splitlines()))
    config, as_json, serve = said
    assert config == as_json == serve
    status, out, [line] = serve
    assert status in (1, 2)
    assert out == ""
    assert line.startswith("mlxrunner: ")


def test_a_key_of_the_environment_that_serve_refuses_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXRUNNER_API_KEYS", "ada=short")
    assert cli.main(["config"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "MLXRUNNER_API_KEYS: entry 1" in output.err
    assert "short" not in output.err.replace("shorter", "")


def told(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(line) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_the_table_tells_each_setting_its_value_and_where_it_was_said(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [tuple(row.split("  ")) for row in told(line, capsys).splitlines()]
    cells = [tuple(cell.strip() for cell in row if cell.strip()) for row in rows]
    assert {
        ("SETTING", "VALUE", "FROM"),
        ("models[0].name", "org/a", "a.toml:4"),
        ("models[0].alias", "a", "a.toml:4"),
        ("models[0].memory", "1.5 GiB", "a.toml:4"),
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


def test_the_json_is_for_programs(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(told([*line, "--json"], capsys))
    assert facts["models"] == {
        "value": [{"name": "org/a", "alias": "a", "memory": 1.5}],
        "from": "a.toml:4",
    }
    assert list(facts["settings"]) == [option.field for option in OPTIONS]
    assert facts["settings"]["port"] == {"value": 9, "unit": None, "from": "--port"}
    assert facts["settings"]["max_body"] == {"value": 2, "unit": "MiB", "from": "a.toml:1"}
    assert facts["settings"]["memory"] == {"value": None, "unit": "GiB", "from": "default"}
    assert facts["secrets"] == ["MLXRUNNER_API_KEYS"]


def test_the_file_says_the_same_without_the_other_sources(
    line: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "b.toml").write_text(told([*line, "--toml"], capsys))
    before = json.loads(told([*line, "--json"], capsys))
    monkeypatch.delenv("MLXRUNNER_LOG_LEVEL")
    after = json.loads(told(["config", "--config", "b.toml", "--json"], capsys))
    assert values(after) == values(before)
    assert {one["from"].split(":")[0] for one in after["settings"].values()} == {"b.toml"}


@pytest.mark.parametrize("form", [[], ["--json"], ["--toml"]])
def test_no_key_is_ever_shown(
    form: list[str], line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "hunter2" not in told([*line, *form], capsys)


def test_without_anything_it_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = told(["config"], capsys).splitlines()[1:]
    assert first.split() == ["models", "the", "built-in", "model", "default"]
    assert all(row.endswith("  default") for row in rest)


@pytest.mark.parametrize(
    ("variable", "word", "message"),
    [
        ("MLXRUNNER_CONFIG", "none.toml", "none.toml: No such file or directory"),
        ("MLXRUNNER_PORT", "x", "MLXRUNNER_PORT: must be a whole number"),
        ("MLXRUNNER_MULTI_USER", "yes", "--multi-user needs --cache slots"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(
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


def values(facts: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
    settings = {field: one["value"] for field, one in facts["settings"].items()}
    return {**settings, "models": facts["models"]["value"]}
