"""Other users of this machine: they must not reach a model process."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.conftest import Guarded, Victim

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="/proc lists the sockets of a process"
)

NOBODY_UID = 65534

CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


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


def find_unix_socket(pid: int) -> Path:
    """The path that a process listens on."""
    inodes = list_socket_inodes(pid)
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        # the flag of a listening socket; the inode is the seventh column, the path the last
        if columns[3] == "00010000" and columns[6] in inodes:
            return Path(columns[7])
    raise AssertionError("it listens on no Unix socket")


def test_a_model_process_listens_on_no_port(victim: Victim) -> None:
    pid = get_model_pid(victim)
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        assert not list_socket_inodes(pid) & {row.split()[9] for row in rows}


def test_only_the_servers_user_can_open_the_socket_of_a_model_process(victim: Victim) -> None:
    path = find_unix_socket(get_model_pid(victim))
    assert path.parent.stat().st_uid == os.getuid()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_to_a_model_process(victim: Victim) -> None:
    path = find_unix_socket(get_model_pid(victim))
    command = [sys.executable, "-c", CONNECT, str(path), str(NOBODY_UID)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PermissionError" in process.stderr


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
