"""The one thread that touches MLX: it starts, obeys, survives and ends."""

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
    Job,
    LoadProgress,
    StepOutput,
    Token,
)
from app.engine.loop import Loop
from app.engine.thread import EngineThread
from tests import tiny
from tests.engine.harness import job, make_loop, tiny_model

PATIENCE = 20


class Heard:
    """What a thread posted."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()

    def next(self, kind: type[Any]) -> Any:
        """The next message, which must be of that kind."""
        message = self.messages.get(timeout=PATIENCE)
        assert isinstance(message, kind), message
        return message

    def until_end_of(self, name: str) -> list[Any]:
        """All updates of one job."""
        updates: list[Any] = []
        while not updates or not isinstance(updates[-1], Ended):
            updates += [u for u in self.next(StepOutput).updates if u.job_id == name]
        return updates


Started = Callable[[Callable[[Any], Loop]], tuple[EngineThread, Heard]]


@pytest.fixture
def started() -> Iterator[Started]:
    threads: list[EngineThread] = []
    # what ends its process on purpose leaves its threads in that of the tests
    others = set(threading.enumerate())

    def start(load: Callable[[Any], Loop]) -> tuple[EngineThread, Heard]:
        heard = Heard()
        thread = EngineThread(load, heard.messages.put, check_invariants=True)
        thread.start()
        threads.append(thread)
        return thread, heard

    yield start
    for thread in threads:
        thread.stop()
        assert thread.join(PATIENCE), "the thread does not end"
    left = set(threading.enumerate()) - others
    assert not [t for t in left if t.name == "mlx-engine"]


def load_tiny(report: Callable[[int, int], None]) -> Loop:
    report(50, 1234)
    return make_loop(tiny_model())


def test_a_job_goes_down_and_its_tokens_come_up(started: Started) -> None:
    thread, heard = started(load_tiny)
    assert heard.next(LoadProgress) == LoadProgress(progress=50, allocated_bytes=1234)
    ready = heard.next(EngineReady)
    assert ready.stats.allocated_bytes > 0
    assert ready.capacity.parallel == 1
    thread.submit(job("a", b"hello"))
    updates = heard.until_end_of("a")
    assert sum(isinstance(u, Token) for u in updates) > 0
    assert updates[-1].reason in {"length", "stop"}


def load_long(report: Callable[[int, int], None]) -> Loop:
    return make_loop(tiny_model(), context=tiny.LONG)


def endless(name: str) -> Job:
    """One that never ends by itself in the loop of `load_long`."""
    return job(name, b"hello", max_tokens=tiny.LONG // 2, stop_token_ids=frozenset[int]())


def test_a_cancelled_job_ends_and_the_next_one_runs(started: Started) -> None:
    thread, heard = started(load_long)
    heard.next(EngineReady)
    thread.submit(endless("a"))
    heard.next(StepOutput)
    thread.cancel("a")
    assert heard.until_end_of("a")[-1].reason == "cancelled"
    thread.submit(job("b", b"hello"))
    assert heard.until_end_of("b")[-1].reason != "cancelled"


def test_a_model_that_cannot_be_loaded_ends_the_thread_with_the_reason(started: Started) -> None:
    def fail(_: Any) -> Loop:
        raise AppError(ErrorKind.MODEL_FILES, "planted")

    thread, heard = started(fail)
    assert heard.next(EngineFailed) == EngineFailed(kind=ErrorKind.MODEL_FILES, message="planted")
    assert thread.join(PATIENCE)


def test_a_fault_of_ours_is_told_too(started: Started) -> None:
    class Faulty(Loop):
        def step(self) -> StepOutput:
            raise AssertionError("planted")

    def load(_: Any) -> Loop:
        loop = make_loop(tiny_model())
        loop.__class__ = Faulty
        return loop

    thread, heard = started(load)
    heard.next(EngineReady)
    thread.submit(job("a", b"hello"))
    failed = heard.next(EngineFailed)
    assert (failed.message, failed.is_internal_error) == ("AssertionError: planted", True)
    assert thread.join(PATIENCE)


def test_want_of_memory_is_told_in_words(started: Started) -> None:
    def starves(_: Any) -> Loop:
        raise MemoryError

    _, heard = started(starves)
    assert heard.next(EngineFailed).message == "MemoryError: out of memory"


def test_a_thread_that_is_told_to_exit_says_so_before_it_does(started: Started) -> None:
    """By a library: threads end on SystemExit without a word, and then a load would go on for
    ever, at 0 %."""

    def exits(_: Any) -> Loop:
        raise SystemExit(3)

    thread, heard = started(exits)
    assert heard.next(EngineFailed) == EngineFailed(
        kind=ErrorKind.ENGINE, message="SystemExit: 3", is_internal_error=True
    )
    assert thread.join(PATIENCE)


def test_stopping_while_a_job_runs_ends_the_thread(started: Started) -> None:
    thread, heard = started(load_long)
    thread.submit(endless("a"))
    heard.next(EngineReady)
    heard.next(StepOutput)
    thread.stop()
    assert thread.join(PATIENCE)


class Held(Loop):
    """A loop that stops amid each step, at what was announced last, until it is let go."""

    gate: threading.Event
    reached: threading.Event

    def step(self) -> StepOutput:
        self.on_stage("decode of 8 sequences")
        self.reached.set()
        assert self.gate.wait(PATIENCE)
        return super().step()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_heartbeat_tells_what_the_thread_is_at_and_since_when(started: Started) -> None:
    gate, reached = threading.Event(), threading.Event()

    def load(_: Any) -> Loop:
        loop = make_loop(tiny_model())
        loop.__class__ = Held
        loop.gate, loop.reached = gate, reached  # pyright: ignore[reportAttributeAccessIssue]  # it is a Held now
        return loop

    thread, heard = started(load)
    heard.next(EngineReady)
    until(lambda: thread.heartbeat().stage == IDLE)
    before = time.monotonic_ns()
    thread.submit(job("a", b"hello"))
    assert reached.wait(PATIENCE)
    held = thread.heartbeat()
    assert held.stage == "decode of 8 sequences"
    assert before <= held.timestamp_ns <= time.monotonic_ns()
    assert thread.heartbeat() == held, "nothing moves, so nothing beats"
    gate.set()
    heard.until_end_of("a")
    until(lambda: thread.heartbeat().stage == IDLE)
    assert thread.heartbeat().timestamp_ns > held.timestamp_ns


def test_the_real_loop_says_what_it_begins(started: Started) -> None:
    said: set[str] = set()

    def load(_: Any) -> Loop:
        return make_loop(tiny_model())

    thread, heard = started(load)
    thread.submit(
        job("a", b"hello world, it is me", max_tokens=200, stop_token_ids=frozenset[int]())
    )
    heard.next(EngineReady)
    until(lambda: said.add(thread.heartbeat().stage) or any("decode" in s for s in said))
    thread.cancel("a")
