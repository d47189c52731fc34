"""Download progress, on a terminal and in a log."""

import io
import re

import pytest

from app.store.hub.progress import DownloadProgress, DownloadStopped, ProgressBarAdapter
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_few_and_complete_lines() -> None:
    out = io.StringIO()
    progress = DownloadProgress(2_000_000, 500_000, out)
    for _ in range(1_000):
        progress.add(1_500)
    progress.close()
    [line] = out.getvalue().splitlines()
    assert line.startswith("2.00 MB of 2.00 MB (100 %), ")
    assert "\r" not in line


def test_a_terminal_gets_one_line_that_is_overwritten() -> None:
    out = Terminal()
    progress = DownloadProgress(1_000, 0, out)
    progress.add(250)
    progress.close()
    assert "\r[#####...............] 250 B of 1.00 kB (25 %), " in out.getvalue()
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()


def test_the_line_is_updated_while_no_data_arrives() -> None:
    """A stalled download showed its last rate forever."""
    out = Terminal()
    progress = DownloadProgress(1_000, 0, out)
    wait_until(lambda: out.getvalue().count("0 B of 1.00 kB") >= 3)
    progress.close()
    assert not out.getvalue().endswith("\n")
    assert out.getvalue().endswith("\r")


def test_a_terminal_shows_which_share_of_the_received_bytes_is_verified() -> None:
    """A pull of a complete model of 40 GB showed 100 % and 0 B/s for minutes."""
    out = Terminal()
    progress = DownloadProgress(1_000, 0, out)
    progress.add(1_000)
    progress.add_verified(250)
    wait_until(
        lambda: "\r[#####...............] verifying 250 B of 1.00 kB (25 %)" in out.getvalue()
    )
    progress.close()
    assert re.search(r"\r\[#{20}\] 1.00 kB of 1.00 kB \(100 %\), [1-9]\S* .*\n$", out.getvalue())


def test_a_damaged_file_is_received_and_verified_again() -> None:
    out = Terminal()
    progress = DownloadProgress(1_000, 0, out)
    progress.add(1_000)
    progress.add_verified(1_000)
    progress.restart(600, "")
    wait_until(lambda: " 400 B of 1.00 kB (40 %), " in out.getvalue())
    progress.add(600)
    wait_until(lambda: "verifying 400 B of 1.00 kB" in out.getvalue())
    progress.close()


def test_a_dumb_terminal_gets_complete_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    progress = DownloadProgress(1_000, 0, out)
    progress.add(250)
    progress.close()
    assert out.getvalue().startswith("250 B of 1.00 kB (25 %)")
    assert "\r" not in out.getvalue()


def test_stopping_the_progress_stops_the_download() -> None:
    progress = DownloadProgress(10, 0, io.StringIO())
    progress.stop()
    with pytest.raises(DownloadStopped), ProgressBarAdapter(progress)(total=10, unit="B") as bar:
        bar.update(1)
    with pytest.raises(DownloadStopped):
        progress.add_verified(1)


def test_a_progress_bar_can_go_back() -> None:
    out = io.StringIO()
    progress = DownloadProgress(10, 0, out)
    with ProgressBarAdapter(progress)() as bar:
        bar.update(10)
        bar.update(-10)
        bar.update(None)
        bar.update(3)
    progress.close()
    assert out.getvalue().startswith("3 B of 10 B (30 %)")


def test_nothing_is_printed_without_progress() -> None:
    out = io.StringIO()
    DownloadProgress(10, 10, out).close()
    assert out.getvalue() == ""
