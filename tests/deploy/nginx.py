"""A real nginx with one of our files, in which only addresses and paths are replaced."""

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import trustme

from tests.server_process import ROOT, TIMEOUT, ServerProcess

FILES = ROOT / "deploy" / "nginx"
NAME = "llm.example.org"

# the id of the request, each replica that nginx tried, and the status
_LOG_FORMAT = "log_format seen '$http_x_request_id|$upstream_addr|$status';"


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files of a certificate for NAME, and a context that trusts it."""

    certificate: Path
    key: Path
    trust: ssl.SSLContext

    @property
    def authority(self) -> Path:
        """The PEM file of the authority that has signed it."""
        return self.certificate.with_name("authority.pem")

    @staticmethod
    def make(folder: Path) -> "Certificate":
        authority = trustme.CA()
        leaf = authority.issue_cert(NAME)
        certificate = Certificate(
            folder / "fullchain.pem", folder / "privkey.pem", ssl.create_default_context()
        )
        for pem in leaf.cert_chain_pems:
            pem.write_to_path(str(certificate.certificate), append=True)
        authority.cert_pem.write_to_path(str(certificate.authority))
        leaf.private_key_pem.write_to_path(str(certificate.key))
        authority.configure_trust(certificate.trust)
        return certificate


class Upstream(Protocol):
    """A server behind nginx."""

    @property
    def port(self) -> int: ...


class Nginx:
    """A running nginx. http: a client of it."""

    def __init__(self, port: int, folder: Path, certificate: Certificate) -> None:
        self._access_log = folder / "seen.log"
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            verify=certificate.trust,
            headers={"Host": NAME},
            timeout=TIMEOUT,
        )

    def send(
        self, method: str, path: str, *, stream: bool = False, **request: Any
    ) -> httpx.Response:
        """A request for NAME, as a browser or an SDK would send it, but without DNS."""
        request_ = self.http.build_request(method, path, **request)
        request_.extensions["sni_hostname"] = NAME
        return self.http.send(request_, stream=stream)

    def get_replica_ports(self, request_id: str) -> list[int]:
        """The ports of the replicas that nginx tried for this request, in order."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            for line in self._access_log.read_text("utf-8").splitlines():
                name, addresses, _ = line.split("|")
                if name == request_id:
                    return [int(port) for port in re.findall(r":(\d+)", addresses)]
            time.sleep(0.02)  # nginx writes a line at the end of the response
        raise AssertionError(f"nginx never logged {request_id}")


def adapt_config(
    name: str | Path, port: int, replicas: Sequence[Upstream], certificate: Certificate
) -> str:
    """deploy/nginx/NAME, or another file, with our ports and paths; each replaced line must
    exist."""
    text = (FILES / name).read_text("utf-8")
    [server_options] = set(re.findall(r"^    server \S+?:\d+([^;\n]*);\n", text, re.MULTILINE))
    servers = "".join(f"    server 127.0.0.1:{one.port}{server_options};\n" for one in replicas)
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
def run_nginx(
    name: str | Path, replicas: Sequence[Upstream], certificate: Certificate, folder: Path
) -> Iterator[Nginx]:
    """Run nginx with a file of deploy/nginx, or a copy of one; all its files are in `folder`.

    It inherits its socket, as during an upgrade of nginx. Otherwise another program could take the
    port before nginx does. Connections wait in the socket until nginx accepts them."""
    program = shutil.which("nginx")
    assert program is not None
    main = folder / "nginx.conf"
    command = [program, "-p", str(folder), "-c", str(main), "-e", str(folder / "error.log")]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = adapt_config(name, port, replicas, certificate)
        main.write_text(_build_main_config(config, folder), "utf-8")
        subprocess.run([*command, "-t"], check=True, capture_output=True)
        process = subprocess.Popen(
            [*command, "-g", "daemon off;"],
            env={**os.environ, "NGINX": f"{listener.fileno()};"},
            pass_fds=[listener.fileno()],
        )
    try:
        running = Nginx(port, folder, certificate)
        with running.http:
            yield running
    finally:
        process.terminate()
        process.wait(TIMEOUT)


class Replicas:
    """Servers of one model, started together. variables: additional environment variables."""

    def __init__(self, model: Path, variables: Mapping[str, str]) -> None:
        options = ("--allowed-host", NAME, "--allow-anyone")
        self._arguments = [str(model), *options, "--parallel", "4"]
        self._variables = variables
        self._servers: list[ServerProcess] = []

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            if server.process.poll() is None:
                server.process.kill()
            server.stop()

    def get_ready(self, count: int) -> list[ServerProcess]:
        """So many ready servers; starts only as many new ones as needed."""
        alive = [server for server in self._servers if server.process.poll() is None]
        started = [
            ServerProcess(self._arguments, self._variables) for _ in range(count - len(alive))
        ]
        self._servers += started
        return [server.wait_until_ready() for server in (*alive, *started)][:count]


def _build_main_config(server: str, folder: Path) -> str:
    """A main configuration, like the /etc/nginx/nginx.conf of an installation."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    return (
        f"{user}\nworker_processes 2;\npid {folder}/nginx.pid;\n"
        "events { worker_connections 1024; }\n"
        f"http {{\n{temporary}\n{_LOG_FORMAT}\naccess_log {folder}/seen.log seen;\n{server}\n}}\n"
    )


def iter_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, up to [DONE]. Raises AssertionError if there is none."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")
