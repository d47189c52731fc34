"""Starts that would open the door to strangers, as an operator types them."""

from pathlib import Path

from tests.server_process import TIMEOUT, ServerProcess


def ended(*arguments: str, **variables: str) -> str:
    """What a server said that would not start."""
    server = ServerProcess(arguments, variables)
    assert server.process.wait(TIMEOUT) != 0
    server.stop()
    said = server.log_text()
    assert "Traceback" not in said
    return said


def test_strangers_are_not_served_by_accident() -> None:
    [line] = ended("--host", "0.0.0.0").splitlines()
    assert line.startswith("mlxrunner: listening on 0.0.0.0 without API keys lets anyone")
    assert "--api-keys" in line
    assert "--allow-anyone" in line


def test_strangers_behind_a_proxy_are_not_served_by_accident() -> None:
    [line] = ended("--allowed-host", "llm.example.org").splitlines()
    assert line.startswith("mlxrunner: --allowed-host llm.example.org without API keys lets anyone")
    assert "--api-keys" in line
    assert "--allow-anyone" in line


def test_keys_that_cannot_be_used_open_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[[keys]]\n")
    file.chmod(0o600)
    assert f"--api-keys: {file} key 1: " in ended("--host", "0.0.0.0", "--api-keys", str(file))


def test_a_key_of_the_environment_is_not_told_when_it_is_bad() -> None:
    said = ended("--host", "0.0.0.0", MLXRUNNER_API_KEY="too-short-key")
    assert "MLXRUNNER_API_KEY" in said
    assert "too-short-key" not in said
