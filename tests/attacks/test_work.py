"""Work before a request is queued: bodies, prompts and grammars are bounded, and do not slow down
other clients."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import pytest

from benchmarks.client import get_rss
from tests import tiny
from tests.attacks.attacker import Attack, Read, Send, Wait
from tests.attacks.conftest import Victim
from tests.http.raw_client import head, open_connections, post
from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/v1/tokenize"

LARGE = 9_900_000

# The number of bytes by which the server process may grow during an attack: the memory for bodies
# in flight, and the same amount for their parsed values.
MAX_GROWTH = 300 << 20


def build_send(path: str, body: bytes, **fields: Any) -> Send:
    return Send(head("POST", path, Content_Length=len(body), **fields) + body)


def build_large_body(start: bytes, item: bytes, end: bytes) -> bytes:
    """A body of about `LARGE` bytes with many items."""
    return start + b",".join([item] * (LARGE // (len(item) + 1))) + end


def check_growth(victim: Victim, before: int) -> None:
    """Check that the server process has grown by less than `MAX_GROWTH`."""
    now = get_rss(victim.server.process.pid)
    print(f"memory {before >> 20} MiB before, {now >> 20} MiB after")
    assert now < before + MAX_GROWTH


BODIES = {
    "lists": build_large_body(b'{"messages": [', b"[]", b"]}"),
    "objects": build_large_body(b'{"messages": [', b"{}", b"]}"),
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


@pytest.mark.product
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.timing
def test_large_bodies_do_not_disturb_other_clients(victim: Victim, kind: str) -> None:
    """One body of empty lists delayed another client by 1.3 s, six of them by 8.5 s, and fourteen
    increased the process by 2 GB."""
    path = COMPLETIONS if b'"prompt"' in BODIES[kind][:40] else CHAT
    before = get_rss(victim.server.process.pid)
    result = victim.attack(Attack([[build_send(path, BODIES[kind]), Read()]], threads=5))
    assert set(result.statuses) <= {"400", "503", "none"}
    assert result.statuses["400"], (
        "it must be rejected for its content, not only for lack of memory"
    )
    check_growth(victim, before)


@pytest.mark.exhaustive
@pytest.mark.timing
def test_texts_to_tokenize_do_not_disturb_other_clients(victim: Victim) -> None:
    """Three texts of ten million letters increased the process by 4 GB, and the errors of invalid
    JSON kept the text in memory as long as the connection was open."""
    before = get_rss(victim.server.process.pid)
    contents = [b"word " * (LARGE // 5), b"x" * LARGE]
    kinds = ["text/plain", "application/json"]
    texts = [build_send(TOKENIZE, text, Content_Type=kind) for text in contents for kind in kinds]
    result = victim.attack(Attack([[text, Read()] for text in texts], threads=2))
    assert set(result.statuses) <= {"400", "503", "none"}
    check_growth(victim, before)


def test_a_text_longer_than_the_context_is_not_tokenized(victim: Victim) -> None:
    reply = victim.client.post(TOKENIZE, content=b"x" * 100_000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096 tokens" in reply.json()["error"]["message"]
    assert len(victim.client.post(TOKENIZE, content=b"x" * 4096).json()) == 4096


def build_schema(number: int, properties: int = 4_000) -> dict[str, Any]:
    """A schema that takes seconds to compile, different for each number."""
    properties_ = {
        f"p{number}_{n}": {"type": "string", "maxLength": 20 + n % 50} for n in range(properties)
    }
    return {"type": "object", "properties": properties_, "additionalProperties": False}


def build_chat(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "a"}]
    return {"model": "tiny", "messages": messages, "response_format": response_format, **fields}


YES_OR_NO: dict[str, Any] = {"model": "tiny", "prompt": "a", "guided_choice": ["yes", "no"]}


@pytest.mark.timing
def test_schemas_of_disconnected_clients_do_not_disturb_other_clients(victim: Victim) -> None:
    """A request with a cached `yes|no` grammar waited 27 s behind twenty of them."""
    requests = [Send(post(build_chat(build_schema(n), max_tokens=8), CHAT)) for n in range(20)]
    disconnecting = [[request, Wait(0.05)] for request in requests]
    victim.client.post(COMPLETIONS, json=YES_OR_NO)
    victim.attack(Attack(disconnecting, threads=7), YES_OR_NO)
    # new grammars are compiled, and not rejected because of grammars of disconnected clients
    reply = victim.client.post(COMPLETIONS, json={**YES_OR_NO, "guided_choice": ["up", "down"]})
    assert reply.status_code == 200, reply.text
    wait_until(lambda: not victim.server.status()["Compiling"], limit=TIMEOUT)


@pytest.mark.exhaustive
def test_requests_with_compiling_schemas_count_as_waiting(victim: Victim) -> None:
    body = post(build_chat(build_schema(99), max_tokens=8, stream=True), CHAT)
    status: dict[str, int] = {}

    def is_compiling() -> bool:
        status.update(victim.server.status())
        return bool(status["Compiling"])

    with open_connections(victim.server.port) as connect:
        connect().send(body)
        wait_until(is_compiling, limit=TIMEOUT)
    assert status["Waiting"] >= 1
    wait_until(lambda: not is_compiling(), limit=TIMEOUT)


@pytest.mark.exhaustive
@pytest.mark.timing
def test_echoes_with_logprobs_do_not_disturb_other_clients(victim: Victim) -> None:
    """An echo of 16,000 tokens was encoded as one frame, which blocked every client for 1.2 s."""
    body = {"model": "long", "prompt": "x" * 16_000, "echo": True, "logprobs": 20, "max_tokens": 1}
    streamed = Send(post({**body, "stream": True}, COMPLETIONS))
    unstreamed = Send(post(body, COMPLETIONS))
    reply = victim.client.post(COMPLETIONS, json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 16_001
    result = victim.attack(Attack([[streamed, Read()], [unstreamed, Read()]]))
    assert set(result.statuses) <= {"200", "429"}


@pytest.mark.exhaustive
def test_memory_of_large_bodies_is_released(tmp_path: Path) -> None:
    """700 MB were never released."""
    model = str(tiny.write(tmp_path / "tiny"))
    with run_server(model) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        before = measure_memory_after_requests(server, client)
        headers = {"content-type": "application/json"}
        for _ in range(3):
            for kind, body in BODIES.items():
                path = COMPLETIONS if b'"prompt"' in body[:40] else CHAT
                reply = client.post(path, content=body, headers=headers)
                assert reply.status_code == 400, (kind, reply.text[:300])
        wait_until_memory_is_released(server, before)


@pytest.mark.exhaustive
def test_memory_of_unusual_words_is_released(tmp_path: Path) -> None:
    """The tokenizer caches up to 10,000 words of up to 255 bytes in each thread, and never evicts
    any. This memory was never released."""
    model = str(tiny.write(tmp_path / "tiny", max_position_embeddings=32_768))
    with run_server(model) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        before = measure_memory_after_requests(server, client)

        def tokenize(number: int) -> None:
            rng = random.Random(number)
            words = ("".join(rng.choices(ascii_lowercase, k=250)) for _ in range(240))
            reply = client.post("/v1/tokenize", json={"prompt": " ".join(words)})
            assert reply.status_code == 200, reply.text[:300]
            sizes.append(get_rss(server.process.pid))

        sizes: list[int] = []
        with ThreadPoolExecutor(8) as clients:
            list(clients.map(tokenize, range(200)))
        assert max(sizes) > 1.2 * before, "the words were not cached, so this test proves nothing"
        wait_until_memory_is_released(server, before)


def measure_memory_after_requests(server: ServerProcess, client: httpx.Client) -> int:
    """Bytes of the HTTP process after a few short requests."""
    for _ in range(20):
        client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    return get_rss(server.process.pid)


def wait_until_memory_is_released(server: ServerProcess, before: int) -> None:
    def describe() -> str:
        return f"{before >> 20} MiB before, {get_rss(server.process.pid) >> 20} MiB now"

    wait_until(
        lambda: get_rss(server.process.pid) <= 1.2 * before, describe, limit=TIMEOUT, interval=0.5
    )
    print(describe())
