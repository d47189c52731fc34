"""Events of a model process: batches of lines, a parent that does not read, a broken pipe."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from app import store
from app.core.jobs import EngineStats, Heartbeat, StepOutput, Token
from app.core.settings import Settings
from app.runners import event_pipe
from app.runners.child_process import PrivateSocket
from app.runners.event_pipe import EventWriter, read_events
from app.runners.worker_protocol import WorkerEvent, WorkerInit
from app.runners.worker_server import WorkerServer

PATIENCE = 30.0


def step(number: int, size: int = 1) -> StepOutput:
    tokens = tuple(Token(job_id="a", id=id_, timestamp_ns=number) for id_ in range(size))
    return StepOutput(updates=tokens, stats=EngineStats(steps=number))


def run_with_pipe(
    body: Callable[[EventWriter, socket.socket, asyncio.Event], Awaitable[None]],
) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        closed = asyncio.Event()
        writer = EventWriter(theirs, closed.set)
        await writer.open()
        with ours:
            async with asyncio.timeout(PATIENCE):
                await body(writer, ours, closed)
            writer.close()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_events_arrive_in_order_and_unchanged() -> None:
    events: list[WorkerEvent] = [step(n, size) for n, size in enumerate((1, 32, 5000, 0, 7))]
    events.insert(2, Heartbeat(timestamp_ns=5, stage="decode"))

    async def body(writer: EventWriter, end: socket.socket, closed: asyncio.Event) -> None:
        writer.write(events[:2])
        writer.write(())
        writer.write(events[2:])
        writer.close()
        assert [event async for event in read_events(end)] == events
        await closed.wait()
        writer.write([step(9)])  # is dropped

    run_with_pipe(body)


def test_closing_the_reader_closes_the_pipe() -> None:
    async def body(writer: EventWriter, end: socket.socket, closed: asyncio.Event) -> None:
        writer.write([step(1), step(2)])
        async with aclosing(read_events(end)) as events:
            assert await anext(events) == step(1)
        await closed.wait()

    run_with_pipe(body)


def test_an_endless_line_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_pipe, "_MAX_LINE_BYTES", 1000)

    async def body(writer: EventWriter, end: socket.socket, closed: asyncio.Event) -> None:
        writer.write([step(1, size=5000)])
        with pytest.raises(ValueError, match="longer than the maximum line length"):
            await anext(read_events(end))

    run_with_pipe(body)


def test_unread_heartbeats_do_not_accumulate(tiny_model: Path) -> None:
    async def run() -> None:
        listener = PrivateSocket()
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the minimum
        init = WorkerInit(
            parent_pid=0,
            socket_fd=os.dup(listener.fileno()),
            events_fd=theirs.detach(),
            settings=Settings(watchdog=0.004),
            files=store.resolve(str(tiny_model)),
        )
        worker = WorkerServer(init)
        with worker._socket, ours:
            await worker._events.open()
            task = asyncio.create_task(worker._send_heartbeats())
            transport = worker._events._pipe
            assert transport is not None
            async with asyncio.timeout(PATIENCE):
                while not worker._events.has_unsent:  # noqa: ASYNC110  # no event
                    await asyncio.sleep(0.001)
            unsent = transport.get_write_buffer_size()
            assert unsent < 1000
            await asyncio.sleep(0.1)  # 100 intervals of a millisecond
            assert transport.get_write_buffer_size() == unsent
            events = read_events(ours)
            async with asyncio.timeout(PATIENCE):
                while worker._events.has_unsent:
                    assert isinstance(await anext(events), Heartbeat)
                assert isinstance(await anext(events), Heartbeat)  # heartbeats continue
            task.cancel()
            await events.aclose()
        listener.close()

    asyncio.run(run())
