"""Work that is done before a request has its place in a model's queue: bodies, prompts and grammars
are bounded, and what a client makes the server do of it does not slow others down."""

import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.attacks.attacker import Attack, Read, Send, Wait
from tests.attacks.conftest import Victim
from tests.http.lines import head, post
from tests.server_process import TIMEOUT, run_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/v1/tokenize"

LARGE = 9_900_000

# Bytes by which the process that answers HTTP may grow while it is attacked: the memory for bodies
# in flight, and as much for what is made of them.
GROWTH = 300 << 20


def sent(path: str, body: bytes, **fields: Any) -> Send:
    return Send(head("POST", path, Content_Length=len(body), **fields) + body)


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """A body of about `LARGE` bytes."""
    return start + b",".join([item] * (LARGE // (len(item) + 1))) + end


def memory(victim: Victim) -> int:
    """Bytes of the process that answers HTTP."""
    status = Path(f"/proc/{victim.server.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def grew_little(victim: Victim, before: int) -> None:
    """The process that answers HTTP, which had so many bytes before."""
    now = memory(victim)
    print(f"memory {before >> 20} MiB before, {now >> 20} MiB after")
    assert now < before + GROWTH


BODIES = {
    "lists": filled(b'{"messages": [', b"[]", b"]}"),
    "objects": filled(b'{"messages": [', b"{}", b"]}"),
    "messages": b'{"model": "tiny", "messages": ['
    + b",".join([b'{"role":"user","content":"' + b"x" * 150 + b'"}'] * 50_000)
    + b"]}",
    "most messages": b'{"model": "tiny", "messages": ['
    + b",".join([b'{"role":"user","content":"' + b"x" * 700 + b'"}'] * 13_000)
    + b"]}",
    "text": b'{"model": "tiny", "prompt": "' + b"x" * LARGE + b'"}',
    "commas": b'{"model": "tiny", "prompt": "' + b"," * LARGE + b'"}',
    "escapes": b'{"model": "tiny", "prompt": "' + b"\\n" * (LARGE // 2) + b'"}',
    "ids": b'{"model": "tiny", "prompt": [' + b",".join([b"1"] * 260_000) + b"]}",
    "tools": b'{"model": "tiny", "messages": [{"role":"user","content":"x"}], "tools": ['
    + b",".join([b'{"type":"function","function":{"name":"f%d"}}' % n for n in range(30_000)])
    + b"]}",
    "most tools": b'{"model": "tiny", "messages": [{"role":"user","content":"x"}], "tools": ['
    + b",".join([b'{"type":"function","function":{"name":"f%d"}}' % n for n in range(8_000)])
    + b"]}",
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for memory")
@pytest.mark.parametrize("kind", BODIES)
def test_large_bodies_disturb_nobody(victim: Victim, kind: str) -> None:
    """One of empty lists made another client wait for 1.3 s, six of them for 8.5 s, and fourteen
    made the process grow by 2 GB."""
    path = COMPLETIONS if b'"prompt"' in BODIES[kind][:40] else CHAT
    before = memory(victim)
    seen = victim.undisturbed(Attack([[sent(path, BODIES[kind]), Read()]], threads=5))
    assert set(seen.statuses) <= {"400", "503", "none"}
    assert seen.statuses["400"], "it is refused for what it is, not only for lack of room"
    grew_little(victim, before)


def test_texts_to_tokenize_disturb_nobody(victim: Victim) -> None:
    """Three of ten million letters made the process grow by 4 GB, and the errors of those that were
    no JSON held each of them for as long as its connection was open."""
    before = memory(victim)
    contents = [b"word " * (LARGE // 5), b"x" * LARGE]
    kinds = ["text/plain", "application/json"]
    texts = [sent(TOKENIZE, text, Content_Type=kind) for text in contents for kind in kinds]
    seen = victim.undisturbed(Attack([[text, Read()] for text in texts], threads=2))
    assert set(seen.statuses) <= {"400", "503", "none"}
    grew_little(victim, before)


def test_a_text_that_no_prompt_could_hold_is_not_tokenized(victim: Victim) -> None:
    reply = victim.client.post(TOKENIZE, content=b"x" * 100_000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096 tokens" in reply.json()["error"]["message"]
    assert len(victim.client.post(TOKENIZE, content=b"x" * 4096).json()) == 4096


def schema(number: int, properties: int = 4_000) -> dict[str, Any]:
    """One that takes seconds to compile, another one for each number."""
    many = {
        f"p{number}_{n}": {"type": "string", "maxLength": 20 + n % 50} for n in range(properties)
    }
    return {"type": "object", "properties": many, "additionalProperties": False}


def formatted(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "a"}]
    return {"model": "tiny", "messages": messages, "response_format": wanted, **fields}


YES_OR_NO: dict[str, Any] = {"model": "tiny", "prompt": "a", "guided_choice": ["yes", "no"]}


def test_schemas_of_clients_that_leave_disturb_nobody(victim: Victim) -> None:
    """Behind twenty of them a known `yes|no` waited for 27 s."""
    slow = [Send(post(formatted(schema(n), max_tokens=8), CHAT)) for n in range(20)]
    leaving = [[one, Wait(0.05)] for one in slow]
    victim.client.post(COMPLETIONS, json=YES_OR_NO)
    victim.undisturbed(Attack(leaving, threads=7), YES_OR_NO)
    # and new ones are compiled, not refused because of those that nobody waits for
    reply = victim.client.post(COMPLETIONS, json={**YES_OR_NO, "guided_choice": ["up", "down"]})
    assert reply.status_code == 200, reply.text
    deadline = time.monotonic() + TIMEOUT
    while victim.server.status()["Compiling"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_schemas_that_are_compiled_count_as_waiting(victim: Victim) -> None:
    body = post(formatted(schema(99), max_tokens=8, stream=True), CHAT)
    with httpx.Client(base_url=victim.server.url):
        import socket

        line = socket.create_connection(("127.0.0.1", victim.server.port))
        line.sendall(body)
        deadline = time.monotonic() + TIMEOUT
        while not (status := victim.server.status())["Compiling"]:
            assert time.monotonic() < deadline
        assert status["Waiting"] >= 1
        line.close()
        while victim.server.status()["Compiling"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_echoes_with_log_probabilities_disturb_nobody(victim: Victim) -> None:
    """One of 16,000 tokens was written as one frame: 1.2 s for every client."""
    body = {"model": "long", "prompt": "x" * 16_000, "echo": True, "logprobs": 20, "max_tokens": 1}
    streamed = Send(post({**body, "stream": True}, COMPLETIONS))
    whole = Send(post(body, COMPLETIONS))
    reply = victim.client.post(COMPLETIONS, json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 16_001
    seen = victim.undisturbed(Attack([[streamed, Read()], [whole, Read()]]))
    assert set(seen.statuses) <= {"200", "429"}


def test_memory_of_large_bodies_is_given_back(tmp_path: Path) -> None:
    """700 MB never were."""
    model = str(tiny.write(tmp_path / "tiny"))
    with run_server(model) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        pid = server.process.pid

        def used() -> int:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGESIZE"
            )

        ask = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        for _ in range(20):
            client.post(COMPLETIONS, json=ask)
        before = used()
        headers = {"content-type": "application/json"}
        for _ in range(3):
            for kind, body in BODIES.items():
                path = COMPLETIONS if b'"prompt"' in body[:40] else CHAT
                reply = client.post(path, content=body, headers=headers)
                assert reply.status_code == 400, (kind, reply.text[:300])
        deadline = time.monotonic() + TIMEOUT
        while (now := used()) > 1.2 * before:
            assert time.monotonic() < deadline, f"{before >> 20} MiB before, {now >> 20} MiB now"
            time.sleep(0.5)
        print(f"memory {before >> 20} MiB before, {now >> 20} MiB after")
