"""Two victims, shared by all attacks to save time: a local server, and an exposed one with keys and
TLS. Several processes attack at once, while the latencies of another client are measured."""

import json
import os
import pickle
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from app.http import api_keys
from tests import tiny
from tests.attacks.attacker import Attack
from tests.machine_load import OtherPrograms
from tests.machine_lock import MachineLock
from tests.server_process import ROOT, TIMEOUT, UNTRACED, ServerProcess, run_server

# Limits for the other client during an attack: its median latency is at most twice the usual one
# plus 50 ms (for a machine with two cores, which also runs this test), and no request takes half a
# second longer than the longest one before.
TIMES, SLACK, WORST = 2.0, 0.050, 0.5

# Sequential requests before an attack, and its duration in seconds.
NUM_BASELINE_REQUESTS, SECONDS = 30, 3.0

# Attacking processes, with half a core together.
PROCESSES = 3


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack. statuses: of its requests, "none" for one without a reply. sent:
    bytes. median, worst: latencies of the other client during the attack in seconds."""

    statuses: Counter[str]
    sent: int
    median: float
    worst: float


class LatencyCheck:
    """Runs attacks, and checks the latencies of another client, which sends one request after the
    other. Tests that use it are marked `timing`: it tries once. trust: the TLS context of the
    client. machine: the lock that excludes other tests during the measurement."""

    def __init__(
        self, server: ServerProcess, machine: MachineLock, trust: ssl.SSLContext | None = None
    ) -> None:
        self._server = server
        self._machine = machine
        self._trust = trust

    def __call__(
        self, attack: Attack | Callable[[], object], body: dict[str, Any] | None = None
    ) -> AttackResult:
        """Run the attack once, in several processes, or in this process if it is a function. body:
        the request of the other client; by default, a completion of a few tokens."""
        request = SMALL_REQUEST if body is None else body
        with self._machine.exclusive(), self._client() as client:
            others = OtherPrograms()
            _measure_request(client, request)
            before = [_measure_request(client, request) for _ in range(NUM_BASELINE_REQUESTS)]
            with self._start_attack(attack) as counts:
                during = _measure_for(client, request, SECONDS)
            share = others.compute_share()
        median, worst = statistics.median(during), max(during)
        baseline, longest = statistics.median(before), max(before)
        figures = (
            f"median {baseline:.3f} s before, {median:.3f} s during; "
            f"worst {longest:.3f} s before, {worst:.3f} s during; other programs {share:.0%}"
        )
        print(figures)  # pytest -rP also shows it for passing tests
        assert median <= TIMES * baseline + SLACK, figures
        assert worst <= longest + WORST, figures
        return AttackResult(statuses=counts.statuses, sent=counts.sent, median=median, worst=worst)

    def _client(self) -> httpx.Client:
        verify = True if self._trust is None else self._trust
        return httpx.Client(base_url=self._server.url, verify=verify, timeout=TIMEOUT)

    def _start_attack(
        self, attack: Attack | Callable[[], object]
    ) -> "AbstractContextManager[AttackCounts]":
        if isinstance(attack, Attack):
            port = attack.port or self._server.port
            attack_on_server = replace(attack, port=port, tls=self._trust is not None)
            return attack_in_processes(attack_on_server)
        return _attack_in_thread(attack)


@dataclass
class AttackCounts:
    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0


@contextmanager
def attack_in_processes(attack: Attack) -> Iterator[AttackCounts]:
    """Several processes attack until the context exits."""
    result = AttackCounts()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "attack"
        file.write_bytes(pickle.dumps(attack))
        code = f"from tests.attacks.attacker import main; main({str(file)!r})"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env={**os.environ, **UNTRACED},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(PROCESSES)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "under way\n"
            yield result
            for process in processes:
                out, _ = process.communicate(timeout=TIMEOUT)
                report = json.loads(out)
                result.statuses.update(report["statuses"])
                result.sent += report["sent"]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert result.sent > 0


@contextmanager
def _attack_in_thread(attack: Callable[[], object]) -> Iterator[AttackCounts]:
    """A thread of this process attacks until the context exits. Its exceptions are raised at the
    end."""
    stop, failure, num_calls = threading.Event(), list[BaseException](), [0]

    def run() -> None:
        try:
            while not stop.is_set():
                attack()
                num_calls[0] += 1
                time.sleep(0.01)
        except BaseException as raised:
            failure.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield AttackCounts()
    finally:
        stop.set()
        thread.join(TIMEOUT)
    assert not thread.is_alive(), "the attack got no reply"
    if failure:
        raise failure[0]
    assert num_calls[0] > 0


SMALL_REQUEST: dict[str, Any] = {
    "model": "tiny",
    "prompt": "as usual",
    "max_tokens": 4,
    "temperature": 0,
}


def _measure_request(client: httpx.Client, body: dict[str, Any]) -> float:
    """The latency of one request in seconds."""
    start = time.monotonic()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return time.monotonic() - start


def _measure_for(client: httpx.Client, body: dict[str, Any], seconds: float) -> list[float]:
    deadline = time.monotonic() + seconds
    latencies: list[float] = []
    while time.monotonic() < deadline or not latencies:
        latencies.append(_measure_request(client, body))
    return latencies


# Parts of a template that try to escape the sandbox. The message selects one; the marker is a file
# that must never exist.
ESCAPES = {
    "class": "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ messages[0].content|attr('__class__')|attr('__mro__') }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "namespace": "{{ namespace.__init__.__globals__['os'].popen('touch MARKER').read() }}",
    "joiner": "{{ joiner.__init__.__builtins__.open('MARKER', 'w') }}",
    "self": "{{ self._TemplateReference__context.environment.__class__ }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "format_map": "{{ '{x.__class__.__base__}'.format_map({'x': messages}) }}",
    "import": "{% import '/etc/passwd' as x %}{{ x }}",
    "include": "{% include '/etc/passwd' %}",
    "range": "{% for i in range(1000000000) %}x{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'x' * 10000000000 }}",
    "compare": (
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
    ),
    "power": "{{ 9 ** 99999999 }}",
    "change": "{{ messages.append(1) }}{{ messages.clear() }}",
}


def _build_hostile_template(marker: Path) -> str:
    branches = "".join(
        f"{{% elif way == '{name}' %}}{{% if true %}}{source.replace('MARKER', str(marker))}"
        "{% endif %}"
        for name, source in ESCAPES.items()
    )
    return f"{{% set way = messages[0].content %}}{{% if false %}}{branches}{{% endif %}}"


@dataclass(frozen=True)
class Victim:
    """marker: a file that exists if a template has escaped the sandbox. disk: a folder with model
    folders, of which only some are served."""

    server: ServerProcess
    client: httpx.Client
    attack: LatencyCheck
    disk: Path
    marker: Path


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory, machine: MachineLock) -> Iterator[Victim]:
    """Serves `tiny`, `long`, which has a long context, and `hostile`; the folder has a fourth
    model."""
    disk = tmp_path_factory.mktemp("attacked")
    marker = disk / "escaped"
    folders = [tiny.write(disk / name) for name in ("tiny", "hostile", "hidden")]
    folders.append(tiny.write(disk / "long", max_position_embeddings=20_000))
    (folders[1] / "chat_template.jinja").write_text(_build_hostile_template(marker))
    with (
        run_server(str(folders[0]), str(folders[1]), str(folders[3])) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        yield Victim(server, client, LatencyCheck(server, machine), disk, marker)


@dataclass(frozen=True)
class Guarded:
    """A server with keys: user and admin from its file, owner from its environment."""

    server: ServerProcess
    client: httpx.Client
    user: str
    admin: str
    owner: str
    file: Path


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    disk = tmp_path_factory.mktemp("guarded")
    user, admin, owner = (api_keys.generate_key() for _ in range(3))
    file = disk / "keys.toml"
    file.write_text(entries(user=user) + entries(admin=True, boss=admin))
    file.chmod(0o600)
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(disk / "cert.pem")
    leaf.private_key_pem.write_to_path(disk / "key.pem")
    (disk / "key.pem").chmod(0o600)
    trust = httpx.create_ssl_context()
    authority.configure_trust(trust)
    arguments = (str(tiny.write(disk / "tiny")), "--host", "0.0.0.0", "--api-keys", str(file))
    certificate = ("--tls-cert", str(disk / "cert.pem"), "--tls-key", str(disk / "key.pem"))
    variables = {"MLXRUNNER_API_KEY": owner}
    with (
        run_server(*arguments, *certificate, environ=variables, ssl_context=trust) as server,
        httpx.Client(base_url=server.url, verify=trust, timeout=TIMEOUT) as client,
    ):
        yield Guarded(server, client, user, admin, owner, file)


def entries(*, admin: bool = False, **keys: str) -> str:
    """The entries of a key file, by name and key."""
    api_keys_ = (
        api_keys.ApiKey(name=n, digest=api_keys.hash_key(k), admin=admin) for n, k in keys.items()
    )
    return "".join(api_keys.format_entry(key, "") + "\n" for key in api_keys_)
