"""Two victims, one for all attacks to save time: a server as it is started on one's own machine,
and one that was exposed, with keys and TLS. Each attack is made while another client asks."""

import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from app.door import keys
from tests import tiny
from tests.serving import PATIENCE, Served, serving

# What the bystander may see of an attack: twice its usual time, and a little for a machine that has
# two cores and this test on them.
TIMES, SLACK = 2.0, 0.050

ASKED = 15

# A machine that is busy with something else for a while is not the attack's doing, and an attack
# that disturbs does so every time.
TRIES = 3

# Seconds between attacks: it is what each of them does that counts, not how many there are.
PAUSE = 0.01


class Undisturbed:
    """Another client, which asks as usual. trust: who signed the server's certificate."""

    def __init__(self, server: Served, trust: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._verify: ssl.SSLContext | bool = True if trust is None else trust

    def __call__(self, attack: Callable[[], object], *, once: bool = False) -> None:
        """Its median while the attack goes on, again and again, is about what it was before. once:
        the attack is so long that it is made a single time."""
        told: list[str] = []
        with httpx.Client(
            base_url=self._server.url, verify=self._verify, timeout=PATIENCE
        ) as client:
            for _ in range(TRIES):
                _ask(client)
                before = statistics.median(_ask(client) for _ in range(ASKED))
                with _Repeated(attack, once) as repeated:
                    during = statistics.median(_ask(client) for _ in range(ASKED))
                assert repeated.times > 0
                if during <= TIMES * before + SLACK:
                    return
                told.append(f"{before:.3f} s before, {during:.3f} s during")
        raise AssertionError("; ".join(told))


class _Repeated:
    """A thread that makes the attack until this is left. What goes wrong there is raised here."""

    def __init__(self, attack: Callable[[], object], once: bool) -> None:
        self.times = 0
        self._attack = attack
        self._once = once
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Repeated":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the attack was never answered"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not (self.times and (self._once or self._over.is_set())):
                self._attack()
                self.times += 1
                time.sleep(PAUSE)
        except BaseException as failure:  # told to the test, whatever it is
            self._failure = failure


def _ask(client: httpx.Client) -> float:
    """Seconds for an answer of a few tokens."""
    begun = time.monotonic()
    body = {"model": "tiny", "prompt": "as usual", "max_tokens": 4, "temperature": 0}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return time.monotonic() - begun


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

    server: Served
    client: httpx.Client
    undisturbed: Undisturbed
    disk: Path
    marker: Path


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Serves `tiny` and `hostile`; a third model lies beside them."""
    disk = tmp_path_factory.mktemp("attacked")
    marker = disk / "escaped"
    folders = [tiny.write(disk / name) for name in ("tiny", "hostile", "hidden")]
    (folders[1] / "chat_template.jinja").write_text(_hostile(marker))
    with (
        serving(str(folders[0]), str(folders[1])) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield Victim(server, client, Undisturbed(server), disk, marker)


@dataclass(frozen=True)
class Guarded:
    """A server with keys: user and admin from its file, owner from its environment."""

    server: Served
    client: httpx.Client
    user: str
    admin: str
    owner: str
    file: Path


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    disk = tmp_path_factory.mktemp("guarded")
    user, admin, owner = (keys.fresh() for _ in range(3))
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
        serving(*arguments, *certificate, variables=variables, trust=trust) as server,
        httpx.Client(base_url=server.url, verify=trust, timeout=PATIENCE) as client,
    ):
        yield Guarded(server, client, user, admin, owner, file)


def entries(*, admin: bool = False, **named: str) -> str:
    """Tables of a file of keys, by name and key."""
    made = (keys.Key(name=n, digest=keys.digest(k), admin=admin) for n, k in named.items())
    return "".join(keys.written(key, "") + "\n" for key in made)
