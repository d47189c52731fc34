"""What systemd is told, on a socket like its own."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.http.systemd import SystemdNotifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sd_notify is of Linux")


@dataclass
class Server:
    started: bool = False
    should_exit: bool = False


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.setblocking(False)
        yield line


async def told(manager: socket.socket) -> str:
    """The next words that are not the watchdog's."""
    while (words := await hear(manager)) == "WATCHDOG=1":
        pass
    return words


async def hear(manager: socket.socket) -> str:
    return (await asyncio.get_running_loop().sock_recv(manager, 4096)).decode()


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), "PATH": "/bin", **more}


def test_a_server_is_ready_when_it_listens_and_says_how_long_it_may_take_to_stop(
    manager: socket.socket,
) -> None:
    async def live() -> None:
        server = Server()
        async with SystemdNotifier.from_environment(environment(manager), 7).watch(
            server, drain=40
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(hear(manager), 0.4)
            server.started = True
            assert await told(manager) == "READY=1"
            server.should_exit = True
            assert await told(manager) == "STOPPING=1\nEXTEND_TIMEOUT_USEC=70000000"

    asyncio.run(live())


def test_the_watchdog_hears_of_a_loop_that_turns_and_of_no_other(manager: socket.socket) -> None:
    async def live() -> None:
        around = environment(manager, WATCHDOG_USEC="200000", WATCHDOG_PID="7")
        async with SystemdNotifier.from_environment(around, 7).watch(Server(started=True), drain=1):
            assert await hear(manager) == "READY=1"
            for _ in range(4):
                assert await hear(manager) == "WATCHDOG=1"

    asyncio.run(live())
    last = ""
    while True:
        try:
            last = manager.recv(4096).decode()
        except BlockingIOError:
            break
    assert last == "STOPPING=1\nEXTEND_TIMEOUT_USEC=31000000"


def test_a_server_that_stops_before_anybody_looked_says_so_too(manager: socket.socket) -> None:
    async def live() -> None:
        server = Server(started=True)
        async with SystemdNotifier.from_environment(environment(manager), 7).watch(server, drain=1):
            assert await hear(manager) == "READY=1"
            server.should_exit = True
        assert await hear(manager) == "STOPPING=1\nEXTEND_TIMEOUT_USEC=31000000"

    asyncio.run(live())


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "8"}])
def test_a_watchdog_that_is_not_there_or_is_another_process_s_hears_nothing(
    manager: socket.socket, watchdog: dict[str, str]
) -> None:
    async def live() -> None:
        notices = SystemdNotifier.from_environment(environment(manager, **watchdog), 7)
        async with notices.watch(Server(started=True), drain=1):
            assert await hear(manager) == "READY=1"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(hear(manager), 0.4)

    asyncio.run(live())


def test_what_could_not_be_told_is_told_again(tmp_path: Path) -> None:
    async def live() -> None:
        place = tmp_path / "notify"
        around = {"NOTIFY_SOCKET": str(place)}
        async with SystemdNotifier.from_environment(around, 7).watch(Server(started=True), drain=1):
            await asyncio.sleep(0.1)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(str(place))
                manager.setblocking(False)
                assert await hear(manager) == "READY=1"

    asyncio.run(live())


def test_an_abstract_socket_is_found(tmp_path: Path) -> None:
    name = f"mlxrunner-{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.setblocking(False)

        async def live() -> None:
            around = {"NOTIFY_SOCKET": f"@{name}"}
            async with SystemdNotifier.from_environment(around, 7).watch(
                Server(started=True), drain=1
            ):
                assert await hear(manager) == "READY=1"

        asyncio.run(live())


def test_children_do_not_inherit_what_was_meant_for_us(manager: socket.socket) -> None:
    around = environment(manager, WATCHDOG_USEC="1000000", WATCHDOG_PID="7")
    SystemdNotifier.from_environment(around, 7)
    assert around == {"PATH": "/bin"}


def test_without_a_manager_nothing_runs() -> None:
    async def live() -> None:
        async with SystemdNotifier.from_environment({}, 7).watch(Server(started=True), drain=1):
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(live())
