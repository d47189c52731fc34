"""Command lines that would expose the server by accident."""

from pathlib import Path

from tests.server_process import TIMEOUT, ServerProcess


def run_failing_server(*arguments: str, **variables: str) -> str:
    """The log of a server that fails to start."""
    server = ServerProcess(arguments, variables)
    assert server.process.wait(TIMEOUT) != 0
    server.stop()
    log = server.log_text()
    assert "Traceback" not in log
    return log


def test_a_public_address_needs_keys() -> None:
    [line] = run_failing_server("--host", "0.0.0.0").splitlines()
    assert line.startswith("mlxrunner: listening on 0.0.0.0 without API keys lets anyone")
    assert "--api-keys" in line
    assert "--allow-anyone" in line


def test_a_public_host_name_needs_keys() -> None:
    [line] = run_failing_server("--allowed-host", "llm.example.org").splitlines()
    assert line.startswith("mlxrunner: --allowed-host llm.example.org without API keys lets anyone")
    assert "--api-keys" in line
    assert "--allow-anyone" in line


def test_an_invalid_key_file_is_a_startup_error(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[[keys]]\n")
    file.chmod(0o600)
    assert f"--api-keys: {file} key 1: " in run_failing_server(
        "--host", "0.0.0.0", "--api-keys", str(file)
    )


def test_an_invalid_key_of_the_environment_is_not_logged() -> None:
    log = run_failing_server("--host", "0.0.0.0", MLXRUNNER_API_KEY="too-short-key")
    assert "MLXRUNNER_API_KEY" in log
    assert "too-short-key" not in log
