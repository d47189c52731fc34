"""The tokens that keys have used today, across restarts."""

import asyncio
import errno
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.core.usage import DailyTokens, UsageCounters
from app.serving import usage_file
from app.serving.usage_file import UsageFile, name_usage_file
from tests.rows import rows
from tests.waiting import wait_until_async

DAY = 24 * 60 * 60
NOW = 20_000 * DAY + 3600.0


class Server:
    """One run of a server after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = NOW

    def run(self, tokens: int = 0) -> int:
        """Returns the tokens of the day at the end of a run that used this many."""
        usage = UsageCounters(clock=lambda: self.now)

        async def body() -> None:
            async with UsageFile(self.path, usage).keep():
                if tokens:
                    usage.add_tokens("ada", prompt=tokens, cached=0, generated=0)

        asyncio.run(body())
        return usage.get("ada").today_tokens


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "state" / "usage.json")


def test_a_restart_keeps_the_tokens_of_the_day(server: Server):
    assert server.run(5) == 5
    assert server.run(3) == 8
    assert server.run() == 8
    assert server.path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in server.path.parent.iterdir()] == ["usage.json"]


def test_the_next_day_begins_at_zero(server: Server):
    server.run(5)
    server.now += DAY
    assert server.run(2) == 2
    assert json.loads(server.path.read_text()) == {"daily_tokens": {"ada": [20_001, 2]}}


def test_a_server_without_requests_writes_nothing(server: Server):
    server.run()
    assert not server.path.exists()


@rows(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"daily_tokens": []}',
        '{"daily_tokens": {"ada": 5}}',
        '{"daily_tokens": {"ada": [20000, -1]}}',
        '{"daily_tokens": {"ada": [20000, "1"]}}',
        '{"daily_tokens": {"ada": [20000, true]}}',
        "[" * 100_000,
        "\ud800",
    ],
)
def test_a_damaged_file_counts_from_zero(content: str, tmp_path: Path):
    path = tmp_path / "usage.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    usage_file.log.addHandler(handler)
    try:
        assert Server(path).run(2) == 2
    finally:
        usage_file.log.removeHandler(handler)
    assert [record.levelname for record in logged] == ["WARNING"]
    assert "start at zero" in logged[0].getMessage()


def test_a_folder_that_cannot_be_written_is_reported_once(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def fail(path: Path, counts: Mapping[str, DailyTokens]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(usage_file, "_WRITE_INTERVAL", 0.01)
    monkeypatch.setattr(usage_file, "_write", fail)
    usage = UsageCounters(clock=lambda: NOW)

    async def body() -> None:
        async with UsageFile(server.path, usage).keep():
            usage.add_tokens("ada", prompt=1, cached=0, generated=0)
            await wait_until_async(lambda: bool(caplog.records))
            usage.add_tokens("ada", prompt=1, cached=0, generated=0)

    asyncio.run(body())
    [record] = caplog.records
    assert "No space left on device" in record.getMessage()


def test_counts_are_written_while_the_server_runs(server: Server, monkeypatch: pytest.MonkeyPatch):
    """A process that is killed loses the tokens of the last few seconds."""
    monkeypatch.setattr(usage_file, "_WRITE_INTERVAL", 0.01)
    usage = UsageCounters(clock=lambda: NOW)

    async def body() -> None:
        async with UsageFile(server.path, usage).keep():
            usage.add_tokens("ada", prompt=7, cached=0, generated=2)
            await wait_until_async(server.path.exists)
            assert json.loads(server.path.read_text()) == {"daily_tokens": {"ada": [20_000, 9]}}

    asyncio.run(body())


def test_other_keys_or_another_port_have_another_file(tmp_path: Path):
    names = {
        name_usage_file(tmp_path, keys, port) for keys in ("a.toml", "b.toml") for port in (1, 2)
    }
    assert len(names) == 4


def test_restored_tokens_are_added_to_those_of_this_server():
    usage = UsageCounters(clock=lambda: NOW)
    usage.add_tokens("ada", prompt=1, cached=0, generated=0)
    usage.restore_daily_tokens(
        {"ada": DailyTokens(day=20_000, tokens=5), "bob": DailyTokens(day=19_999, tokens=5)}
    )
    assert usage.get("ada").today_tokens == 6
    assert usage.get("ada").prompt_tokens == 1
    assert usage.get("bob").today_tokens == 0
