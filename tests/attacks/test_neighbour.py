"""Another user of this machine: the runner's port is on loopback, where everybody can reach it."""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import Guarded, Victim
from tests.http.lines import head

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="which process listens where, /proc tells"
)


def listening(pid: int) -> list[int]:
    """TCP ports of IPv4 that a process listens on."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    inodes = {link[8:-1] for file in files if (link := _target(file)).startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    # 0A is LISTEN; the inode is the tenth column
    return [
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    ]


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:  # closed meanwhile
        return ""


def _listen(thief: socket.socket, address: str, port: int) -> None:
    thief.bind((address, port))
    thief.listen()  # where Linux notices, if both allow that addresses are shared


def runner(victim: Victim) -> tuple[int, int]:
    """Its process, and its port."""
    models: Any = victim.server.status()["Models"]
    pid = next(model["Pid"] for model in models if model["Name"] == "tiny")
    [port] = listening(pid)
    return pid, port


def test_a_runner_answers_nobody_but_its_server(victim: Victim) -> None:
    _, port = runner(victim)
    for headers in (
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer guess"},
        {"authorization": "Basic guess"},
        {"host": "localhost"},
    ):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as neighbour:
            for method in ("GET", "POST", "DELETE"):
                for path in ("/", "/v1/status", "/v1/updates", "/v1/jobs", "/v1/embed"):
                    reply = neighbour.request(method, path)
                    assert reply.status_code == 401, (method, path)
                    assert len(reply.content) < 200


def test_knocking_at_a_runner_disturbs_nobody(victim: Victim) -> None:
    _, port = runner(victim)
    knock = Send(head("POST", "/v1/jobs", Content_Length=100_000) + b"x" * 100_000)
    seen = victim.undisturbed(Attack([[knock, Read()]], threads=2, port=port))
    assert set(seen.statuses) <= {"401", "none"}


def test_a_runners_port_cannot_be_taken(victim: Victim) -> None:
    """Not beside it and not before it: it is bound by the server, and handed down."""
    _, port = runner(victim)
    for address in ("127.0.0.1", "0.0.0.0"):
        for options in ((), (socket.SO_REUSEADDR,)):
            with socket.socket() as thief:
                for option in options:
                    thief.setsockopt(socket.SOL_SOCKET, option, 1)
                with pytest.raises(OSError, match="in use"):
                    _listen(thief, address, port)


def test_a_runner_listens_on_loopback_and_nowhere_else(victim: Victim) -> None:
    pid, port = runner(victim)
    rows = [line.split()[1] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    addresses = {row.partition(":")[0] for row in rows if int(row.partition(":")[2], 16) == port}
    assert addresses == {"0100007F"}  # 127.0.0.1, least byte first
    six = Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    assert not any(f":{port:04X} " in line.split("0A")[0] for line in six)


def test_neither_keys_nor_secrets_stand_where_neighbours_can_read(
    victim: Victim, guarded: Guarded
) -> None:
    """A command line is everybody's to read. An environment is its user's, and what a model brings
    runs in the runner: so that one gets no key."""
    pids = [victim.server.process.pid, runner(victim)[0], guarded.server.process.pid]
    children = Path(f"/proc/{guarded.server.process.pid}/task").glob("*/children")
    below = [int(pid) for file in children for pid in file.read_text().split()]
    assert below, "the model has a process of its own"
    for pid in [*pids, *below]:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        for secret in (guarded.user, guarded.admin, guarded.owner):
            assert secret.encode() not in line
        assert b"secret" not in line
    for pid in below:
        assert guarded.owner.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
