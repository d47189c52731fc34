"""Two victims, one for all attacks to save time: a server as it is started on one's own machine,
and one that was exposed, with keys and TLS. Attacks are made by several processes at once, while
the latencies of another client are measured."""

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
from tests.machine_lock import MachineLock
from tests.server_process import ROOT, TIMEOUT, UNTRACED, ServerProcess, run_server

# What another client may notice of an attack: its median latency is at most twice the usual and
# 50 ms, for a machine that has two cores and this test on them, and no request takes longer than
# half a second more than the longest did before.
TIMES, SLACK, WORST = 2.0, 0.050, 0.5

# Requests that are made one after the other before an attack, and seconds of it.
ASKED, SECONDS = 30, 3.0

# Processes that attack, with half a core together.
PROCESSES = 3

# A machine that is busy with something else for a while is not the attack's doing, and an attack
# that disturbs does so every time.
TRIES = 3


@dataclass(frozen=True)
class Seen:
    """Of an attack. statuses: of its requests, "none" for one that was not answered. sent: bytes.
    median, worst: seconds that the other client's requests took meanwhile."""

    statuses: Counter[str]
    sent: int
    median: float
    worst: float


class Undisturbed:
    """Another client, which is busy: it asks again as soon as it is answered. trust: who signed the
    server's certificate. machine: which other tests must not use meanwhile."""

    def __init__(
        self, server: ServerProcess, machine: MachineLock, trust: ssl.SSLContext | None = None
    ) -> None:
        self._server = server
        self._machine = machine
        self._trust = trust

    def __call__(
        self, attack: Attack | Callable[[], object], body: dict[str, Any] | None = None
    ) -> Seen:
        """Its latencies while several processes make the attack, or, where it is a function, this
        one does. body: what it asks; a few tokens of a completion by default."""
        tried: list[str] = []
        asked = ASK if body is None else body
        with self._machine.exclusive(), self._client() as client:
            for _ in range(TRIES):
                _ask(client, asked)
                before = [_ask(client, asked) for _ in range(ASKED)]
                with self._made(attack) as result:
                    during = _ask_for(client, asked, SECONDS)
                seen = Seen(
                    statuses=result.statuses,
                    sent=result.sent,
                    median=statistics.median(during),
                    worst=max(during),
                )
                usual = statistics.median(before)
                tried.append(
                    f"median {usual:.3f} s before, {seen.median:.3f} s during; "
                    f"worst {max(before):.3f} s before, {seen.worst:.3f} s during"
                )
                print(tried[-1])  # with -rP, pytest shows it of tests that pass, too
                if seen.median <= TIMES * usual + SLACK and seen.worst <= WORST + max(before):
                    return seen
        raise AssertionError("; ".join(tried))

    def _client(self) -> httpx.Client:
        verify = True if self._trust is None else self._trust
        return httpx.Client(base_url=self._server.url, verify=verify, timeout=TIMEOUT)

    def _made(self, attack: Attack | Callable[[], object]) -> "AbstractContextManager[_Result]":
        if isinstance(attack, Attack):
            port = attack.port or self._server.port
            own = replace(attack, port=port, tls=self._trust is not None)
            return _attacking(own)
        return _repeating(attack)


@dataclass
class _Result:
    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0


@contextmanager
def _attacking(attack: Attack) -> Iterator[_Result]:
    """Several processes attack until this is left."""
    result = _Result()
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
                told = json.loads(out)
                result.statuses.update(told["statuses"])
                result.sent += told["sent"]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    assert result.sent > 0


@contextmanager
def _repeating(attack: Callable[[], object]) -> Iterator[_Result]:
    """A thread of this process attacks until this is left. What goes wrong there is raised here."""
    over, failure, times = threading.Event(), list[BaseException](), [0]

    def run() -> None:
        try:
            while not over.is_set():
                attack()
                times[0] += 1
                time.sleep(0.01)
        except BaseException as raised:
            failure.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield _Result()
    finally:
        over.set()
        thread.join(TIMEOUT)
    assert not thread.is_alive(), "the attack was never answered"
    if failure:
        raise failure[0]
    assert times[0] > 0


ASK: dict[str, Any] = {
    "model": "tiny",
    "prompt": "as usual",
    "max_tokens": 4,
    "temperature": 0,
}


def _ask(client: httpx.Client, body: dict[str, Any]) -> float:
    """Seconds for an answer of a few tokens."""
    begun = time.monotonic()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return time.monotonic() - begun


def _ask_for(client: httpx.Client, body: dict[str, Any], seconds: float) -> list[float]:
    until = time.monotonic() + seconds
    found: list[float] = []
    while time.monotonic() < until or not found:
        found.append(_ask(client, body))
    return found


# A template that was made to get out of its sandbox, each time by another way. The message says
# which; the marker is a file that must never be.
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
    "power": "{{ 9 ** 99999999 }}",
    "change": "{{ messages.append(1) }}{{ messages.clear() }}",
}


def _hostile(marker: Path) -> str:
    ways = "".join(
        f"{{% elif way == '{name}' %}}{{% if true %}}{source.replace('MARKER', str(marker))}"
        "{% endif %}"
        for name, source in ESCAPES.items()
    )
    return f"{{% set way = messages[0].content %}}{{% if false %}}{ways}{{% endif %}}"


@dataclass(frozen=True)
class Victim:
    """marker: a file that is there once somebody has got out of the sandbox. disk: a folder with
    model folders, of which only some are served."""

    server: ServerProcess
    client: httpx.Client
    undisturbed: Undisturbed
    disk: Path
    marker: Path


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory, machine: MachineLock) -> Iterator[Victim]:
    """Serves `tiny`, `long`, which has a long context, and `hostile`; a fourth model lies beside
    them."""
    disk = tmp_path_factory.mktemp("attacked")
    marker = disk / "escaped"
    folders = [tiny.write(disk / name) for name in ("tiny", "hostile", "hidden")]
    folders.append(tiny.write(disk / "long", max_position_embeddings=20_000))
    (folders[1] / "chat_template.jinja").write_text(_hostile(marker))
    with (
        run_server(str(folders[0]), str(folders[1]), str(folders[3])) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        yield Victim(server, client, Undisturbed(server, machine), disk, marker)


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


def entries(*, admin: bool = False, **named: str) -> str:
    """Tables of a file of keys, by name and key."""
    made = (
        api_keys.ApiKey(name=n, digest=api_keys.hash_key(k), admin=admin) for n, k in named.items()
    )
    return "".join(api_keys.format_entry(key, "") + "\n" for key in made)
