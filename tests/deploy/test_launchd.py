"""deploy/org.mlxrunner.plist. launchd itself is only on a Mac, where plutil is asked too."""

import plistlib
import shutil
import subprocess

import pytest

from app.core.settings import Settings
from tests.deploy.command import settings_of, would_start
from tests.server_process import ROOT

PLIST = ROOT / "deploy" / "org.mlxrunner.plist"

# launchd.plist(5): what we use of it; a key that is misspelled is ignored there, without a word
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


def test_each_key_is_one_of_launchds() -> None:
    said = plistlib.loads(PLIST.read_bytes())
    assert {name: type(value) for name, value in said.items()} == TYPES
    assert said["Label"] == PLIST.stem
    assert said["KeepAlive"] == {"SuccessfulExit": False}
    assert said["ProcessType"] == "Interactive"
    assert said["Umask"] == 0o077


def test_a_mac_agrees() -> None:
    plutil = shutil.which("plutil")
    if plutil is None:
        pytest.skip("needs plutil, which comes with macOS")
    subprocess.run([plutil, "-lint", str(PLIST)], check=True)


def test_its_command_would_start() -> None:
    words = plistlib.loads(PLIST.read_bytes())["ProgramArguments"]
    *rest, config = words
    assert config == "/etc/mlxrunner/mlxrunner.toml"
    settings = settings_of([*rest, str(ROOT / "deploy" / "mlxrunner.toml")], {})
    assert would_start(settings, {}) == Settings()


def test_it_waits_longer_than_answers_may_take_to_end_and_opens_enough_files() -> None:
    said = plistlib.loads(PLIST.read_bytes())
    assert said["ExitTimeOut"] >= Settings().drain + 20
    for limits in ("SoftResourceLimits", "HardResourceLimits"):
        assert said[limits]["NumberOfFiles"] >= Settings().max_connections + 256


def test_launchd_expands_nothing_so_nothing_is_left_to_expand() -> None:
    text = PLIST.read_text("utf-8")
    assert not {"$", "~"} & {character for word in words_of(text) for character in word}


def words_of(text: str) -> list[str]:
    return [word for value in plistlib.loads(text.encode()).values() for word in flat(value)]


def flat(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
