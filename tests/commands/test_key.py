"""`mlxrunner key`: a key is shown once, and its entry is accepted by the server."""

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest

from app.cli import main
from app.commands import key as command
from app.commands.key import append_key, make_key
from app.core.errors import AppError
from app.core.usage import UsageLimits
from app.http import api_keys
from app.http.api_keys import Keyring


def create_key(
    capsys: pytest.CaptureFixture[str], name: str, admin: bool, file: Path | None
) -> str:
    """Create a key and return it. Only the key is written to stdout."""
    assert make_key(name, admin=admin, file=file) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert out.strip() not in err
    return out.strip()


def test_the_printed_entry_is_valid_in_the_file(capsys: pytest.CaptureFixture[str]):
    assert make_key("laptop", admin=True, file=None) == 0
    out, err = capsys.readouterr()
    [key] = api_keys.parse_key_file(err[err.index("[[keys]]") :])
    assert (key.name, key.admin, key.digest) == ("laptop", True, api_keys.hash_key(out.strip()))
    assert "not shown again" in err


def test_a_key_may_expire_and_have_limits(capsys: pytest.CaptureFixture[str]):
    limits = ["--daily-tokens", "500k", "--requests-per-minute", "60"]
    assert main(["key", "anna", "--expires", "2027-01-31", *limits]) == 0
    err = capsys.readouterr().err
    [key] = api_keys.parse_key_file(err[err.index("[[keys]]") :])
    assert "expires = 2027-01-31T00:00:00Z\n" in err
    assert key.expires == 1_801_353_600
    assert key.limits == UsageLimits(daily_tokens=500_000, requests_per_minute=60)
    with pytest.raises(SystemExit):
        main(["key", "anna", "--expires", "tomorrow"])
    assert "--expires: 'tomorrow' is not a date" in capsys.readouterr().err


def test_a_new_file_is_private(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "keys.toml"
    before = os.umask(0)
    try:
        key = create_key(capsys, "laptop", False, file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    stored_key = asyncio.run(Keyring(file=file).find(key))
    assert stored_key is not None
    assert (stored_key.name, stored_key.admin) == ("laptop", False)


def test_keys_are_appended_to_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "keys.toml"
    file.write_text("# whose is what: ask Ann")  # without a newline
    keys = [create_key(capsys, name, name == "boss", file) for name in ("laptop", "boss")]
    assert file.read_text().startswith("# whose is what: ask Ann\n\n[[keys]]\n")
    stored_keys = [asyncio.run(Keyring(file=file).find(key)) for key in keys]
    assert [(key.name, key.admin) for key in stored_keys if key] == [
        ("laptop", False),
        ("boss", True),
    ]


def test_a_second_key_with_the_same_name_gives_a_notice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    file = tmp_path / "keys.toml"
    make_key("laptop", admin=False, file=file)
    assert "existing key" not in capsys.readouterr().err
    make_key("laptop", admin=False, file=file)
    assert "laptop's existing key stays valid" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "a b", "a\nb", 'a"', "-a", "a" * 65, "é", "[31m"])
def test_a_name_that_is_unsafe_in_a_log_is_rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
):
    with pytest.raises(AppError, match="is not a valid key name"):
        make_key(name, admin=False, file=tmp_path / "keys.toml")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "keys.toml").exists()


@pytest.mark.parametrize("content", [b"[[keys]]\nname = 5\n", b"keys = 3\n", b"\xff", b"a = 1\n"])
def test_an_invalid_file_is_not_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
):
    file = tmp_path / "keys.toml"
    file.write_bytes(content)
    with pytest.raises(AppError, match=r"keys\.toml"):
        make_key("laptop", admin=False, file=file)
    assert file.read_bytes() == content
    assert capsys.readouterr().out == ""


def test_the_command_line_creates_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "keys.toml"
    assert main(["key", "boss", "--admin", "--file", str(file)]) == 0
    secret = capsys.readouterr().out.strip()
    [key] = api_keys.parse_key_file(file.read_text())
    assert (key.name, key.admin, key.digest) == ("boss", True, api_keys.hash_key(secret))
    assert main(["key", "two words"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlxrunner: 'two words' is not a valid key name")


def test_write_errors_are_reported(tmp_path: Path):
    with pytest.raises(AppError, match="cannot be written: no such file"):
        append_key(tmp_path / "nowhere" / "keys.toml", "")
    with pytest.raises(AppError, match="cannot be written: is a directory"):
        append_key(tmp_path, "")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AppError, match="is not a file"):
        append_key(tmp_path / "pipe", "")


def test_a_full_disk_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "keys.toml"
    make_key("laptop", admin=False, file=file)
    capsys.readouterr()
    before, write = file.read_bytes(), os.write
    monkeypatch.setattr(command.os, "write", lambda line, data: write(line, data[:20]))
    with pytest.raises(AppError, match="only part of it was written"):
        make_key("phone", admin=False, file=file)
    assert file.read_bytes() == before
    assert capsys.readouterr().out == ""


def test_concurrent_commands_lose_no_key(tmp_path: Path):
    file = tmp_path / "keys.toml"
    threads = [
        threading.Thread(target=make_key, args=(f"k{n}",), kwargs={"admin": False, "file": file})
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in api_keys.parse_key_file(file.read_text())} == {
        f"k{n}" for n in range(20)
    }
