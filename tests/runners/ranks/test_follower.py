"""Other ranks do what rank 0 says, and end with it."""

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
    Cancel,
    Compile,
    Compiled,
    FollowerMessage,
    Hello,
    HelloReply,
    RankConnection,
    RankFailed,
    RunStep,
    Stop,
    Submit,
)
from app.runners.ranks.rendezvous import RendezvousInfo
from tests import tiny
from tests.engine.harness import job
from tests.runners.ranks.gathered import PATIENCE, SETTINGS, FakeGroup, files, launch


class Exited(BaseException):
    """In place of the end of the process."""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which it would have ended at once; signal handlers are put back."""
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise Exited

    kept = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(follower.logging, "shutdown", lambda: None)
    yield statuses
    for number, handler in kept:
        signal.signal(number, handler)


@pytest.fixture
def model(tiny_model: Path) -> ModelFiles:
    return files(tiny_model)


def rank_0(
    says: Callable[[RankConnection, Iterator[FollowerMessage]], None],
    monkeypatch: pytest.MonkeyPatch,
    **welcome: Any,
) -> threading.Thread:
    """Waits for rank 1 on a thread, welcomes it, says what is to be said, and is gone."""
    server = socket.create_server(("127.0.0.1", 0))
    meeting = RendezvousInfo(secret="s", port=server.getsockname()[1], host="here")
    monkeypatch.setattr(follower, "join_rank_group", lambda _: FakeGroup(1, meeting.encode()))

    def speak() -> None:
        with server:
            connected, _ = server.accept()
        line = RankConnection(connected)
        line.set_timeout(PATIENCE)
        answers = line.read_from_follower()
        hello = next(answers)
        assert isinstance(hello, Hello)
        assert (hello.secret, hello.rank) == ("s", 1)
        line.send_to_follower(HelloReply(**welcome))
        says(line, answers)
        line.close()

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    return thread


def test_it_takes_every_step_until_it_is_stopped(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch, process: list[int]
) -> None:
    heard = list[FollowerMessage]()

    def says(line: RankConnection, answers: Iterator[FollowerMessage]) -> None:
        line.send_to_follower(RunStep(commands=(), checksum=0))
        line.send_to_follower(
            Compile(number=3, grammar=Regex(pattern="a+"), stop_ids=frozenset({tiny.END}))
        )
        heard.append(next(answers))
        asked = job("a", [1, 2, 3], grammar=Regex(pattern="a+"), seed=1)
        line.send_to_follower(
            RunStep(commands=(Submit(job=asked), Cancel(job="b", keep=None)), checksum=0)
        )
        line.send_to_follower(Stop())
        heard.extend(answers)

    zero = rank_0(says, monkeypatch)
    assert run_follower(launch(1), model, SETTINGS) == 0
    zero.join(PATIENCE)
    assert heard == [Compiled(number=3)]
    assert process == []


def test_it_ends_when_rank_0_is_gone(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch, process: list[int]
) -> None:
    rank_0(lambda line, answers: None, monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), model, SETTINGS)
    assert process == [1]


def test_it_gives_up_where_it_computes_other_things(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch, process: list[int]
) -> None:
    heard = list[FollowerMessage]()

    def says(line: RankConnection, answers: Iterator[FollowerMessage]) -> None:
        line.send_to_follower(RunStep(commands=(Submit(job=job("a", [1, 2, 3])),), checksum=0))
        line.send_to_follower(RunStep(commands=(), checksum=12345))
        heard.extend(answers)

    zero = rank_0(says, monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), model, SETTINGS)
    zero.join(PATIENCE)
    [lost] = heard
    assert isinstance(lost, RankFailed)
    assert "its results differ from those of rank 0" in lost.reason
    assert process == [1]


def test_a_model_that_cannot_be_loaded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: list[int]
) -> None:
    folder = tiny.write(tmp_path / "odd", num_key_value_heads=1)
    heard = list[FollowerMessage]()

    zero = rank_0(lambda line, answers: heard.extend(answers), monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), files(folder), SETTINGS)
    zero.join(PATIENCE)
    [lost] = heard
    assert isinstance(lost, RankFailed)
    assert "1 kv_heads cannot be split over 2 ranks" in lost.reason


def test_who_is_refused_says_why(model: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0(lambda line, answers: None, monkeypatch, refused="rank 1 has other weights")
    with pytest.raises(AppError, match="refused by rank 0: rank 1 has other weights"):
        run_follower(launch(1), model, SETTINGS)


@pytest.mark.parametrize("launcher_dies", [False, True])
def test_told_to_end_it_waits_for_rank_0_and_told_twice_for_nobody(
    launcher_dies: bool,
    model: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    process: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready, over = threading.Event(), threading.Event()
    prepare = follower._exit_with_leader

    @contextlib.contextmanager
    def prepared(settings: Settings) -> Iterator[None]:
        if launcher_dies:
            monkeypatch.setattr(follower, "watch_launcher", lambda environ, told: told())
        with prepare(settings):
            ready.set()
            yield

    def says(line: RankConnection, answers: Iterator[FollowerMessage]) -> None:
        def tell_to_end() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            # one that comes when it is just about to read is handled when it has read something
            line.send_to_follower(HelloReply(refused=None))

        assert ready.wait(PATIENCE)
        tell_to_end()
        # two at once are one
        deadline = time.monotonic() + PATIENCE
        while "exits when rank 0 does" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process == []
        tell_to_end()
        over.wait(PATIENCE)

    caplog.set_level("INFO")
    monkeypatch.setattr(follower, "_exit_with_leader", prepared)
    rank_0(says, monkeypatch)
    with pytest.raises(Exited):
        run_follower(launch(1), model, SETTINGS)
    over.set()
    assert process == [128 + signal.SIGTERM]
    # what would have ended it a minute later, and did end whoever ran this test
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)
