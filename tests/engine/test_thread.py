"""The engine thread, the only one that uses MLX: start, commands, errors and stop."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.jobs import (
    IDLE,
    Ended,
    EngineFailed,
    EngineReady,
    GetPrefixSnapshot,
    Job,
    LoadProgress,
    PrefixSnapshot,
    StepOutput,
    Token,
)
from app.engine.loop import Loop
from app.engine.thread import EngineThread
from tests import tiny
from tests.engine.harness import job, make_loop, tiny_model
from tests.waiting import wait_until

PATIENCE = 20


class MessageLog:
    """The messages that a thread posted."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()

    def next(self, kind: type[Any]) -> Any:
        """The next message, which must be of that kind."""
        message = self.messages.get(timeout=PATIENCE)
        assert isinstance(message, kind), message
        return message

    def collect_updates(self, name: str) -> list[Any]:
        """All updates of one job."""
        updates: list[Any] = []
        while not updates or not isinstance(updates[-1], Ended):
            updates += [u for u in self.next(StepOutput).updates if u.job_id == name]
        return updates


StartThread = Callable[[Callable[[Any], Loop]], tuple[EngineThread, MessageLog]]


@pytest.fixture
def start_thread() -> Iterator[StartThread]:
    threads: list[EngineThread] = []
    # tests of a process exit leave their threads running
    others = set(threading.enumerate())

    def start(load: Callable[[Any], Loop]) -> tuple[EngineThread, MessageLog]:
        log = MessageLog()
        thread = EngineThread(load, log.messages.put, check_invariants=True)
        thread.start()
        threads.append(thread)
        return thread, log

    yield start
    for thread in threads:
        thread.stop()
        assert thread.join(PATIENCE), "the thread does not end"
    left = set(threading.enumerate()) - others
    assert not [t for t in left if t.name == "mlx-engine"]


def load_tiny(report: Callable[[int, int], None]) -> Loop:
    report(50, 1234)
    return make_loop(tiny_model())


def test_a_snapshot_of_the_cache_needs_no_step(start_thread: StartThread) -> None:
    """An idle engine is asked once per second while a client watches it."""
    thread, log = start_thread(load_tiny)
    log.next(LoadProgress)
    log.next(EngineReady)
    thread.submit(job("a", b"hello"))
    log.collect_updates("a")
    taken: queue.Queue[PrefixSnapshot | AppError] = queue.Queue()
    wait_until(lambda: thread.heartbeat().stage == IDLE)
    while not log.messages.empty():
        log.next(StepOutput)
    for _ in range(3):
        thread.call(GetPrefixSnapshot(), taken.put)
        snapshot = taken.get(timeout=PATIENCE)
        assert isinstance(snapshot, PrefixSnapshot)
        assert sum(node.tokens for node in snapshot.nodes) >= len(b"hello")
    assert log.messages.empty(), "the idle engine made a step"


def test_a_submitted_job_produces_tokens(start_thread: StartThread) -> None:
    thread, log = start_thread(load_tiny)
    assert log.next(LoadProgress) == LoadProgress(progress=50, allocated_bytes=1234)
    ready = log.next(EngineReady)
    assert ready.stats.allocated_bytes > 0
    assert ready.capacity.parallel == 1
    thread.submit(job("a", b"hello"))
    updates = log.collect_updates("a")
    assert sum(isinstance(u, Token) for u in updates) > 0
    assert updates[-1].reason in {"length", "stop"}


def load_long(report: Callable[[int, int], None]) -> Loop:
    return make_loop(tiny_model(), context=tiny.LONG)


def endless(name: str) -> Job:
    """A job that does not end by itself in the loop of `load_long`."""
    return job(name, b"hello", max_tokens=tiny.LONG // 2, stop_token_ids=frozenset[int]())


def test_a_cancelled_job_ends_and_the_next_one_runs(start_thread: StartThread) -> None:
    thread, log = start_thread(load_long)
    log.next(EngineReady)
    thread.submit(endless("a"))
    log.next(StepOutput)
    thread.cancel("a")
    assert log.collect_updates("a")[-1].reason == "cancelled"
    thread.submit(job("b", b"hello"))
    assert log.collect_updates("b")[-1].reason != "cancelled"


def test_a_failed_load_ends_the_thread_with_the_reason(start_thread: StartThread) -> None:
    def fail(_: Any) -> Loop:
        raise AppError(ErrorKind.MODEL_FILES, "planted")

    thread, log = start_thread(fail)
    assert log.next(EngineFailed) == EngineFailed(kind=ErrorKind.MODEL_FILES, message="planted")
    assert thread.join(PATIENCE)


def test_an_internal_error_is_reported(start_thread: StartThread) -> None:
    class Faulty(Loop):
        def step(self) -> StepOutput:
            raise AssertionError("planted")

    def load(_: Any) -> Loop:
        loop = make_loop(tiny_model())
        loop.__class__ = Faulty
        return loop

    thread, log = start_thread(load)
    log.next(EngineReady)
    thread.submit(job("a", b"hello"))
    failed = log.next(EngineFailed)
    assert (failed.message, failed.is_internal_error) == ("AssertionError: planted", True)
    assert thread.join(PATIENCE)


def test_running_out_of_memory_is_reported(start_thread: StartThread) -> None:
    def run_out_of_memory(_: Any) -> Loop:
        raise MemoryError

    _, log = start_thread(run_out_of_memory)
    assert log.next(EngineFailed).message == "MemoryError: out of memory"


def test_a_system_exit_is_reported(start_thread: StartThread) -> None:
    """A thread ends silently on a SystemExit from a library, and the load would stay at 0 % for
    ever."""

    def exit_process(_: Any) -> Loop:
        raise SystemExit(3)

    thread, log = start_thread(exit_process)
    assert log.next(EngineFailed) == EngineFailed(
        kind=ErrorKind.ENGINE, message="SystemExit: 3", is_internal_error=True
    )
    assert thread.join(PATIENCE)


def test_stopping_while_a_job_runs_ends_the_thread(start_thread: StartThread) -> None:
    thread, log = start_thread(load_long)
    thread.submit(endless("a"))
    log.next(EngineReady)
    log.next(StepOutput)
    thread.stop()
    assert thread.join(PATIENCE)


class PausedLoop(Loop):
    """A loop that pauses in each step, after announcing a stage, until its gate opens."""

    gate: threading.Event
    reached: threading.Event

    def step(self) -> StepOutput:
        self.on_stage("decode, batch size 8")
        self.reached.set()
        assert self.gate.wait(PATIENCE)
        return super().step()


def test_the_heartbeat_gives_the_stage_and_its_start(start_thread: StartThread) -> None:
    gate, reached = threading.Event(), threading.Event()

    def load(_: Any) -> Loop:
        loop = make_loop(tiny_model())
        loop.__class__ = PausedLoop
        loop.gate, loop.reached = gate, reached  # pyright: ignore[reportAttributeAccessIssue]  # it is a PausedLoop now
        return loop

    thread, log = start_thread(load)
    log.next(EngineReady)
    wait_until(lambda: thread.heartbeat().stage == IDLE)
    before = time.monotonic_ns()
    thread.submit(job("a", b"hello"))
    assert reached.wait(PATIENCE)
    paused = thread.heartbeat()
    assert paused.stage == "decode, batch size 8"
    assert before <= paused.timestamp_ns <= time.monotonic_ns()
    assert thread.heartbeat() == paused, "without progress the heartbeat stays the same"
    gate.set()
    log.collect_updates("a")
    wait_until(lambda: thread.heartbeat().stage == IDLE)
    assert thread.heartbeat().timestamp_ns > paused.timestamp_ns


def test_the_loop_announces_its_stages(start_thread: StartThread) -> None:
    stages: set[str] = set()

    def load(_: Any) -> Loop:
        return make_loop(tiny_model())

    thread, log = start_thread(load)
    thread.submit(
        job("a", b"hello world, it is me", max_tokens=200, stop_token_ids=frozenset[int]())
    )
    log.next(EngineReady)
    wait_until(
        lambda: stages.add(thread.heartbeat().stage) or any("decode" in s for s in stages),
        interval=0.001,
    )
    thread.cancel("a")


def test_a_probe_does_not_end_the_idle_time() -> None:
    """The memory of an idle engine stayed wired, because the process was probed every second."""
    idle: list[float] = []

    def load(report: Callable[[int, int], None]) -> Loop:
        loop = make_loop(tiny_model())

        def maintain_memory(idle_seconds: float) -> bool:
            idle.append(idle_seconds)
            return False

        loop.maintain_memory = maintain_memory  # type: ignore[method-assign]
        return loop

    thread = EngineThread(load, lambda _: None, maintenance_interval=0.05)
    thread.start()
    taken = threading.Event()

    def probe() -> bool:
        taken.clear()
        thread.probe(taken.set)
        assert taken.wait(PATIENCE)
        return bool(idle) and idle[-1] > 0.2

    wait_until(probe, interval=0.01)
    thread.stop()
    assert thread.join(PATIENCE)
