"""A worker whose parent does not read, on a thread of the test."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app import store
from app.core.jobs import EngineReady, StepOutput
from app.core.settings import Settings
from app.runners import channel
from app.runners.channel import FrameReader, encode_frame
from app.runners.worker import Worker
from app.runners.worker_protocol import WORKER_EVENT, Submit, WorkerEvent, WorkerInit
from tests.runners.contract import endless
from tests.waiting import wait_until


@contextmanager
def run_worker(folder: Path) -> Iterator[tuple[Worker, socket.socket]]:
    """A running worker, and the parent's end of its channel."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the minimum
    init = WorkerInit(parent_pid=0, settings=Settings(), files=store.resolve(str(folder)))
    worker = Worker(init, theirs)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker, ours
    finally:
        ours.close()
        thread.join()
        assert worker.stop_engine()


def test_the_engine_waits_while_the_parent_does_not_read(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_MAX_UNSENT_BYTES", 10_000)
    reader: FrameReader[WorkerEvent] = FrameReader(WORKER_EVENT)
    steps = 0

    def read(parent: socket.socket) -> list[WorkerEvent]:
        nonlocal steps
        events = list(reader.feed(parent.recv(1 << 16)))
        steps = max([steps, *(e.stats.steps for e in events if isinstance(e, StepOutput))])
        return events

    with run_worker(long_model) as (worker, parent):
        while not any(isinstance(event, EngineReady) for event in read(parent)):
            pass
        parent.sendall(encode_frame(Submit(job=endless("a"))))
        wait_until(lambda: not worker._parent_reads.is_set())
        time.sleep(0.2)  # time for many steps, if the engine did not wait
        assert worker._channel is not None
        unsent, last = len(worker._channel._unsent), worker._stats.steps
        assert unsent < 12_000
        time.sleep(0.2)
        assert (len(worker._channel._unsent), worker._stats.steps) == (unsent, last)
        while steps <= last:  # the engine continues, and nothing is lost
            read(parent)
        wait_until(lambda: not worker._parent_reads.is_set())
    # the end of the channel ends the wait, or the engine would not have stopped
