"""deploy/mlxrunner.service: what systemd makes of it, and whether the server plays along."""

import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.deploy.command import settings_of, would_start
from tests.server_process import ROOT, TIMEOUT, run_server

UNIT = ROOT / "deploy" / "mlxrunner.service"
PROGRAM = "/opt/mlxrunner/bin/mlxrunner"


def directives() -> dict[str, list[str]]:
    """Values by name; names are not used in two sections here."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name].append(value)
    return found


def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, which comes with systemd")
    unit = tmp_path / UNIT.name
    text = UNIT.read_text("utf-8")
    assert text.count(PROGRAM) == 1
    unit.write_text(text.replace(PROGRAM, sys.executable), "utf-8")
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    about_it = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, about_it) == (0, []), done.stderr


def test_its_command_reads_the_file_that_is_described(tmp_path: Path) -> None:
    [line] = directives()["ExecStart"]
    config = "/etc/mlxrunner/mlxrunner.toml"
    assert line == f"{PROGRAM} serve --config {config}"
    words = line.replace(config, str(ROOT / "deploy" / "mlxrunner.toml")).split()
    assert would_start(settings_of(words, {}), {}) == Settings()


def test_it_waits_longer_than_answers_may_take_to_end() -> None:
    said = directives()
    assert said["KillMode"] == ["mixed"]
    assert int(said["TimeoutStopSec"][0]) >= Settings().drain + 20
    assert int(said["LimitNOFILE"][0]) >= Settings().max_connections + 256


def test_what_mlx_compiles_lies_where_nobody_else_writes() -> None:
    said = directives()
    [folder] = [value.partition("=")[2] for value in said["Environment"] if "TMPDIR" in value]
    assert folder == f"/var/cache/{said['CacheDirectory'][0]}"
    assert said["UMask"] == ["0077"]


@pytest.mark.skipif(sys.platform != "linux", reason="sd_notify is of Linux")
def test_the_server_tells_systemd_when_it_is_ready_alive_and_stopping(
    tiny_model: Path, tmp_path: Path
) -> None:
    assert directives()["Type"] == ["notify"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT)
        told: list[str] = []

        def hear_until(word: str) -> None:
            while word not in told:
                told.extend(manager.recv(4096).decode().splitlines())

        around = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "60000000"}
        with run_server(str(tiny_model), environ=around) as server:
            hear_until("READY=1")
            told.clear()
            hear_until("WATCHDOG=1")
            server.process.send_signal(signal.SIGTERM)
            hear_until("STOPPING=1")
            # systemd takes both for a good end
            assert server.stop() in (0, -signal.SIGTERM)
