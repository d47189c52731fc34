"""Long bodies are read round-robin, in a share of the event loop's time."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from app.http.connection_limits import BodyReadScheduler, ScheduledFlowControl
from tests.waiting import wait_until_async


class Transport(asyncio.Transport):
    """A transport that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.calls: list[str] = []
        self.resumed: Callable[[], None] = lambda: None

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True
        self.calls.append("pause")

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False
        self.calls.append("resume")
        self.resumed()


def test_reading_resumes_when_neither_the_application_nor_the_scheduler_holds_it():
    transport = Transport()
    flow = ScheduledFlowControl(transport)
    flow.hold_reading()
    flow.pause_reading()
    flow.release_reading()
    assert transport.paused, "the application has paused reading"
    flow.hold_reading()
    flow.resume_reading()
    assert transport.paused, "the scheduler still holds it"
    flow.release_reading()
    assert not transport.paused
    flow.resume_reading()
    flow.release_reading()
    assert transport.calls == ["pause", "resume"], "no call is made twice"


def test_connections_take_turns_within_a_share_of_the_time():
    async def run() -> None:
        reads = BodyReadScheduler()
        flows: list[ScheduledFlowControl] = []
        ready = deque(range(5))
        for number in range(5):
            transport = Transport()
            transport.resumed = partial(ready.append, number)
            flows.append(ScheduledFlowControl(transport))
        order: list[int] = []
        piece, seconds = 0.002, 0.4
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while ready:
                order.append(ready.popleft())
                time.sleep(piece)  # noqa: ASYNC251  # reading holds the loop
                reads.enqueue(flows[order[-1]], piece)
            await asyncio.sleep(0.0005)
        assert len(order) * piece < seconds / 2, "most of the time is left for other work"
        assert order == [turn % 5 for turn in range(len(order))]

    asyncio.run(run())


def test_a_closed_connection_gets_no_turn():
    async def run() -> None:
        reads = BodyReadScheduler()
        transport = Transport()
        closed, other = ScheduledFlowControl(Transport()), ScheduledFlowControl(transport)
        reads.enqueue(closed, 0.005)
        reads.enqueue(other, 0.005)
        reads.remove(closed)
        reads.remove(closed)
        await wait_until_async(lambda: not transport.paused)

    asyncio.run(run())
