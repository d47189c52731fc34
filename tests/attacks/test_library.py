"""Clients that change the models on the disk: who may do it, how much, and where."""

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http import api_keys
from tests import tiny
from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import LatencyCheck, entries
from tests.machine_lock import MachineLock
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.waiting import wait_until

MEBIBYTE = 1 << 20

# of request bodies (--max-body 1); uploads are larger
MAX_BODY = MEBIBYTE
UPLOAD_BYTES = 192 * MEBIBYTE


@dataclass(frozen=True)
class Library:
    """A server that may install models. disk: a folder with its store of models, `ollama`, with
    the models that it serves, and with files that clients must not see."""

    server: ServerProcess
    client: httpx.Client
    disk: Path
    user: str
    admin: str

    def list_files(self) -> set[str]:
        return {str(p.relative_to(self.disk)) for p in self.disk.rglob("*") if p.is_file()}


@contextmanager
def serve_library(disk: Path, *options: str, user: str = "", admin: str = "") -> Iterator[Library]:
    (disk / "precious.txt").write_text("x")
    (disk / "ollama").mkdir()
    environ = {
        "OLLAMA_MODELS": str(disk / "ollama"),
        "HF_HOME": str(disk / "hub"),
        "XDG_CACHE_HOME": str(disk / "cache"),
    }
    model = tiny.write(disk / "tiny")
    arguments = (str(model), "--installed", "--max-body", "1", *options)
    with (
        run_server(*arguments, environ=environ) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        yield Library(server, client, disk, user, admin)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    disk = tmp_path_factory.mktemp("library")
    user, admin = api_keys.generate_key(), api_keys.generate_key()
    file = disk / "keys.toml"
    file.write_text(entries(user=user) + entries(admin=True, boss=admin))
    file.chmod(0o600)
    with serve_library(disk, "--api-keys", str(file), user=user, admin=admin) as served:
        yield served


@pytest.fixture(scope="module")
def open_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Without keys, on loopback."""
    with serve_library(tmp_path_factory.mktemp("open")) as served:
        yield served


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


BLOB = b"a file"

# every request that may change the disk: a body, or the content of a blob
CHANGES: list[tuple[str, str, dict[str, Any] | bytes]] = [
    ("POST", "/api/pull", {"model": "no/such", "stream": False}),
    ("POST", "/api/push", {"model": "tiny"}),
    ("POST", "/api/create", {"model": "poet", "from": "tiny", "system": "x", "stream": False}),
    ("POST", "/api/copy", {"source": "tiny", "destination": "copy"}),
    ("DELETE", "/api/delete", {"model": "copy"}),
    ("HEAD", f"/api/blobs/{digest_of(BLOB)}", b""),
    ("POST", f"/api/blobs/{digest_of(BLOB)}", BLOB),
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def send(
    library: Library, method: str, path: str, body: dict[str, Any] | bytes, key: str
) -> httpx.Response:
    given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    return library.client.request(method, path, headers=bearer(key), **given)


def test_only_admins_may_change_the_disk(library: Library) -> None:
    before = library.list_files()
    for key, status in (("", 401), (library.user, 403)):
        for method, path, body in CHANGES:
            for spelling in (path, f"{path}?x=1", f"{path}/", f"/{path}", path.replace("a", "%61")):
                reply = send(library, method, spelling, body, key)
                allowed = {status} if spelling == path else {status, 404, 405}
                assert reply.status_code in allowed, (method, spelling, reply.text)
    assert library.list_files() == before
    for method, path, body in CHANGES:
        assert send(library, method, path, body, library.admin).status_code not in (401, 403)
    found = send(library, "HEAD", f"/api/blobs/{digest_of(BLOB)}", b"", library.admin)
    assert found.status_code == 200
    assert library.list_files() > before


def test_without_keys_every_client_on_this_machine_may_change_the_disk(
    open_library: Library,
) -> None:
    for method, path, body in CHANGES:
        assert send(open_library, method, path, body, "").status_code not in (401, 403)
    listed = open_library.client.get("/api/tags").json()["models"]
    assert any(model["name"].startswith("poet") for model in listed)


def test_no_name_of_a_client_leads_out_of_the_store(open_library: Library) -> None:
    outside = {name for name in open_library.list_files() if not name.startswith("ollama/")}
    names = (
        "../precious.txt",
        "../../tiny",
        "a/../../precious",
        "..:..",
        "x:../../../precious",
        str(open_library.disk / "precious.txt"),
        "registry.ollama.ai/../../x:y",
        "hf.co/../precious",
        "..\\precious",
        "a\0b",
    )
    for name in names:
        bodies: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/api/create", {"model": name, "from": "tiny", "stream": False}),
            ("POST", "/api/create", {"model": "x", "files": {name: digest_of(BLOB)}}),
            ("POST", "/api/create", {"model": "x", "from": name, "stream": False}),
            ("POST", "/api/copy", {"source": "tiny", "destination": name}),
            ("DELETE", "/api/delete", {"model": name}),
            ("POST", "/api/pull", {"model": name, "stream": False}),
        ]
        for method, path, body in bodies:
            reply = send(open_library, method, path, body, "")
            failed = reply.status_code >= 400 or '"error"' in reply.text
            assert failed, (path, body, reply.text)
            assert reply.status_code != 500, reply.text
    for digest in ("../../precious.txt", "sha256:../../precious.txt", "sha256-..%2f..%2fx"):
        for method in ("HEAD", "POST"):
            status = send_raw(open_library, method, f"/api/blobs/{digest}")
            assert status in (b"400", b"404", b"405"), (method, digest, status)
    now = {name for name in open_library.list_files() if not name.startswith("ollama/")}
    assert now == outside


def send_raw(library: Library, method: str, path: str) -> bytes:
    """Sends a path that clients would normalize."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n"
    with socket.create_connection(("127.0.0.1", library.server.port), timeout=TIMEOUT) as client:
        client.sendall(f"{head}connection: close\r\n\r\nx".encode())
        return client.recv(1 << 16).split(b" ")[1]


def read_peak_memory(library: Library) -> int:
    """The highest resident memory of the server process so far, in bytes."""
    path = Path(f"/proc/{library.server.process.pid}/status")
    if not path.exists():
        pytest.skip("needs /proc")
    line = next(line for line in path.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_an_upload_needs_no_memory_for_its_size(open_library: Library) -> None:
    """It may also be far longer than any other body."""
    piece = b"x" * MEBIBYTE
    digest = hashlib.sha256()
    for _ in range(UPLOAD_BYTES // len(piece)):
        digest.update(piece)
    path = f"/api/blobs/sha256:{digest.hexdigest()}"
    before = read_peak_memory(open_library)
    content = (piece for _ in range(UPLOAD_BYTES // len(piece)))
    reply = open_library.client.post(path, content=content)
    assert reply.status_code == 201, reply.text
    assert read_peak_memory(open_library) - before < UPLOAD_BYTES // 4
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 2 * MAX_BODY}]}
    assert open_library.client.post("/api/chat", json=chat).status_code == 413


@pytest.mark.timing
def test_uploads_from_several_processes_do_not_disturb_other_clients(
    open_library: Library, machine: MachineLock
) -> None:
    """One at a time is stored; the others are rejected. No wrong content is kept."""
    content = b"y" * (4 * MEBIBYTE)
    connections = [
        (
            Send(
                f"POST /api/blobs/sha256:{number:064x} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                f"content-length: {len(content)}\r\n\r\n".encode()
                + content
            ),
            Read(),
        )
        for number in range(4)
    ]
    before = {name for name in open_library.list_files() if "/blobs/" in name}
    check = LatencyCheck(open_library.server, machine)
    result = check(Attack(connections=connections, threads=4))
    assert set(result.statuses) <= {"400", "503", "none", "torn"}, result.statuses
    assert result.statuses["400"] > 0
    assert result.statuses["503"] > 0
    # the last upload ends soon after its client has disconnected
    wait_until(
        lambda: {name for name in open_library.list_files() if "/blobs/" in name} == before,
        limit=TIMEOUT,
    )
