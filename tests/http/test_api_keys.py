"""The file of keys: looked at again while the server runs, and never a way to open the door."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.core.settings import Settings
from app.http import api_keys
from app.http.api_keys import Keyring
from tests.http.test_api_keys_file import BOSS, LAPTOP, PHONE, entry


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, entry("laptop", LAPTOP))
    return path


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch):
    """Every question is a second later than the one before it."""
    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 0.0)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


async def names(ring: Keyring, *shown: str) -> list[str | None]:
    found = [await ring.find(one) for one in shown]
    return [None if key is None else key.name for key in found]


def test_a_key_ring_without_keys_is_not_in_force():
    assert not Keyring().enabled
    assert not Keyring.from_settings(Settings(), {}).enabled


def test_keys_of_the_environment_and_of_the_file_count_together(file: Path):
    variables = {"MLXRUNNER_API_KEY": BOSS}
    ring = Keyring.from_settings(Settings(api_keys=str(file)), variables)
    assert ring.enabled
    assert not variables
    assert asyncio.run(names(ring, BOSS, LAPTOP, PHONE)) == ["owner", "laptop", None]


def test_a_key_of_both_is_an_error_at_the_start(file: Path):
    with pytest.raises(AppError, match="owner and laptop have the same key"):
        Keyring.from_settings(Settings(api_keys=str(file)), {"MLXRUNNER_API_KEY": LAPTOP})


def test_keys_come_and_go_without_a_restart(file: Path, caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        ring = Keyring(file=file)
        assert await names(ring, LAPTOP, PHONE) == ["laptop", None]
        with caplog.at_level(logging.INFO):
            write(file, entry("laptop", LAPTOP) + entry("phone", PHONE))
            assert await names(ring, LAPTOP, PHONE) == ["laptop", "phone"]
            write(file, entry("phone", PHONE))
            assert await names(ring, LAPTOP, PHONE) == [None, "phone"]
        assert len(caplog.messages) == 2
        assert PHONE not in caplog.text

    asyncio.run(run())


def test_a_file_that_takes_the_place_of_the_old_one_is_noticed(file: Path, tmp_path: Path):
    """As a secret that is mounted changes: by a link to another folder."""

    async def run() -> None:
        before, after = tmp_path / "before.toml", tmp_path / "after.toml"
        write(before, entry("laptop", LAPTOP))
        write(after, entry("phones", PHONE))
        os.utime(after, ns=(before.stat().st_atime_ns, before.stat().st_mtime_ns))
        link = tmp_path / "link"
        link.symlink_to(before)
        ring = Keyring(file=link)
        assert await names(ring, LAPTOP, PHONE) == ["laptop", None]
        (tmp_path / "next").symlink_to(after)
        (tmp_path / "next").replace(link)
        assert await names(ring, LAPTOP, PHONE) == [None, "phones"]

    asyncio.run(run())


def test_the_file_is_looked_at_once_a_second_at_most(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 1000.0)
    looks: list[Path] = []
    real = api_keys.read_if_changed

    def counting(path: Path, seen: api_keys.FileStamp) -> api_keys.KeyFileSnapshot | None:
        looks.append(path)
        return real(path, seen)

    monkeypatch.setattr(api_keys, "read_if_changed", counting)

    async def run() -> None:
        ring = Keyring(file=file)
        await asyncio.gather(*(ring.find(LAPTOP) for _ in range(50)))
        assert await names(ring, LAPTOP) == ["laptop"]

    asyncio.run(run())
    assert len(looks) == 1


def spoil(file: Path, how: str) -> None:
    match how:
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
            raise AssertionError(how)


def mend(file: Path) -> None:
    file.parent.chmod(0o700)
    if file.is_dir():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    write(file, entry("phone", PHONE))


WAYS = [
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


@pytest.mark.parametrize("how", WAYS)
def test_a_file_that_breaks_changes_nothing_but_the_log(
    how: str, file: Path, caplog: pytest.LogCaptureFixture
):
    async def run() -> None:
        ring = Keyring(file=file)
        if how == "in a folder that is everybody's":
            os.utime(file, ns=(1, 1))  # a folder's permissions are no change of the file
        spoil(file, how)
        for _ in range(3):
            assert await names(ring, LAPTOP, PHONE, "") == ["laptop", None, None]
            assert ring.enabled
        mend(file)
        assert await names(ring, LAPTOP, PHONE) == [None, "phone"]

    asyncio.run(run())
    [told] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(file) in told.getMessage()
    assert "; keeping the previous keys" in told.getMessage()
    assert LAPTOP not in caplog.text
    assert PHONE not in caplog.text


@pytest.mark.parametrize("how", WAYS)
def test_a_file_that_is_broken_at_the_start_ends_it(how: str, file: Path):
    spoil(file, how)
    with pytest.raises(AppError, match="--api-keys: ") as caught:
        Keyring(file=file)
    assert str(file) in caught.value.message
    assert PHONE not in caught.value.message


def test_a_file_that_others_can_read_is_used_and_told_of(
    file: Path, caplog: pytest.LogCaptureFixture
):
    file.chmod(0o640)
    assert Keyring(file=file).enabled
    assert "is readable by other users" in caplog.text
    assert "chmod 600" in caplog.text


def test_a_disk_that_does_not_answer_keeps_nobody_waiting_for_long(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api_keys, "_RELOAD_TIMEOUT", 0.1)
    awake = threading.Event()

    def stuck(path: Path, seen: api_keys.FileStamp) -> None:
        awake.wait(20)

    async def run() -> None:
        ring = Keyring(file=file)
        monkeypatch.setattr(api_keys, "read_if_changed", stuck)
        begun = time.monotonic()
        for _ in range(20):
            assert await names(ring, LAPTOP, PHONE) == ["laptop", None]
        assert time.monotonic() - begun < 5
        awake.set()

    asyncio.run(run())


def test_a_client_that_leaves_does_not_stop_the_look_of_the_others(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api_keys, "_RELOAD_INTERVAL", 1000.0)
    monkeypatch.setattr(api_keys, "_RELOAD_TIMEOUT", 20.0)
    seen, real = threading.Event(), api_keys.read_if_changed

    def slow(path: Path, known: api_keys.FileStamp) -> api_keys.KeyFileSnapshot | None:
        seen.wait(20)
        return real(path, known)

    async def run() -> None:
        ring = Keyring(file=file)
        write(file, entry("phone", PHONE))
        monkeypatch.setattr(api_keys, "read_if_changed", slow)
        first = asyncio.create_task(ring.find(PHONE))
        second = asyncio.create_task(ring.find(PHONE))
        await asyncio.sleep(0.01)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        seen.set()
        found = await second
        assert found is not None
        assert found.name == "phone"

    asyncio.run(run())


def test_a_key_takes_no_longer_to_find_at_the_end_of_a_long_list():
    """Against a comparison that stops where it differs: a list of 2,000 is walked to its end, so
    the first, the last and none take about as long."""
    known = [
        api_keys.ApiKey(name=f"k{n}", digest=api_keys.hash_key(f"key {n}")) for n in range(2000)
    ]

    def seconds(shown: str) -> float:
        best = float("inf")
        for _ in range(15):
            begun = time.perf_counter()
            api_keys.find_key(known, shown)
            best = min(best, time.perf_counter() - begun)
        return best

    took = [seconds(shown) for shown in ("key 0", "key 1999", "none")]
    assert max(took) < 2 * min(took)
