"""deploy/org.mlxrunner.plist. launchd exists only on macOS, where plutil checks the file, too."""

import plistlib
import shutil
import subprocess

import pytest

from app.core.settings import Settings
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT

PLIST = ROOT / "deploy" / "org.mlxrunner.plist"

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
    subprocess.run([plutil, "-lint", str(PLIST)], check=True)


def test_its_command_is_valid() -> None:
    arguments = plistlib.loads(PLIST.read_bytes())["ProgramArguments"]
    config, keys = "/etc/mlxrunner/mlxrunner.toml", "/etc/mlxrunner/keys.toml"
    assert arguments[2:] == ["--config", config, "--api-keys", keys]
    arguments[3] = str(ROOT / "deploy" / "mlxrunner.toml")
    assert check_start(parse_serve_command(arguments, {}), {}) == Settings(api_keys=keys)


def test_its_timeout_exceeds_the_drain_and_it_allows_enough_files() -> None:
    plist = plistlib.loads(PLIST.read_bytes())
    assert plist["ExitTimeOut"] >= Settings().drain + 20
    for limits in ("SoftResourceLimits", "HardResourceLimits"):
        assert plist[limits]["NumberOfFiles"] >= Settings().max_connections + 256


def test_there_are_no_variables_because_launchd_expands_none() -> None:
    text = PLIST.read_text("utf-8")
    assert not {"$", "~"} & {character for word in list_values(text) for character in word}


def list_values(text: str) -> list[str]:
    return [value_ for value in plistlib.loads(text.encode()).values() for value_ in flatten(value)]


def flatten(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
