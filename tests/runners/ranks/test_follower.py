"""Followers repeat the steps of rank 0, and exit with it."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.core.requests import Regex
from app.core.settings import Settings
from app.runners.ranks import follower
from app.runners.ranks.follower import run_follower
from app.runners.ranks.protocol import (
    Compile,
    Compiled,
    FollowerMessage,
    Hello,
    HelloReply,
    RankConnection,
    RankFailed,
    RunStep,
    Stop,
)
from app.runners.ranks.rendezvous import RendezvousInfo
from app.runners.worker_protocol import Cancel, Submit
from tests import tiny
from tests.engine.harness import job
from tests.runners.ranks.gathered import PATIENCE, SETTINGS, FakeGroup, files, launch


class Exited(BaseException):
    """Raised instead of an exit of the process."""


@pytest.fixture(autouse=True)
def exit_statuses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses of attempted exits. Signal handlers are restored."""
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise Exited

    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(follower.logging, "shutdown", lambda: None)
    yield statuses
    for number, handler in handlers:
        signal.signal(number, handler)


@pytest.fixture
def model(tiny_model: Path) -> ModelFiles:
    return files(tiny_model)


def start_leader(
    script: Callable[[RankConnection, Iterator[FollowerMessage]], None],
    monkeypatch: pytest.MonkeyPatch,
    **reply: Any,
) -> threading.Thread:
    """On a thread: accept rank 1, send it a reply, run the script, and disconnect."""
    server = socket.create_server(("127.0.0.1", 0))
    rendezvous = RendezvousInfo(secret="s", port=server.getsockname()[1], host="here")
    monkeypatch.setattr(follower, "join_rank_group", lambda _: FakeGroup(1, rendezvous.encode()))

    def run_script() -> None:
        with server:
            accepted, _ = server.accept()
        connection = RankConnection(accepted)
        connection.set_timeout(PATIENCE)
        replies = connection.read_from_follower()
        hello = next(replies)
        assert isinstance(hello, Hello)
        assert (hello.secret, hello.rank) == ("s", 1)
        connection.send(HelloReply(**reply))
        script(connection, replies)
        connection.close()

    thread = threading.Thread(target=run_script, daemon=True)
    thread.start()
    return thread


def test_a_follower_runs_every_step_until_it_is_stopped(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    messages = list[FollowerMessage]()

    def script(connection: RankConnection, replies: Iterator[FollowerMessage]) -> None:
        connection.send(RunStep(commands=(), checksum=0))
        connection.send(
            Compile(number=3, grammar=Regex(pattern="a+"), stop_ids=frozenset({tiny.END}))
        )
        messages.append(next(replies))
        request = job("a", [1, 2, 3], grammar=Regex(pattern="a+"), seed=1)
        connection.send(
            RunStep(commands=(Submit(job=request), Cancel(job="b", keep=None)), checksum=0)
        )
        connection.send(Stop())
        messages.extend(replies)

    leader_thread = start_leader(script, monkeypatch)
    assert run_follower(launch(1), model, SETTINGS) == 0
    leader_thread.join(PATIENCE)
    assert messages == [Compiled(number=3)]
    assert exit_statuses == []


def test_a_follower_exits_when_rank_0_disconnects(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    start_leader(lambda connection, replies: None, monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), model, SETTINGS)
    assert exit_statuses == [1]


def test_a_follower_exits_when_its_results_differ(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    messages = list[FollowerMessage]()

    def script(connection: RankConnection, replies: Iterator[FollowerMessage]) -> None:
        connection.send(RunStep(commands=(Submit(job=job("a", [1, 2, 3])),), checksum=0))
        connection.send(RunStep(commands=(), checksum=12345))
        messages.extend(replies)

    leader_thread = start_leader(script, monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), model, SETTINGS)
    leader_thread.join(PATIENCE)
    [failure] = messages
    assert isinstance(failure, RankFailed)
    assert "its results differ from those of rank 0" in failure.reason
    assert exit_statuses == [1]


def test_a_failed_load_is_reported_to_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    folder = tiny.write(tmp_path / "odd", num_key_value_heads=1)
    messages = list[FollowerMessage]()

    leader_thread = start_leader(lambda connection, replies: messages.extend(replies), monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), files(folder), SETTINGS)
    leader_thread.join(PATIENCE)
    [failure] = messages
    assert isinstance(failure, RankFailed)
    assert "1 kv_heads cannot be split over 2 ranks" in failure.reason


def test_a_refused_follower_reports_the_reason(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_leader(lambda connection, replies: None, monkeypatch, refused="rank 1 has other weights")
    with pytest.raises(AppError, match="rank 0 refused this rank: rank 1 has other weights"):
        run_follower(launch(1), model, SETTINGS)


@pytest.mark.product
@pytest.mark.parametrize("launcher_dies", [False, True])
def test_a_first_sigterm_waits_for_rank_0_and_a_second_one_does_not(
    launcher_dies: bool,
    model: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    exit_statuses: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready, over = threading.Event(), threading.Event()
    waited: list[bool] = []
    prepare = follower._exit_with_leader

    @contextlib.contextmanager
    def prepare_and_notify(settings: Settings) -> Iterator[None]:
        if launcher_dies:
            monkeypatch.setattr(follower, "watch_launcher", lambda environ, callback: callback())
        with prepare(settings):
            ready.set()
            yield

    def script(connection: RankConnection, replies: Iterator[FollowerMessage]) -> None:
        def send_sigterm() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            # a signal just before a read is handled after that read
            connection.send(HelloReply(refused=None))

        assert ready.wait(PATIENCE)
        send_sigterm()
        # two simultaneous signals count as one
        deadline = time.monotonic() + PATIENCE
        while "exits when rank 0 exits" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        waited.append(exit_statuses == [] and time.monotonic() < deadline)
        send_sigterm()
        over.wait(PATIENCE)

    caplog.set_level("INFO")
    monkeypatch.setattr(follower, "_exit_with_leader", prepare_and_notify)
    start_leader(script, monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), model, SETTINGS)
    over.set()
    assert waited == [True], "the first signal must be logged, and must not exit"
    assert exit_statuses == [128 + signal.SIGTERM]
    # a timer that exits a minute later once ended the test process
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)
