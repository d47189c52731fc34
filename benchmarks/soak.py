"""`make bench ARGS=soak`: all kinds of clients, for minutes, against a real server that has little
memory and whose runner is killed.

Some clients compare the answer with that to the same request alone. Others disconnect during a
request or an answer, with a FIN or a reset; send bodies of ten megabytes; send schemas that compile
for seconds, and disconnect; send invalid requests. The invariants: all answers are right, none ends
without an error or a finish reason, all errors are documented, and afterwards the memory of the
HTTP process is at its initial value.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import client
from benchmarks.streams import Body
from tests import tiny
from tests.chaos import processes
from tests.server_process import ServerProcess, run_server

CLIENTS = 32

# A queue limit that is reached, and so little memory that sequences are preempted.
OPTIONS = ("--max-queue", "16", "--memory", "0.03")

# A random model with a long context, so that a few long answers need more than the memory.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32_768,
}
MODEL = "soak-model"

TIMEOUT = 300.0

# Minimum and maximum seconds between two kills of the runner; idle seconds before the last
# measurement of memory.
KILL_INTERVAL = (20.0, 60.0)
IDLE = 60.0

# Accepted growth of memory relative to the start.
MAX_GROWTH = 0.2

# Statuses of accepted errors for a valid request: the queue is full, a runner was killed, bodies
# take all of their memory. The message of a 500 must name its cause.
BUSY, LOST, OVERLOADED = 429, 500, 503


@dataclass(frozen=True)
class SoakRequest:
    path: str
    body: str
    """JSON, without `stream`."""


@dataclass(kw_only=True)
class SoakCounters:
    """outcomes: counts by name. wrong: one sentence for each violation. slowest_probe: seconds of
    the slowest response to a probe."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    slowest_probe: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """status: /v1/status at the end, when the server is idle. before, peak, after: bytes of the
    HTTP process."""

    counters: SoakCounters
    status: Mapping[str, Any]
    before: int
    peak: int
    after: int

    @property
    def violations(self) -> list[str]:
        found = sorted(set(self.counters.wrong))
        if self.after > (1 + MAX_GROWTH) * self.before:
            found.append(f"memory grew from {self.before >> 20} to {self.after >> 20} MiB")
        if self.status["Running"] or self.status["Waiting"]:
            found.append("requests are still running")
        return found


def report(minutes: float, seed: int = 0) -> tuple[str, bool]:
    """The report, and whether there were no violations."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write(Path(folder) / MODEL, **SHAPE)
        with run_server(str(model), *OPTIONS) as server:
            found = soak(server, 60 * minutes, seed=seed)
            log = [line for line in server.log if "Traceback" in line and "app.runners" not in line]
    counters, mib = found.counters, 1 << 20
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(counters.outcomes.items()))
    failures = [*found.violations, *(f"a traceback: {line}" for line in log)]
    lines = [
        f"{CLIENTS} clients for {minutes:g} minutes: {outcomes}",
        f"kills {counters.kills}, restarts {found.status['Models'][0]['Restarts']}, "
        f"preemptions {found.status['Preemptions']}, evictions {found.status['Evictions']}",
        f"front end: {found.before / mib:.0f} MiB before, {found.peak / mib:.0f} at most, "
        f"{found.after / mib:.0f} after {IDLE:.0f} s idle",
        f"slowest /v1/models {counters.slowest_probe:.3f} s",
        *(f"WRONG: {failure}" for failure in failures[:20]),
        f"{len(failures)} violations",
    ]
    return "\n".join(lines), not failures


def soak(server: ServerProcess, seconds: float, *, seed: int = 0, idle: float = IDLE) -> SoakResult:
    """Run the soak test. Violations do not raise; they are in the result."""
    rng = random.Random(seed)
    requests = [_make_request(rng, long=number < 5) for number in range(30)]
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as http:
        expected = {request: _ask_alone(http, request) for request in requests}
        # allocate everything that is cached before memory is measured
        _ask_alone(http, requests[-1])
        before = client.get_rss(server.process.pid)
        counters, peaks = SoakCounters(), [before]
        asyncio.run(_soak(server, seconds, seed, expected, counters, peaks))
        status = _wait_until_idle(server)
        for request, answer in expected.items():
            if _ask_alone(http, request) != answer:
                counters.wrong.append(f"another answer afterwards: {request.body[:200]}")
    time.sleep(idle)
    after = client.get_rss(server.process.pid)
    return SoakResult(counters=counters, status=status, before=before, peak=max(peaks), after=after)


def _make_request(rng: random.Random, *, long: bool) -> SoakRequest:
    text = "".join(rng.choices("abcdefgh ijklmnop", k=rng.choice((10, 40, 200, 2000))))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randint(4000, 7000) if long else rng.choice((1, 8, 32, 64)),
        "ignore_eos": True,
    }
    sampled = {"temperature": 1, "seed": rng.randrange(1000)}
    body |= {"temperature": 0} if rng.random() < 0.5 else sampled
    if not long and rng.random() < 0.3:
        del body["ignore_eos"]
        body |= {"guided_regex": rng.choice(("[a-f]{4,40}", "(yes|no|perhaps)+"))}
    if rng.random() < 0.5:
        messages = [{"role": "user", "content": text}]
        return SoakRequest("/v1/chat/completions", json.dumps({**body, "messages": messages}))
    return SoakRequest("/v1/completions", json.dumps({**body, "prompt": text}))


def _ask_alone(http: httpx.Client, request: SoakRequest) -> str:
    headers = {"content-type": "application/json"}
    while True:
        reply = http.post(request.path, content=request.body, headers=headers)
        if reply.status_code == 200:
            return _answer_text(reply.json())
        assert reply.status_code in (LOST, OVERLOADED), (
            reply.text
        )  # the model is being loaded again
        time.sleep(1)


def _answer_text(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


async def _soak(
    server: ServerProcess,
    seconds: float,
    seed: int,
    expected: Mapping[SoakRequest, str],
    counters: SoakCounters,
    peaks: list[int],
) -> None:
    until = time.monotonic() + seconds
    background = [
        asyncio.create_task(_kill(server, random.Random(f"{seed}/kills"), counters)),
        asyncio.create_task(_watch(server, counters, peaks)),
    ]
    clients = (
        _client(server.port, until, expected, random.Random(f"{seed}/{number}"), counters)
        for number in range(CLIENTS)
    )
    await asyncio.gather(*clients)
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)


async def _client(
    port: int,
    until: float,
    expected: Mapping[SoakRequest, str],
    rng: random.Random,
    counters: SoakCounters,
) -> None:
    requests = list(expected)
    kinds = (
        _ask,
        _disconnect_during_request,
        _disconnect_during_answer,
        _send_large_body,
        _send_slow_schema,
        _send_invalid_request,
    )
    while time.monotonic() < until:
        [kind] = rng.choices(kinds, weights=(12, 2, 4, 1, 2, 2))
        try:
            async with asyncio.timeout(TIMEOUT):
                outcome = await kind(port, rng.choice(requests), expected, rng)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcome = f"wrong: {kind.__name__} {type(error).__name__} {error}"
        if outcome.startswith("wrong"):
            counters.wrong.append(outcome)
        counters.outcomes[outcome[:60]] += 1
        if outcome[:3].isdigit():
            await asyncio.sleep(rng.uniform(0, 2))


Expected = Mapping[SoakRequest, str]


async def _ask(port: int, request: SoakRequest, expected: Expected, rng: random.Random) -> str:
    """Send the request and compare the answer with that to the same request alone."""
    body = {**json.loads(request.body), "stream": rng.random() < 0.5}
    answer = await _exchange(port, encode_post_request(request.path, body))
    status = int(answer[9:12])
    if status != 200:
        return _classify_error_reply(status, answer)
    _, _, content = answer.partition(b"\r\n\r\n")
    if not body["stream"]:
        right = _answer_text(json.loads(content)) == expected[request]
        return "answered" if right else f"wrong: {request.body[:200]} got {content[:300]!r}"
    return _check_stream(content, request, expected[request])


def _check_stream(content: bytes, request: SoakRequest, expected: str) -> str:
    text, finished = "", False
    for line in content.decode().replace("\r\n", "\n").split("\n"):
        if not line.startswith("data: {"):
            finished = finished or line == "data: [DONE]"
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            # the status line was already sent; without it, this would be a 503 or 429
            late = {"model_loading": OVERLOADED, "server_busy": BUSY}
            return _classify_error(late.get(chunk["error"]["code"], LOST), chunk["error"])
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            text += choice["text"] if delta is None else delta.get("content") or ""
    if not finished:
        return f"wrong: a stream without an end: {content[-200:]!r}"
    return "answered" if text == expected else f"wrong: {request.body[:200]} streamed {text[:200]}"


def _classify_error_reply(status: int, answer: bytes) -> str:
    if b"\r\nretry-after:" not in answer.lower() and status in (BUSY, OVERLOADED):
        return f"wrong: {status} without Retry-After"
    content = answer.partition(b"\r\n\r\n")[2]
    try:
        return _classify_error(status, json.loads(content)["error"])
    except (ValueError, KeyError):
        return f"wrong: {answer[:300]!r}"


def _classify_error(status: int, error: Mapping[str, Any]) -> str:
    causes = {BUSY: "busy", LOST: "killed by SIGKILL", OVERLOADED: ""}
    if status in causes and causes[status] in error["message"]:
        return f"{status} {error['code']}"
    return f"wrong: {status} {error['message']}"


async def _disconnect_during_request(
    port: int, request: SoakRequest, expected: Expected, rng: random.Random
) -> str:
    """Disconnect in the header or in the body."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    data = encode_post_request(request.path, json.loads(request.body))
    writer.write(data[: rng.randrange(len(data))])
    await writer.drain()
    await asyncio.sleep(rng.uniform(0, 0.05))
    return await _disconnect(writer, rng, "a request")


async def _disconnect_during_answer(
    port: int, request: SoakRequest, expected: Expected, rng: random.Random
) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode_post_request(request.path, {**json.loads(request.body), "stream": True}))
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(rng.uniform(0, 2)):
            await reader.readexactly(rng.choice((1, 100, 400, 2000)))
    return await _disconnect(writer, rng, "an answer")


async def _send_large_body(
    port: int, request: SoakRequest, expected: Expected, rng: random.Random
) -> str:
    """A body of seven to ten megabytes, of values or of text."""
    item = rng.choice(("[]", "{}", '{"role":"user","content":"x"}', "1"))
    filling = ",".join([item] * (7_000_000 // (len(item) + 1)))
    body = rng.choice((f'{{"messages": [{filling}]}}', f'{{"prompt": {json.dumps(filling)}}}'))
    content = body.encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    answer = await _exchange(port, head.encode() + content)
    status = int(answer[9:12])
    return "large body: 400" if status == 400 else _classify_error_reply(status, answer)


async def _send_slow_schema(
    port: int, request: SoakRequest, expected: Expected, rng: random.Random
) -> str:
    """A schema that takes seconds to compile; the client disconnects."""
    number = rng.randrange(1000)
    many = {f"p{number}_{n}": {"type": "string", "maxLength": 20} for n in range(3000)}
    schema = {"type": "object", "properties": many, "additionalProperties": False}
    body = {"model": MODEL, "prompt": "x", "guided_json": schema, "max_tokens": 8}
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode_post_request("/v1/completions", body))
    await writer.drain()
    await asyncio.sleep(rng.uniform(0, 0.5))
    return await _disconnect(writer, rng, "a schema")


async def _send_invalid_request(
    port: int, request: SoakRequest, expected: Expected, rng: random.Random
) -> str:
    wrong: Mapping[str, Any]
    wrong, status = rng.choice(
        (
            ({"temperature": "warm"}, 400),
            ({"no_such_field": 1}, 400),
            ({"model": "another"}, 404),
            ({"max_tokens": -2}, 400),
            ({"guided_json": {"not": {}}}, 400),
        )
    )
    answer = await _exchange(
        port, encode_post_request(request.path, {**json.loads(request.body), **wrong})
    )
    got = int(answer[9:12])
    if got == status:
        return f"mistake: {status}"
    return _classify_error_reply(got, answer)


async def _disconnect(writer: asyncio.StreamWriter, rng: random.Random, what: str) -> str:
    if rng.random() < 0.5:
        writer.transport.abort()
        return f"reset during {what}"
    writer.close()
    return f"closed during {what}"


async def _exchange(port: int, request: bytes) -> bytes:
    """The response until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def _kill(server: ServerProcess, rng: random.Random, counters: SoakCounters) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*KILL_INTERVAL))
        for pid in processes.list_runners(server.process.pid)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                counters.kills += 1


async def _watch(server: ServerProcess, counters: SoakCounters, peaks: list[int]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as http:
        while True:
            began = time.monotonic()
            status = (await http.get("/v1/status")).json()
            await http.get("/v1/models")
            counters.slowest_probe = max(counters.slowest_probe, time.monotonic() - began)
            if min(status["Ledger"].values()) < 0:
                counters.wrong.append(f"wrong: a ledger of {status['Ledger']}")
            peaks.append(client.get_rss(server.process.pid))
            await asyncio.sleep(0.25)


def _wait_until_idle(server: ServerProcess) -> dict[str, Any]:
    """/v1/status when no request runs or waits."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        status: dict[str, Any] = dict(server.status())
        if status["Running"] == status["Waiting"] == 0 or time.monotonic() > deadline:
            return status
        time.sleep(0.05)


def encode_post_request(path: str, body: Body) -> bytes:
    """A request with `Connection: close`."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
