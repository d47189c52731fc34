"""deploy/mlxrunner.service: checked by systemd, and with a real server."""

import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT, TIMEOUT, run_server

UNIT = ROOT / "deploy" / "mlxrunner.service"
PROGRAM = "/opt/mlxrunner/bin/mlxrunner"


def read_directives() -> dict[str, list[str]]:
    """Values by name; no name occurs in two sections."""
    directives_: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            directives_[name].append(value)
    return directives_


def test_systemd_analyze_reports_no_problem(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, which comes with systemd")
    unit = tmp_path / UNIT.name
    text = UNIT.read_text("utf-8")
    assert text.count(PROGRAM) == 1
    unit.write_text(text.replace(PROGRAM, f'"{sys.executable}"'), "utf-8")
    process = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    warnings = [line for line in process.stderr.splitlines() if UNIT.name in line]
    assert (process.returncode, warnings) == (0, []), process.stderr


# `systemd-analyze security` calls up to 4.0 "OK"; 25 means 2.5
MAX_EXPOSURE = 25


def test_systemd_analyze_rates_the_unit_as_well_protected() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, which comes with systemd")
    command = [analyze, "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(UNIT)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in process.stderr:
        pytest.skip("needs systemd-analyze of systemd 250 or newer")
    assert process.returncode == 0, process.stdout
    assert "Overall exposure level" in process.stdout


def test_its_command_reads_the_documented_file(tmp_path: Path) -> None:
    [line] = read_directives()["ExecStart"]
    config = "/etc/mlxrunner/mlxrunner.toml"
    keys = "/etc/mlxrunner/keys.toml"
    assert line == f"{PROGRAM} serve --config {config} --api-keys {keys}"
    example = str(ROOT / "deploy" / "mlxrunner.toml")
    words = [example if word == config else word for word in line.split()]
    assert check_start(parse_serve_command(words, {}), {}) == Settings(api_keys=keys)


def test_the_command_of_earlier_units_is_still_valid() -> None:
    """A unit of an earlier version stays in place during an upgrade."""
    words = [PROGRAM, "serve", "--config", str(ROOT / "deploy" / "mlxrunner.toml")]
    assert check_start(parse_serve_command(words, {}), {}) == Settings()


def test_its_timeout_exceeds_the_drain() -> None:
    directives = read_directives()
    assert directives["KillMode"] == ["mixed"]
    assert int(directives["TimeoutStopSec"][0]) >= Settings().drain + 20
    assert int(directives["LimitNOFILE"][0]) >= Settings().max_connections + 256


def test_the_compile_folder_of_mlx_is_private() -> None:
    directives = read_directives()
    [folder] = [value.partition("=")[2] for value in directives["Environment"] if "TMPDIR" in value]
    assert folder == f"/var/cache/{directives['CacheDirectory'][0]}"
    assert directives["UMask"] == ["0077"]


@pytest.mark.skipif(sys.platform != "linux", reason="sd_notify needs Linux")
def test_the_server_notifies_systemd_of_its_state(tiny_model: Path, tmp_path: Path) -> None:
    assert read_directives()["Type"] == ["notify"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT)
        messages: list[str] = []

        def receive_until(message: str) -> None:
            while message not in messages:
                messages.extend(manager.recv(4096).decode().splitlines())

        variables = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "60000000"}
        with run_server(str(tiny_model), environ=variables) as server:
            receive_until("READY=1")
            messages.clear()
            receive_until("WATCHDOG=1")
            server.process.send_signal(signal.SIGTERM)
            receive_until("STOPPING=1")
            # systemd accepts both as a clean exit
            assert server.stop() in (0, -signal.SIGTERM)
