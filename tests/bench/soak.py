"""`make bench ARGS=soak`: many badly behaved clients, for minutes, against a real server.

Clients send bodies of every kind, wrong ones among them, and many do not stay: they hang up amid
their own header or body, or amid the answer, politely or with a reset. What must hold: no answer
but the one asked for (429, when too many wait, is asked for), memory inside the budget all the
time, and afterwards the same answers as before.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.bench import client
from tests.bench.streams import Body, post
from tests.serving import Served, serving

CLIENTS = 64
# few places and a short queue, so that 429 is met; little memory, so that prefixes are given up
OPTIONS = ("--parallel", "8", "--max-queue", "24", "--memory", "0.04", "--cache", "radix")
PATIENCE = 120.0
WATCH_SECONDS = 0.25
# what Python, sockets and the allocator's own books may grow by beside the ledger
SLACK = 128 << 20

ALPHABET = "the sea and a dog, 12 x 3.5 = ünï 🙂\n{x}<s>"


@dataclass(kw_only=True)
class Tally:
    """outcomes: by name, how often. wrong: answers that nobody asked for. resident: the most bytes
    the server's process had. ledger: the most that kv and prefix came to together."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resident: int = 0
    ledger: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    tally: Tally
    status: Mapping[str, Any]
    """/v1/status at the end, everybody gone."""
    changed: Sequence[str]
    """prompts whose answers were others afterwards"""
    resident_before: int
    allowed: int
    """bytes of resident memory that the budget allows"""


def soak(server: Served, model: str, seconds: float, *, seed: int = 0) -> Soaked:
    """Raises nothing for what the server does wrong; it is all in the result."""
    before = _answers(server, model)
    resident = client.resident(server.process.pid)
    ledger = _status(server)["Ledger"]
    tally = Tally()
    asyncio.run(_soak(server, model, seconds, seed, tally))
    status = _idle(server)
    after = _answers(server, model)
    return Soaked(
        tally=tally,
        status=status,
        changed=[prompt for prompt, text in before.items() if after[prompt] != text],
        resident_before=resident,
        # what was there when nothing ran, and everything that the ledger had left to give
        allowed=resident + ledger["free"] + ledger["working"] + SLACK,
    )


def report(minutes: float, model: Path | None = None) -> str:
    with serving(*([] if model is None else [str(model)]), *OPTIONS) as server:
        found = soak(server, "builtin" if model is None else model.name, 60 * minutes)
        log = [line for line in server.log if "Traceback" in line or " ERROR " in line]
    tally, mib = found.tally, 1 << 20
    told = ", ".join(f"{name} {count}" for name, count in sorted(tally.outcomes.items()))
    ledger = found.status["Ledger"]
    return "\n".join(
        [
            f"{CLIENTS} clients for {minutes:g} minutes: {told}",
            f"not asked for: {len(tally.wrong)}; errors in the log: {len(log)}",
            *sorted(set(tally.wrong))[:10],
            *log[:10],
            f"kv and prefix at most {tally.ledger / mib:.1f} MiB of "
            f"{(ledger['budget'] - ledger['weights'] - ledger['working']) / mib:.1f}; resident "
            f"{found.resident_before / mib:.0f} MiB before, {tally.resident / mib:.0f} at most, "
            f"{found.allowed / mib:.0f} allowed",
            f"evictions {found.status['Evictions']}, preemptions {found.status['Preemptions']}, "
            f"failures {found.status['Failures']}, still running {found.status['Running']}",
            f"answers that changed: {len(found.changed)}",
        ]
    )


async def _soak(server: Served, model: str, seconds: float, seed: int, tally: Tally) -> None:
    deadline = time.monotonic() + seconds
    watching = asyncio.create_task(_watch(server, tally))
    await asyncio.gather(
        *(
            _client(server.port, model, deadline, random.Random(f"{seed}/{number}"), tally)
            for number in range(CLIENTS)
        )
    )
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def _client(
    port: int, model: str, deadline: float, chance: random.Random, tally: Tally
) -> None:
    while time.monotonic() < deadline:
        path, body, expected = _request(model, chance)
        behave = chance.choice(
            (_stay, _stay, _stay, _stay, _leave_amid_request, _leave_amid_answer)
        )
        try:
            async with asyncio.timeout(PATIENCE):
                outcome = await behave(port, post(path, body), expected, chance)
        except (OSError, TimeoutError) as error:
            outcome = f"not asked for: {type(error).__name__} {error}"
        if outcome.startswith("not asked for"):
            tally.wrong.append(f"{outcome} for {json.dumps(body)[:300]}")
        tally.outcomes[outcome[:60]] += 1
        if outcome == "429":
            await asyncio.sleep(chance.uniform(0, 2))


def _request(model: str, chance: random.Random) -> tuple[str, Body, int]:
    """Path, body and status: of everything that a client may say, some of it wrong."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": chance.choice((1, 2, 8, 8, 32, 64)),
        "temperature": chance.choice((0, 0.7, 1.5)),
        "stream": chance.random() < 0.6,
    }
    for name, value in (
        ("seed", chance.randrange(1000)),
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.05),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 0.5),
        ("stop", ["the", "\n\n"]),
        ("logit_bias", {"5": -100, "7": 3}),
    ):
        if chance.random() < 0.2:
            body[name] = value
    # few beginnings, so that many prompts share one
    beginning = ALPHABET[chance.randrange(4) :]
    text = beginning + "".join(chance.choices(ALPHABET, k=chance.choice((1, 10, 40, 200))))
    chat = chance.random() < 0.5
    said = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body |= said
    match chance.randrange(20):
        case 0:
            return path, {**body, "temperature": "warm"}, 400
        case 1:
            return path, {**body, "no_such_field": 1}, 400
        case 2:
            return path, {**body, "model": "another"}, 404
        case 3:
            return path, {**body, "max_tokens": 0}, 400
        case _:
            return path, body, 200


async def _stay(port: int, request: bytes, expected: int, chance: random.Random) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    finally:
        writer.close()
    status = answer[9:12].decode()
    if status == "429":
        return "429" if b"etry-after:" in answer.lower() else "not asked for: 429 without a time"
    if status != str(expected):
        return f"not asked for: {answer[:20]!r} ... {answer[-300:]!r}"
    if b'"error"' in answer and expected == 200:
        return f"not asked for: {answer[-300:]!r}"
    if b"text/event-stream" in answer and b"data: [DONE]" not in answer:
        return f"not asked for: a stream that ends with {answer[-100:]!r}"
    return status


async def _leave_amid_request(
    port: int, request: bytes, expected: int, chance: random.Random
) -> str:
    """In the header or in the body."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request[: chance.randrange(len(request))])
    await writer.drain()
    await asyncio.sleep(chance.uniform(0, 0.05))
    return await _leave(writer, chance, "its request")


async def _leave_amid_answer(
    port: int, request: bytes, expected: int, chance: random.Random
) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(chance.uniform(0, 2)):
            await reader.readexactly(chance.choice((1, 100, 400, 2000)))
    return await _leave(writer, chance, "the answer")


async def _leave(writer: asyncio.StreamWriter, chance: random.Random, what: str) -> str:
    if chance.random() < 0.5:
        writer.transport.abort()
        return f"reset amid {what}"
    writer.close()
    return f"left amid {what}"


async def _watch(server: Served, tally: Tally) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        while True:
            ledger = (await http.get("/v1/status")).json()["Ledger"]
            if min(ledger.values()) < 0:
                tally.wrong.append(f"not asked for: a ledger of {ledger}")
            tally.ledger = max(tally.ledger, ledger["kv"] + ledger["prefix"])
            tally.resident = max(tally.resident, client.resident(server.process.pid))
            await asyncio.sleep(WATCH_SECONDS)


def _answers(server: Served, model: str) -> dict[str, str]:
    """Greedy and seeded ones."""
    found: dict[str, str] = {}
    for number in range(6):
        prompt = client.text(40, seed=5000 + number)
        drawn = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        body = {"model": model, "prompt": prompt, "max_tokens": 24, **drawn}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        reply.raise_for_status()
        found[prompt] = reply.json()["choices"][0]["text"]
    return found


def _idle(server: Served) -> dict[str, Any]:
    """/v1/status once nothing runs or waits."""
    deadline = time.monotonic() + PATIENCE
    while True:
        status = _status(server)
        if status["Running"] == status["Waiting"] == 0 or time.monotonic() > deadline:
            return status
        time.sleep(0.05)


def _status(server: Served) -> dict[str, Any]:
    return dict(server.status())
