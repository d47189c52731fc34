"""`make bench ARGS=soak`: clients of every kind, for minutes, against a real server that is short
of memory and whose runner is killed.

Some clients ask and check the answer against the one that the same request got alone. Others
disconnect amid a request or an answer, politely or with a reset; send bodies of ten megabytes; have
schemas compiled that take seconds, and leave; make mistakes. What must hold: every answer is right,
none is cut off without an error, no error but those that are documented, and afterwards the memory
of the process that answers HTTP is back where it was.
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

from tests import tiny
from tests.bench import client
from tests.bench.streams import encode_post_request
from tests.chaos import processes
from tests.server_process import ServerProcess, run_server

CLIENTS = 32

# A queue that is met, and so little memory that sequences are preempted.
OPTIONS = ("--max-queue", "16", "--memory", "0.03")

# A random model whose context is long, so that a few long answers need more memory than there is.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32_768,
}
MODEL = "soaked"

TIMEOUT = 300.0

# Seconds between two kills of the runner, at least and at most, and of idleness before memory is
# looked at for the last time.
KILL_INTERVAL = (20.0, 60.0)
IDLE = 60.0

# Part of what it was at the start by which memory may have grown then.
MAX_GROWTH = 0.2

# Errors that may answer a right request, by status: the queue is full, a runner was killed, bodies
# take all of their memory. What a 500 says must name its cause.
BUSY, LOST, OVERLOADED = 429, 500, 503


@dataclass(frozen=True)
class SoakRequest:
    path: str
    body: str
    """JSON, without `stream`."""


@dataclass(kw_only=True)
class SoakCounters:
    """outcomes: by name, how often. wrong: one sentence each. slowest_probe: the longest that an
    answer to a probe took, in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    slowest_probe: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """status: /v1/status at the end, when all was idle. before, peak, after: bytes of the process
    that answers HTTP."""

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
    """What happened, and whether all was well."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write(Path(folder) / MODEL, **SHAPE)
        with run_server(str(model), *OPTIONS) as server:
            found = soak(server, 60 * minutes, seed=seed)
            log = [line for line in server.log if "Traceback" in line and "app.runners" not in line]
    counters, mib = found.counters, 1 << 20
    told = ", ".join(f"{name} {count}" for name, count in sorted(counters.outcomes.items()))
    complaints = [*found.violations, *(f"a traceback: {line}" for line in log)]
    lines = [
        f"{CLIENTS} clients for {minutes:g} minutes: {told}",
        f"kills {counters.kills}, restarts {found.status['Models'][0]['Restarts']}, "
        f"preemptions {found.status['Preemptions']}, evictions {found.status['Evictions']}",
        f"front end: {found.before / mib:.0f} MiB before, {found.peak / mib:.0f} at most, "
        f"{found.after / mib:.0f} after {IDLE:.0f} s idle",
        f"slowest /v1/models {counters.slowest_probe:.3f} s",
        *(f"WRONG: {complaint}" for complaint in complaints[:20]),
        f"{len(complaints)} violations",
    ]
    return "\n".join(lines), not complaints


def soak(server: ServerProcess, seconds: float, *, seed: int = 0, idle: float = IDLE) -> SoakResult:
    """Raises nothing for what the server does wrong; it is all in the result."""
    chance = random.Random(seed)
    questions = [_make_request(chance, long=number < 5) for number in range(30)]
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as http:
        expected = {question: _ask_alone(http, question) for question in questions}
        # what is made once, and kept, is there before memory is looked at
        _ask_alone(http, questions[-1])
        before = client.get_rss(server.process.pid)
        counters, peaks = SoakCounters(), [before]
        asyncio.run(_soak(server, seconds, seed, expected, counters, peaks))
        status = _wait_until_idle(server)
        for question, answer in expected.items():
            if _ask_alone(http, question) != answer:
                counters.wrong.append(f"another answer afterwards: {question.body[:200]}")
    time.sleep(idle)
    after = client.get_rss(server.process.pid)
    return SoakResult(counters=counters, status=status, before=before, peak=max(peaks), after=after)


def _make_request(chance: random.Random, *, long: bool) -> SoakRequest:
    text = "".join(chance.choices("abcdefgh ijklmnop", k=chance.choice((10, 40, 200, 2000))))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chance.randint(4000, 7000) if long else chance.choice((1, 8, 32, 64)),
        "ignore_eos": True,
    }
    drawn = {"temperature": 1, "seed": chance.randrange(1000)}
    body |= {"temperature": 0} if chance.random() < 0.5 else drawn
    if not long and chance.random() < 0.3:
        del body["ignore_eos"]
        body |= {"guided_regex": chance.choice(("[a-f]{4,40}", "(yes|no|perhaps)+"))}
    if chance.random() < 0.5:
        messages = [{"role": "user", "content": text}]
        return SoakRequest("/v1/chat/completions", json.dumps({**body, "messages": messages}))
    return SoakRequest("/v1/completions", json.dumps({**body, "prompt": text}))


def _ask_alone(http: httpx.Client, question: SoakRequest) -> str:
    headers = {"content-type": "application/json"}
    while True:
        reply = http.post(question.path, content=question.body, headers=headers)
        if reply.status_code == 200:
            return _answer_text(reply.json())
        assert reply.status_code in (LOST, OVERLOADED), reply.text  # loaded again just now
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
    chance: random.Random,
    counters: SoakCounters,
) -> None:
    asked = list(expected)
    kinds = (
        _ask,
        _disconnect_during_request,
        _disconnect_during_answer,
        _send_large_body,
        _send_slow_schema,
        _send_invalid_request,
    )
    while time.monotonic() < until:
        [kind] = chance.choices(kinds, weights=(12, 2, 4, 1, 2, 2))
        try:
            async with asyncio.timeout(TIMEOUT):
                outcome = await kind(port, chance.choice(asked), expected, chance)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcome = f"wrong: {kind.__name__} {type(error).__name__} {error}"
        if outcome.startswith("wrong"):
            counters.wrong.append(outcome)
        counters.outcomes[outcome[:60]] += 1
        if outcome[:3].isdigit():
            await asyncio.sleep(chance.uniform(0, 2))


Expected = Mapping[SoakRequest, str]


async def _ask(port: int, question: SoakRequest, expected: Expected, chance: random.Random) -> str:
    """And compare the answer with that to the same request alone."""
    body = {**json.loads(question.body), "stream": chance.random() < 0.5}
    answer = await _exchange(port, encode_post_request(question.path, body))
    status = int(answer[9:12])
    if status != 200:
        return _classify_error_reply(status, answer)
    _, _, content = answer.partition(b"\r\n\r\n")
    if not body["stream"]:
        right = _answer_text(json.loads(content)) == expected[question]
        return "answered" if right else f"wrong: {question.body[:200]} got {content[:300]!r}"
    return _streamed(content, question, expected[question])


def _streamed(content: bytes, question: SoakRequest, expected: str) -> str:
    text, finished = "", False
    for line in content.decode().replace("\r\n", "\n").split("\n"):
        if not line.startswith("data: {"):
            finished = finished or line == "data: [DONE]"
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            # its status was sent before: what would have been 503 or 429 without it
            late = {"model_loading": OVERLOADED, "server_busy": BUSY}
            return _classify_error(late.get(chunk["error"]["code"], LOST), chunk["error"])
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            text += choice["text"] if delta is None else delta.get("content") or ""
    if not finished:
        return f"wrong: a stream without an end: {content[-200:]!r}"
    return "answered" if text == expected else f"wrong: {question.body[:200]} streamed {text[:200]}"


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
    port: int, question: SoakRequest, expected: Expected, chance: random.Random
) -> str:
    """In the header or in the body."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    request = encode_post_request(question.path, json.loads(question.body))
    writer.write(request[: chance.randrange(len(request))])
    await writer.drain()
    await asyncio.sleep(chance.uniform(0, 0.05))
    return await _disconnect(writer, chance, "a request")


async def _disconnect_during_answer(
    port: int, question: SoakRequest, expected: Expected, chance: random.Random
) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode_post_request(question.path, {**json.loads(question.body), "stream": True}))
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(chance.uniform(0, 2)):
            await reader.readexactly(chance.choice((1, 100, 400, 2000)))
    return await _disconnect(writer, chance, "an answer")


async def _send_large_body(
    port: int, question: SoakRequest, expected: Expected, chance: random.Random
) -> str:
    """A body of seven to ten megabytes, of values or of text."""
    item = chance.choice(("[]", "{}", '{"role":"user","content":"x"}', "1"))
    filling = ",".join([item] * (7_000_000 // (len(item) + 1)))
    body = chance.choice((f'{{"messages": [{filling}]}}', f'{{"prompt": {json.dumps(filling)}}}'))
    content = body.encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    answer = await _exchange(port, head.encode() + content)
    status = int(answer[9:12])
    return "large body: 400" if status == 400 else _classify_error_reply(status, answer)


async def _send_slow_schema(
    port: int, question: SoakRequest, expected: Expected, chance: random.Random
) -> str:
    """One that takes seconds to compile, whose client leaves."""
    number = chance.randrange(1000)
    many = {f"p{number}_{n}": {"type": "string", "maxLength": 20} for n in range(3000)}
    schema = {"type": "object", "properties": many, "additionalProperties": False}
    body = {"model": MODEL, "prompt": "x", "guided_json": schema, "max_tokens": 8}
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode_post_request("/v1/completions", body))
    await writer.drain()
    await asyncio.sleep(chance.uniform(0, 0.5))
    return await _disconnect(writer, chance, "a schema")


async def _send_invalid_request(
    port: int, question: SoakRequest, expected: Expected, chance: random.Random
) -> str:
    wrong: Mapping[str, Any]
    wrong, status = chance.choice(
        (
            ({"temperature": "warm"}, 400),
            ({"no_such_field": 1}, 400),
            ({"model": "another"}, 404),
            ({"max_tokens": -2}, 400),
            ({"guided_json": {"not": {}}}, 400),
        )
    )
    answer = await _exchange(
        port, encode_post_request(question.path, {**json.loads(question.body), **wrong})
    )
    got = int(answer[9:12])
    if got == status:
        return f"mistake: {status}"
    return _classify_error_reply(got, answer)


async def _disconnect(writer: asyncio.StreamWriter, chance: random.Random, what: str) -> str:
    if chance.random() < 0.5:
        writer.transport.abort()
        return f"reset during {what}"
    writer.close()
    return f"closed during {what}"


async def _exchange(port: int, request: bytes) -> bytes:
    """What is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def _kill(server: ServerProcess, chance: random.Random, counters: SoakCounters) -> None:
    while True:
        await asyncio.sleep(chance.uniform(*KILL_INTERVAL))
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
    """/v1/status once nothing runs or waits."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        status: dict[str, Any] = dict(server.status())
        if status["Running"] == status["Waiting"] == 0 or time.monotonic() > deadline:
            return status
        time.sleep(0.05)
