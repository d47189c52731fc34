"""Measurements through HTTP with our server process and a random-weight model."""

import json
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import mlx.core as mx

from app.bench.metrics import percentile
from benchmarks import client, random_model
from models.base import Model
from tests.server_process import ServerProcess

PROMPT, ANSWER, PAIRS = 64, 48, 7
LONG, STATUS_PROMPT = 1500, 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class BareLoop:
    """cpu_per_token: CPU seconds of this process."""

    tokens_per_second: float
    cpu_per_token: float


def run_bare_loop(model: Model, prompt: str, tokens: int) -> BareLoop:
    """A minimal loop: greedy, pipelined by one step."""
    kv = model.make_kv()
    hidden = model(mx.array([list(prompt.encode())]), kv)
    token = mx.argmax(model.logits(hidden[:, -1]), axis=-1)
    mx.eval(token)
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(tokens):
        after = mx.argmax(model.logits(model(token[:, None], kv)[:, -1]), axis=-1)
        mx.async_eval(after)
        token.item()
        token = after
    token.item()
    return BareLoop(
        tokens_per_second=tokens / (time.perf_counter() - begun),
        cpu_per_token=(time.process_time() - cpu) / tokens,
    )


def decode(server: ServerProcess, folder: Path) -> str:
    """Bare loop and server alternate, so that drift of the machine affects both."""
    model = random_model.load(folder)
    prompt = client.make_prompt(PROMPT, seed=0)
    bare, served = list[float](), list[float]()
    for _ in range(PAIRS):
        bare.append(run_bare_loop(model, prompt, ANSWER).tokens_per_second)
        tpot = client.stream_completion(server.url, folder.name, prompt, ANSWER).tpot
        assert tpot is not None
        served.append(1 / tpot)
    ratios = [s / b for s, b in zip(served, bare, strict=True)]
    return (
        f"decode, tokens/s: bare {client.format_spread(bare)}, served "
        f"{client.format_spread(served)}, "
        f"served/bare {client.format_spread(ratios)}"
    )


def first_token(server: ServerProcess, folder: Path) -> str:
    """Seconds to the first token of a new prompt, and of the same prompt again."""
    cold, warm = list[float](), list[float]()
    for seed in range(3):
        prompt = client.make_prompt(LONG, seed=1000 + seed)
        first = client.stream_completion(server.url, folder.name, prompt, 2)
        again = client.stream_completion(server.url, folder.name, prompt, 2)
        # two random prompts can start with the same one or two letters
        assert (first.cached_tokens or 0) < 10
        assert again.cached_tokens == LONG - 1
        cold.append(first.ttft)
        warm.append(again.ttft)
    ratios = [c / w for c, w in zip(cold, warm, strict=True)]
    return (
        f"first token after {LONG} prompt tokens, s: cold {client.format_spread(cold)}, "
        f"warm {client.format_spread(warm)}, cold/warm {client.format_spread(ratios)}"
    )


def status(server: ServerProcess, folder: Path) -> str:
    """Milliseconds of /v1/status during a long prefill."""
    prompt = client.make_prompt(STATUS_PROMPT, seed=2000)
    times = _status_during(
        server, lambda: client.stream_completion(server.url, folder.name, prompt, 2)
    )
    return f"/v1/status while {STATUS_PROMPT} prompt tokens are evaluated, ms: {times}"


def flood(server: ServerProcess, folder: Path) -> str:
    """Milliseconds of /v1/status while a body of the maximum size is tokenised."""
    text = "hello world " * (9_000_000 // 12)

    def tokenize() -> None:
        reply = httpx.post(f"{server.url}/v1/tokenize", content=text, timeout=client.TIMEOUT)
        reply.raise_for_status()

    return f"/v1/status while 9 MB are tokenized, ms: {_status_during(server, tokenize)}"


def _status_during(server: ServerProcess, work: Callable[[], object]) -> str:
    working = threading.Thread(target=work, daemon=True)
    times: list[float] = []
    with httpx.Client(base_url=server.url, timeout=client.TIMEOUT) as http:
        working.start()
        while working.is_alive():
            begun = time.perf_counter()
            http.get("/v1/status").raise_for_status()
            times.append(1000 * (time.perf_counter() - begun))
            time.sleep(0.01)
    return (
        f"median {statistics.median(times):.2f}, p99 {percentile(times, 99):.2f}, "
        f"most {max(times):.2f} ({len(times)} requests)"
    )


def memory(server: ServerProcess, folder: Path, requests: int = 1000) -> str:
    """Resident memory of the server over many requests of different lengths, mostly new prompts."""
    sizes: list[int] = []
    for i in range(requests):
        body = {
            "model": folder.name,
            "prompt": client.make_prompt(4 + 7 * i % 20, seed=3000 + i),
            "max_tokens": 1 + i % 4,
        }
        httpx.post(
            f"{server.url}/v1/completions", json=body, timeout=client.TIMEOUT
        ).raise_for_status()
        sizes.append(client.get_rss(server.process.pid))
    settled = sizes[requests // 10 :]
    base = settled[0]
    return (
        f"resident memory over {requests} requests: {base / 2**20:.1f} MiB after the first tenth, "
        f"then {100 * (min(settled) / base - 1):+.2f} % to "
        f"{100 * (max(settled) / base - 1):+.2f} %, "
        f"{100 * (settled[-1] / base - 1):+.2f} % at the end"
    )


def disconnect(server: ServerProcess, folder: Path) -> str:
    """Seconds from a disconnect to the end of the next, short request."""
    lines: list[str] = []
    for kind, prompt, awaited in (
        ("decoding", client.make_prompt(PROMPT, seed=4000), b"data: "),
        ("prefilling", client.make_prompt(STATUS_PROMPT, seed=4001), b": prefill"),
    ):
        alone, after = list[float](), list[float]()
        for i in range(3):
            alone.append(client.stream_completion(server.url, folder.name, f"short {i}", 1).ttft)
            _disconnect_when(server, folder.name, prompt + str(i), awaited)
            after.append(
                client.stream_completion(server.url, folder.name, f"short again {i}", 1).ttft
            )
        lines.append(
            f"{kind}: alone {client.format_spread(alone)}, after {client.format_spread(after)}"
        )
    return "a short request after a disconnect, s: " + "; ".join(lines)


def _disconnect_when(server: ServerProcess, model: str, prompt: str, awaited: bytes) -> None:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 2000, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=client.TIMEOUT) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        received = b""
        while awaited not in received:
            received += line.recv(65536)


MEASUREMENTS: dict[str, Callable[[ServerProcess, Path], str]] = {
    "decode": decode,
    "ttft": first_token,
    "status": status,
    "flood": flood,
    "hangup": disconnect,
    "memory": memory,
}
