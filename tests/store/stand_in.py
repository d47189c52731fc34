"""A hub in a thread: it implements the HTTP protocol of the Hugging Face hub as huggingface_hub
uses it, and serves real folders. It can cut, corrupt, stall, reject and redirect.

Files of a kilobyte and more are Git LFS files: they have a SHA-256, and a redirect leads to a
different host. Smaller files are plain git files, with the SHA-1 of git.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 1024

TOKEN = "hf_of_a_friend"


@dataclass
class RecordedRequest:
    """One request. range: the first requested byte, 0 without a Range header. end: the last one;
    None for the end of the file."""

    method: str
    path: str
    range: int
    end: int | None
    authorization: str | None


@dataclass
class Repository:
    """commits: their hash -> folder. refs: branch or tag -> commit."""

    commits: dict[str, Path]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False


@dataclass
class Faults:
    """Faults in response bodies, by file name.

    cut: bytes after which the connection ends; once. stall: seconds of silence after the first
    half; once. status: an error status instead of the body. corrupt: the first byte is changed.
    silence: seconds before every response."""

    cut: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    stall: dict[str, float] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    silence: float = 0


class StandIn:
    """endpoint: the value for HF_ENDPOINT. requests: every request so far. resumed: ends a stall
    early."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.requests: list[RecordedRequest] = []
        self.resumed = threading.Event()
        self.handler = _handler(self)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def large_file_endpoint(self) -> str:
        """Another host name for the large files."""
        return f"http://localhost:{self.port}"

    def add(self, repo: str, folder: Path, **kind: bool) -> str:
        """Adds a repository, or its next commit. Returns the commit, the new head of main."""
        repository = self.repositories.setdefault(repo, Repository(commits={}, refs={}, **kind))
        commit = hashlib.sha1(f"{repo} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[commit] = folder
        repository.refs["main"] = commit
        return commit

    def downloads(self, ending: str = "") -> list[RecordedRequest]:
        """Requests for bodies of files."""
        return [
            request
            for request in self.requests
            if request.method == "GET"
            and "/api/" not in request.path
            and request.path.endswith(ending)
        ]

    def close(self) -> None:
        self.resumed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(
                RecordedRequest(
                    method=self.command,
                    path=path,
                    range=self.start(),
                    end=self.end(),
                    authorization=self.headers.get("Authorization"),
                )
            )
            time.sleep(hub.faults.silence)
            for pattern, reply in _ROUTES:
                if match := re.fullmatch(pattern, path):
                    reply(self, hub, *match.groups())
                    return
            self.reject(404, "RepoNotFound")

        def start(self) -> int:
            first = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            return int(first[1]) if first else 0

        def end(self) -> int | None:
            last = re.match(r"bytes=\d+-(\d+)", self.headers.get("Range", ""))
            return int(last[1]) if last else None

        def find_commit(self, repo: str, revision: str) -> tuple[str, Path] | None:
            """The commit and its folder, or None after an error response."""
            found = hub.repositories.get(repo)
            if found is None or (found.private and not self.is_authorized()):
                self.reject(401, "RepoNotFound")
                return None
            commit = found.refs.get(revision, revision)
            if commit not in found.commits:
                self.reject(404, "RevisionNotFound")
                return None
            return commit, found.commits[commit]

        def is_authorized(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def reject(self, status: int, code: str) -> None:
            self.reply(status, {"X-Error-Code": code})

        def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def reply_json(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.reply(200, {"Content-Type": "application/json"}, body)

        def send_file(self, name: str, content: bytes, headers: dict[str, str]) -> None:
            faults, start = hub.faults, self.start()  # of this request
            if name in faults.corrupt and self.command == "GET":
                content = bytes([content[0] ^ 1]) + content[1:]
            size, end = len(content), self.end()
            stop = size if end is None else min(size, end + 1)
            is_partial = stop - start < size
            if is_partial:
                headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
            body, status = content[start:stop], 206 if is_partial else 200
            if self.command == "HEAD":
                self.reply(status, headers, body)
            elif name in faults.cut:
                self.break_off(status, headers, body, at=faults.cut.pop(name))
            elif name in faults.stall:
                self.break_off(status, headers, body, at=len(body) // 2)
                hub.resumed.wait(faults.stall.pop(name))
            elif name in faults.status:
                self.reply(faults.status[name], {})
            else:
                self.reply(status, headers, body)

        def break_off(self, status: int, headers: dict[str, str], body: bytes, *, at: int) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:at])
            self.wfile.flush()
            self.close_connection = True

    return Handler


def _info(handler: Any, hub: StandIn, repo: str, revision: str | None = None) -> None:
    if (found := handler.find_commit(repo, revision or "main")) is None:
        return
    commit, folder = found
    siblings: list[dict[str, Any]] = []
    for path, content in _files(folder):
        entry: dict[str, Any] = {
            "rfilename": path,
            "size": len(content),
            "blobId": git_sha1(content),
        }
        if len(content) >= LARGE:
            entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
        siblings.append(entry)
    gated = "manual" if hub.repositories[repo].gated else False
    handler.reply_json(
        {"_id": "1", "id": repo, "sha": commit, "siblings": siblings, "gated": gated}
    )


def _tree(handler: Any, _: StandIn, repo: str, revision: str) -> None:
    if (found := handler.find_commit(repo, revision)) is None:
        return
    entries: list[dict[str, Any]] = []
    for path, content in _files(found[1]):
        entry: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": git_sha1(content),
        }
        if len(content) >= LARGE:
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    handler.reply_json(entries)


def _resolve(handler: Any, hub: StandIn, repo: str, revision: str, path: str) -> None:
    if (found := handler.find_commit(repo, revision)) is None:
        return
    if hub.repositories[repo].gated and not handler.is_authorized():
        handler.reject(403, "GatedRepo")
        return
    commit, folder = found
    headers = {"X-Repo-Commit": commit}
    if not (folder / path).is_file():
        handler.reject(404, "EntryNotFound")
        return
    content = (folder / path).read_bytes()
    if len(content) < LARGE:
        handler.send_file(path, content, {**headers, "ETag": f'"{git_sha1(content)}"'})
        return
    address = f"{hub.large_file_endpoint}/large/{repo}/{commit}/{path}"
    link_headers = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
    handler.reply(302, {**headers, **link_headers, "Location": address})


def _large(handler: Any, hub: StandIn, repo: str, commit: str, path: str) -> None:
    content = (hub.repositories[repo].commits[commit] / path).read_bytes()
    handler.send_file(path, content, {"ETag": f'"{sha256(content)}"'})


def _files(folder: Path) -> list[tuple[str, bytes]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths]


_REPO = r"([^/]+/[^/]+)"

_ROUTES: tuple[tuple[str, Callable[..., None]], ...] = (
    (rf"/api/models/{_REPO}", _info),
    (rf"/api/models/{_REPO}/revision/(.+)", _info),
    (rf"/api/models/{_REPO}/tree/([^/]+)", _tree),
    (rf"/{_REPO}/resolve/([^/]+)/(.+)", _resolve),
    (rf"/large/{_REPO}/([^/]+)/(.+)", _large),
)
