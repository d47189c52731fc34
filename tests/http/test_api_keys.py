"""The key file: reloaded while the server runs, and never a way to disable authentication."""

import asyncio
import contextlib
import logging
import os
import threading
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.core.settings import Settings
from app.http import api_keys
from app.http.api_keys import Keyring
from tests.http.test_api_keys_file import BOSS, LAPTOP, PHONE, entry
from tests.server_process import TIMEOUT
from tests.waiting import wait_until_async


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, entry("laptop", LAPTOP))
    return path


@pytest.fixture(autouse=True)
def reload_always(monkeypatch: pytest.MonkeyPatch):
    """Check the file at every request, not once a second."""
    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 0.0)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


async def find_names(keyring: Keyring, *keys: str) -> list[str | None]:
    found = [await keyring.find(key) for key in keys]
    return [None if key is None else key.name for key in found]


def test_a_keyring_without_keys_is_disabled():
    assert not Keyring().enabled
    assert not Keyring.from_settings(Settings(), {}).enabled


def test_keys_of_the_environment_and_of_the_file_are_merged(file: Path):
    variables = {"MLXRUNNER_API_KEY": BOSS}
    keyring = Keyring.from_settings(Settings(api_keys=str(file)), variables)
    assert keyring.enabled
    assert not variables
    assert asyncio.run(find_names(keyring, BOSS, LAPTOP, PHONE)) == ["owner", "laptop", None]


def test_the_same_key_in_both_is_a_startup_error(file: Path):
    with pytest.raises(AppError, match="owner and laptop have the same key"):
        Keyring.from_settings(Settings(api_keys=str(file)), {"MLXRUNNER_API_KEY": LAPTOP})


def test_keys_are_added_and_removed_without_a_restart(file: Path, caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        keyring = Keyring(file=file)
        assert await find_names(keyring, LAPTOP, PHONE) == ["laptop", None]
        with caplog.at_level(logging.INFO):
            write(file, entry("laptop", LAPTOP) + entry("phone", PHONE))
            assert await find_names(keyring, LAPTOP, PHONE) == ["laptop", "phone"]
            write(file, entry("phone", PHONE))
            assert await find_names(keyring, LAPTOP, PHONE) == [None, "phone"]
        assert len(caplog.messages) == 2
        assert PHONE not in caplog.text

    asyncio.run(run())


def test_a_replaced_file_is_reloaded(file: Path, tmp_path: Path):
    """Mounted secrets change this way: through a link to a different folder."""

    async def run() -> None:
        before, after = tmp_path / "before.toml", tmp_path / "after.toml"
        write(before, entry("laptop", LAPTOP))
        write(after, entry("phones", PHONE))
        os.utime(after, ns=(before.stat().st_atime_ns, before.stat().st_mtime_ns))
        link = tmp_path / "link"
        link.symlink_to(before)
        keyring = Keyring(file=link)
        assert await find_names(keyring, LAPTOP, PHONE) == ["laptop", None]
        (tmp_path / "next").symlink_to(after)
        (tmp_path / "next").replace(link)
        assert await find_names(keyring, LAPTOP, PHONE) == [None, "phones"]

    asyncio.run(run())


def test_the_file_is_checked_at_most_once_a_second(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 1000.0)
    reads: list[Path] = []
    real = api_keys.read_if_changed

    def counted_read(path: Path, stamp: api_keys.FileStamp) -> api_keys.KeyFileSnapshot | None:
        reads.append(path)
        return real(path, stamp)

    monkeypatch.setattr(api_keys, "read_if_changed", counted_read)

    async def run() -> None:
        keyring = Keyring(file=file)
        await asyncio.gather(*(keyring.find(LAPTOP) for _ in range(50)))
        assert await find_names(keyring, LAPTOP) == ["laptop"]

    asyncio.run(run())
    assert len(reads) == 1


def break_file(file: Path, damage: str) -> None:
    match damage:
        case "gone":
            file.unlink()
        case "empty":
            write(file, "")
        case "half written":
            write(file, entry("phone", PHONE)[:40])
        case "not text":
            file.write_bytes(b"\xff\xfe")
        case "a folder":
            file.unlink()
            file.mkdir()
        case "a pipe":
            file.unlink()
            os.mkfifo(file, 0o600)
        case "huge":
            write(file, entry("phone", PHONE) + "#" * (5 << 20))
        case "writable by its group":
            write(file, entry("phone", PHONE))
            file.chmod(0o620)
        case "writable by all":
            write(file, entry("phone", PHONE))
            file.chmod(0o602)
        case "in a folder that is everybody's":
            write(file, entry("phone", PHONE))
            file.parent.chmod(0o777)
        case "with one key twice":
            write(file, entry("phone", PHONE) + entry("boss", PHONE, "admin = true"))
        case _:
            raise AssertionError(damage)


def repair_file(file: Path) -> None:
    file.parent.chmod(0o700)
    if file.is_dir():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    write(file, entry("phone", PHONE))


DAMAGES = [
    "gone",
    "empty",
    "half written",
    "not text",
    "a folder",
    "a pipe",
    "huge",
    "writable by its group",
    "writable by all",
    "in a folder that is everybody's",
    "with one key twice",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_previous_keys_are_kept_if_the_file_breaks(
    damage: str, file: Path, caplog: pytest.LogCaptureFixture
):
    async def run() -> None:
        keyring = Keyring(file=file)
        if damage == "in a folder that is everybody's":
            os.utime(file, ns=(1, 1))  # changed permissions of the folder do not change the file
        break_file(file, damage)
        for _ in range(3):
            assert await find_names(keyring, LAPTOP, PHONE, "") == ["laptop", None, None]
            assert keyring.enabled
        repair_file(file)
        assert await find_names(keyring, LAPTOP, PHONE) == [None, "phone"]

    asyncio.run(run())
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(file) in record.getMessage()
    assert "; keeping the previous keys" in record.getMessage()
    assert LAPTOP not in caplog.text
    assert PHONE not in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_a_startup_error(damage: str, file: Path):
    break_file(file, damage)
    with pytest.raises(AppError, match="--api-keys: ") as caught:
        Keyring(file=file)
    assert str(file) in caught.value.message
    assert PHONE not in caught.value.message


def test_a_file_readable_by_others_is_used_with_a_warning(
    file: Path, caplog: pytest.LogCaptureFixture
):
    file.chmod(0o640)
    assert Keyring(file=file).enabled
    assert "is readable by other users" in caplog.text
    assert "chmod 600" in caplog.text


def test_requests_do_not_wait_for_a_hanging_disk(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api_keys, "_RELOAD_TIMEOUT", 0.1)
    released, finished = threading.Event(), threading.Event()

    def blocked_read(path: Path, stamp: api_keys.FileStamp) -> None:
        released.wait(TIMEOUT)
        finished.set()

    async def run() -> None:
        keyring = Keyring(file=file)
        monkeypatch.setattr(api_keys, "read_if_changed", blocked_read)
        for _ in range(20):
            assert await find_names(keyring, LAPTOP, PHONE) == ["laptop", None]
        assert not finished.is_set()
        released.set()

    asyncio.run(run())


def test_a_cancelled_request_does_not_cancel_the_reload(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 1000.0)
    monkeypatch.setattr(api_keys, "_RELOAD_TIMEOUT", TIMEOUT)
    reading, released, real = threading.Event(), threading.Event(), api_keys.read_if_changed

    def slow_read(path: Path, stamp: api_keys.FileStamp) -> api_keys.KeyFileSnapshot | None:
        reading.set()
        released.wait(TIMEOUT)
        return real(path, stamp)

    async def run() -> None:
        keyring = Keyring(file=file)
        write(file, entry("phone", PHONE))
        monkeypatch.setattr(api_keys, "read_if_changed", slow_read)
        first = asyncio.create_task(keyring.find(PHONE))
        second = asyncio.create_task(keyring.find(PHONE))
        await wait_until_async(reading.is_set)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        released.set()
        found = await second
        assert found is not None
        assert found.name == "phone"

    asyncio.run(run())
