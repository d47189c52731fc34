"""Other users of this machine: they must not reach a model process."""

from pathlib import Path
from typing import Any

import pytest

from tests.attacks.conftest import Guarded, Victim

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="/proc lists the sockets of a process"
)


def get_model_pid(victim: Victim) -> int:
    models: Any = victim.server.status()["Models"]
    return next(model["Pid"] for model in models if model["Name"] == "tiny")


def list_socket_inodes(pid: int) -> set[str]:
    inodes: set[str] = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = str(file.readlink())
        except OSError:  # closed meanwhile
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    return inodes


def test_a_model_process_listens_on_no_port(victim: Victim) -> None:
    pid = get_model_pid(victim)
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        assert not list_socket_inodes(pid) & {row.split()[9] for row in rows}


def test_a_model_process_has_no_socket_with_an_address(victim: Victim) -> None:
    """No other process can connect: both ends of its channel exist at its start, without a path."""
    pid = get_model_pid(victim)
    inodes = list_socket_inodes(pid)
    rows = [row.split() for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    own = [row for row in rows if row[6] in inodes]  # the inode, and after it the path, if any
    assert own
    assert [row[7:] for row in own] == [[]] * len(own)


def test_other_users_can_read_neither_keys_nor_secrets(victim: Victim, guarded: Guarded) -> None:
    """Every user can read command lines. Only the same user can read an environment, but code of a
    model runs in the model process: so its environment has no key."""
    pids = [victim.server.process.pid, get_model_pid(victim), guarded.server.process.pid]
    children = Path(f"/proc/{guarded.server.process.pid}/task").glob("*/children")
    model_pids = [int(pid) for file in children for pid in file.read_text().split()]
    assert model_pids, "the model has no process"
    for pid in [*pids, *model_pids]:
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
        for secret in (guarded.user, guarded.admin, guarded.owner):
            assert secret.encode() not in command_line
        assert b"secret" not in command_line
    for pid in model_pids:
        assert guarded.owner.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
