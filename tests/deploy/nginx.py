"""A real nginx that runs one of our files: as it is written, but for addresses and paths."""

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import trustme

from tests.server_process import ROOT, TIMEOUT, ServerProcess

FILES = ROOT / "deploy" / "nginx"
NAME = "llm.example.org"

# who answered: our own name of the request, each replica that was asked, what the client was told
_SEEN = "log_format seen '$http_x_request_id|$upstream_addr|$status';"


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files of a certificate for NAME, and who trusts it."""

    certificate: Path
    key: Path
    trust: ssl.SSLContext

    @staticmethod
    def make(folder: Path) -> "Certificate":
        authority = trustme.CA()
        issued = authority.issue_cert(NAME)
        made = Certificate(
            folder / "fullchain.pem", folder / "privkey.pem", ssl.create_default_context()
        )
        for pem in issued.cert_chain_pems:
            pem.write_to_path(str(made.certificate), append=True)
        issued.private_key_pem.write_to_path(str(made.key))
        authority.configure_trust(made.trust)
        return made


class Nginx:
    """One that runs. http: a client of it."""

    def __init__(self, port: int, folder: Path, certificate: Certificate) -> None:
        self._seen = folder / "seen.log"
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            verify=certificate.trust,
            headers={"Host": NAME},
            timeout=TIMEOUT,
        )

    def send(
        self, method: str, path: str, *, stream: bool = False, **request: Any
    ) -> httpx.Response:
        """A request for NAME, as a browser or an SDK would send it, but that it asks no DNS."""
        built = self.http.build_request(method, path, **request)
        built.extensions["sni_hostname"] = NAME
        return self.http.send(built, stream=stream)

    def asked(self, request_id: str) -> list[int]:
        """Ports of the replicas that nginx asked for this request, in order."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            for line in self._seen.read_text("utf-8").splitlines():
                name, addresses, _ = line.split("|")
                if name == request_id:
                    return [int(port) for port in re.findall(r":(\d+)", addresses)]
            time.sleep(0.02)  # a line is written when the answer is over
        raise AssertionError(f"nginx never logged {request_id}")


def adapted(
    name: str, port: int, replicas: Sequence[ServerProcess], certificate: Certificate
) -> str:
    """deploy/nginx/NAME with our ports and paths; each line that is replaced has to be there."""
    text = (FILES / name).read_text("utf-8")
    [written] = set(re.findall(r"^    server \S+?:\d+([^;\n]*);\n", text, re.MULTILINE))
    servers = "".join(f"    server 127.0.0.1:{one.port}{written};\n" for one in replicas)
    for pattern, replacement in (
        (r"(^    server \S+?:\d+[^;\n]*;\n)+", servers),
        (r"listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        (r"/etc/ssl/llm\.example\.org/fullchain\.pem", str(certificate.certificate)),
        (r"/etc/ssl/llm\.example\.org/privkey\.pem", str(certificate.key)),
    ):
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        assert count == 1, pattern
    return text


@contextlib.contextmanager
def proxying(
    name: str, replicas: Sequence[ServerProcess], certificate: Certificate, folder: Path
) -> Iterator[Nginx]:
    """`folder` is its whole world."""
    port = _free_port()
    main = folder / "nginx.conf"
    main.write_text(_around(adapted(name, port, replicas, certificate), folder), "utf-8")
    program = shutil.which("nginx")
    assert program is not None
    command = [program, "-p", str(folder), "-c", str(main), "-e", str(folder / "error.log")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    process = subprocess.Popen([*command, "-g", "daemon off;"])
    try:
        _wait_for(port, process)
        running = Nginx(port, folder, certificate)
        with running.http:
            yield running
    finally:
        process.terminate()
        process.wait(TIMEOUT)


class Replicas:
    """Servers of one model, started together. variables: what their environment holds beside
    ours."""

    def __init__(self, model: Path, variables: Mapping[str, str]) -> None:
        named = ("--allowed-host", NAME, "--allow-anyone")
        self._arguments = [str(model), *named, "--parallel", "4"]
        self._variables = variables
        self._servers: list[ServerProcess] = []

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            if server.process.poll() is None:
                server.process.kill()
            server.stop()

    def alive(self, count: int) -> list[ServerProcess]:
        """So many that are ready, as few new ones as that takes."""
        there = [one for one in self._servers if one.process.poll() is None]
        fresh = [ServerProcess(self._arguments, self._variables) for _ in range(count - len(there))]
        self._servers += fresh
        return [one.wait_until_ready() for one in (*there, *fresh)][:count]


def until(true: Callable[[], bool]) -> None:
    """Returns when it is, AssertionError if it never is."""
    deadline = time.monotonic() + TIMEOUT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _around(server: str, folder: Path) -> str:
    """What /etc/nginx/nginx.conf is where nginx is installed."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    return (
        f"{user}\nworker_processes 2;\npid {folder}/nginx.pid;\n"
        "events { worker_connections 1024; }\n"
        f"http {{\n{temporary}\n{_SEEN}\naccess_log {folder}/seen.log seen;\n{server}\n}}\n"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        assert process.poll() is None, "nginx ended at once"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, "nginx does not listen"
        time.sleep(0.02)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, up to [DONE]. Raises AssertionError if there is none."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")
