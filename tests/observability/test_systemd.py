"""Notifications to systemd, on a socket like its own."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.observability.systemd import SystemdNotifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sd_notify needs Linux")


@dataclass
class Server:
    started: bool = False
    should_exit: bool = False


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as socket_:
        socket_.bind(str(tmp_path / "notify"))
        socket_.setblocking(False)
        yield socket_


async def receive_state(manager: socket.socket) -> str:
    """The next message that is not of the watchdog."""
    while (message := await receive(manager)) == "WATCHDOG=1":
        pass
    return message


async def receive(manager: socket.socket) -> str:
    return (await asyncio.get_running_loop().sock_recv(manager, 4096)).decode()


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), "PATH": "/bin", **more}


def test_ready_is_sent_after_startup_and_the_stop_timeout_at_shutdown(
    manager: socket.socket,
) -> None:
    async def run() -> None:
        server = Server()
        async with SystemdNotifier.from_environment(environment(manager), 7).watch(
            server, drain=40
        ):
            # a wait that is too short could only miss a message
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receive(manager), 0.4)
            server.started = True
            assert await receive_state(manager) == "READY=1"
            server.should_exit = True
            assert await receive_state(manager) == "STOPPING=1\nEXTEND_TIMEOUT_USEC=70000000"

    asyncio.run(run())


def test_the_watchdog_is_notified_only_while_the_loop_runs(manager: socket.socket) -> None:
    async def run() -> None:
        variables = environment(manager, WATCHDOG_USEC="200000", WATCHDOG_PID="7")
        async with SystemdNotifier.from_environment(variables, 7).watch(
            Server(started=True), drain=1
        ):
            assert await receive(manager) == "READY=1"
            for _ in range(4):
                assert await receive(manager) == "WATCHDOG=1"

    asyncio.run(run())
    last = ""
    while True:
        try:
            last = manager.recv(4096).decode()
        except BlockingIOError:
            break
    assert last == "STOPPING=1\nEXTEND_TIMEOUT_USEC=31000000"


def test_stopping_is_sent_even_if_the_server_stops_at_once(manager: socket.socket) -> None:
    async def run() -> None:
        server = Server(started=True)
        async with SystemdNotifier.from_environment(environment(manager), 7).watch(server, drain=1):
            assert await receive(manager) == "READY=1"
            server.should_exit = True
        assert await receive(manager) == "STOPPING=1\nEXTEND_TIMEOUT_USEC=31000000"

    asyncio.run(run())


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "8"}])
def test_no_notifications_without_a_watchdog_of_this_process(
    manager: socket.socket, watchdog: dict[str, str]
) -> None:
    async def run() -> None:
        notifier = SystemdNotifier.from_environment(environment(manager, **watchdog), 7)
        async with notifier.watch(Server(started=True), drain=1):
            assert await receive(manager) == "READY=1"
            # four of its intervals; a shorter wait could only miss a message
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receive(manager), 0.4)

    asyncio.run(run())


def test_failed_notifications_are_retried(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "notify"
        variables = {"NOTIFY_SOCKET": str(path)}
        async with SystemdNotifier.from_environment(variables, 7).watch(
            Server(started=True), drain=1
        ):
            await asyncio.sleep(0.1)  # so that some fail; if none does, the test proves less
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(str(path))
                manager.setblocking(False)
                assert await receive(manager) == "READY=1"

    asyncio.run(run())


def test_an_abstract_socket_is_supported(tmp_path: Path) -> None:
    name = f"mlxrunner-{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.setblocking(False)

        async def run() -> None:
            variables = {"NOTIFY_SOCKET": f"@{name}"}
            async with SystemdNotifier.from_environment(variables, 7).watch(
                Server(started=True), drain=1
            ):
                assert await receive(manager) == "READY=1"

        asyncio.run(run())


def test_child_processes_do_not_inherit_the_variables(manager: socket.socket) -> None:
    variables = environment(manager, WATCHDOG_USEC="1000000", WATCHDOG_PID="7")
    SystemdNotifier.from_environment(variables, 7)
    assert variables == {"PATH": "/bin"}


def test_without_systemd_no_task_runs() -> None:
    async def run() -> None:
        async with SystemdNotifier.from_environment({}, 7).watch(Server(started=True), drain=1):
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
