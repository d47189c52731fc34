"""deploy/org.mlxrunner.plist. launchd exists only on macOS, where plutil also checks the file."""

import gzip
import os
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from app.core.jobs import Capacity, Ledger
from app.core.settings import Settings
from app.runners.restart_policy import stop_grace
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT

PLIST = ROOT / "deploy" / "org.mlxrunner.plist"
ROTATION = ROOT / "deploy" / "org.mlxrunner.logs.plist"

# the keys of launchd.plist(5) that we use; launchd silently ignores a misspelled key
TYPES = {
    "Label": str,
    "ProgramArguments": list,
    "UserName": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


def test_each_key_is_known_to_launchd() -> None:
    plist = plistlib.loads(PLIST.read_bytes())
    assert {name: type(value) for name, value in plist.items()} == TYPES
    assert plist["Label"] == PLIST.stem
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ProcessType"] == "Interactive"
    assert plist["Umask"] == 0o077


def test_plutil_accepts_the_file() -> None:
    plutil = shutil.which("plutil")
    if plutil is None:
        pytest.skip("needs plutil, which comes with macOS")
    subprocess.run([plutil, "-lint", str(PLIST), str(ROTATION)], check=True)


def test_its_command_is_valid() -> None:
    arguments = plistlib.loads(PLIST.read_bytes())["ProgramArguments"]
    config, keys = "/etc/mlxrunner/mlxrunner.toml", "/etc/mlxrunner/keys.toml"
    assert arguments[2:] == ["--config", config, "--api-keys", keys]
    arguments[3] = str(ROOT / "deploy" / "mlxrunner.toml")
    assert check_start(parse_serve_command(arguments, {}), {}) == Settings(api_keys=keys)


def test_its_timeout_exceeds_the_drain_and_it_allows_enough_files() -> None:
    plist = plistlib.loads(PLIST.read_bytes())
    largest = 384 << 30  # three quarters of 512 GiB
    engine = Capacity(
        parallel=1, context_length=1, kv_budget=1, kv_bytes_per_sequence=1, wirable=largest
    )
    grace = stop_grace(engine, Ledger(budget=largest, weights=largest))
    assert plist["ExitTimeOut"] >= Settings().drain + grace + 20
    for limits in ("SoftResourceLimits", "HardResourceLimits"):
        assert plist[limits]["NumberOfFiles"] >= Settings().max_connections + 256


def test_there_are_no_variables_because_launchd_expands_none() -> None:
    text = PLIST.read_text("utf-8")
    assert not {"$", "~"} & {character for word in list_values(text) for character in word}


def list_values(text: str) -> list[str]:
    return [value_ for value in plistlib.loads(text.encode()).values() for value_ in flatten(value)]


def flatten(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def rotate(log: Path, limit: int) -> None:
    """Runs the job's script on another file."""
    *command, name, path, _ = plistlib.loads(ROTATION.read_bytes())["ProgramArguments"]
    assert path == plistlib.loads(PLIST.read_bytes())["StandardOutPath"]
    subprocess.run([*command, name, str(log), str(limit)], check=True)


def test_the_log_is_rotated_while_the_server_goes_on_writing(tmp_path: Path) -> None:
    """The server's descriptor stays open and appends, as launchd opened it."""
    log = tmp_path / "mlxrunner.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for number in range(8):
            os.write(descriptor, f"{number}\n".encode() * 600)
            rotate(log, 1000)
            assert log.stat().st_size == 0
        os.write(descriptor, b"small\n")
        rotate(log, 1000)
    finally:
        os.close(descriptor)
    assert log.read_text() == "small\n"
    copies = {file.name: gzip.decompress(file.read_bytes())[:1] for file in tmp_path.glob("*.gz")}
    assert copies == {f"mlxrunner.log.{n}.gz": str(8 - n).encode() for n in range(1, 6)}
    assert {file.stat().st_mode & 0o077 for file in tmp_path.glob("*.gz")} == {0}


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    rotate(tmp_path / "mlxrunner.log", 1000)
    assert not list(tmp_path.iterdir())


def test_the_rotation_has_known_keys() -> None:
    plist = plistlib.loads(ROTATION.read_bytes())
    assert plist["Label"] == ROTATION.stem
    assert set(plist) == {"Label", "ProgramArguments", "StartCalendarInterval", "ProcessType"}
    assert plist["StartCalendarInterval"] == {"Hour": 3, "Minute": 30}
