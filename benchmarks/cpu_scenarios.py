"""The scenarios of clients in `make bench-cpu`, and the figures of each one.

Knows: streams of completions. Must not know: how servers are started, other servers' names. All
prompts are letters, each of which is a token in every server, without spaces, which tokenizers
treat differently. Answers always have the full length.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from app.bench.metrics import percentile
from benchmarks import client
from benchmarks.streams import Body, Stream, run_all

PROMPT, ANSWER, LONG_ANSWER = 64, 64, 256
SAMPLED: Body = {"temperature": 0.8, "top_p": 0.95}
# mixed load: arrivals per second, their number, the range of prompts (uniform in the logarithm)
RATE, REQUESTS, MAX_RUNNING, SHORTEST, LONGEST = 2.0, 40, 32, 50, 1500
# the turns of an agent, and the tokens of the first prompt and of each turn's addition
TURNS, FIRST_TURN, ADDED, TURN_ANSWER = 20, 400, 320, 16

# the names of figures
TOKENS, TTFT_P50, TTFT_P99 = "tokens/s", "TTFT p50, s", "TTFT p99, s"
GAP_P50, GAP_P99, SECONDS = "gap p50, s", "gap p99, s", "all turns, s"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """model: its name in requests. fields: further fields of a request, such as one that keeps
    answers from ending early."""

    name: str
    port: int
    model: str
    fields: Body = field(default_factory=dict)


Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """measure: from a server and a label, which no other measurement of the server has, to its
    figures. Prompts depend on the label, so none is in a prefix cache."""

    name: str
    measure: Callable[[HttpServer, str], Awaitable[Figures]]


def is_rate(figure: str) -> bool:
    """Whether larger is better; the others are times."""
    return figure == TOKENS


async def warm_up(server: HttpServer) -> None:
    """The first request loads and allocates."""
    await run_all([_make_stream(server, "warm-up", PROMPT, 4)])


async def _measure_one_client(server: HttpServer, label: str) -> Figures:
    stream = _make_stream(server, label, PROMPT, LONG_ANSWER)
    await run_all([stream])
    first, last = stream.arrivals[0], stream.arrivals[-1]
    # an answer that arrives at once counts from its request
    spent = last - (first if last > first else stream.sent)
    return {TOKENS: (LONG_ANSWER - 1) / spent, TTFT_P50: stream.ttft}


def _make_clients(
    clients: int, *, sampled: bool = False
) -> Callable[[HttpServer, str], Awaitable[Figures]]:
    """Clients that start together. Tokens per second of all of them, from the first request to the
    last token."""

    async def measure(server: HttpServer, label: str) -> Figures:
        streams = [
            _make_stream(
                server,
                f"{label}/{n}",
                PROMPT,
                ANSWER,
                {**SAMPLED, "seed": n} if sampled else {},
            )
            for n in range(clients)
        ]
        await run_all(streams)
        spent = max(s.arrivals[-1] for s in streams) - min(s.sent for s in streams)
        ttfts = [stream.ttft for stream in streams]
        return {TOKENS: clients * ANSWER / spent, TTFT_P50: percentile(ttfts, 50)}

    return measure


async def _measure_mixed_load(server: HttpServer, label: str) -> Figures:
    """Poisson arrivals. A request that waits for MAX_RUNNING others has not been sent."""
    rng = random.Random(label)
    streams: list[Stream] = []
    running = asyncio.Semaphore(MAX_RUNNING)

    async def run(stream: Stream) -> None:
        async with running:
            await stream.run()

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for n in range(REQUESTS):
            length = int(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
            streams.append(_make_stream(server, f"{label}/{n}", length, ANSWER))
            tasks.create_task(run(streams[-1]))
            await asyncio.sleep(rng.expovariate(RATE))
    spent = max(stream.arrivals[-1] for stream in streams) - begun
    ttfts = [stream.ttft for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps(0, float("inf"))]
    return {
        TOKENS: REQUESTS * ANSWER / spent,
        TTFT_P50: percentile(ttfts, 50),
        TTFT_P99: percentile(ttfts, 99),
        GAP_P50: percentile(gaps, 50),
        GAP_P99: percentile(gaps, 99),
    }


async def _measure_agent(server: HttpServer, label: str) -> Figures:
    """Each turn repeats the last prompt and adds text of the length of an answer and a tool result.
    The text does not depend on the server's answer, so all servers get the same tokens."""
    text = _make_prompt(label, FIRST_TURN + (TURNS - 1) * ADDED)
    ttfts: list[float] = []
    begun = time.perf_counter()
    for turn in range(TURNS):
        stream = _send(server, text[: FIRST_TURN + turn * ADDED], TURN_ANSWER, {})
        await run_all([stream])
        ttfts.append(stream.ttft)
    return {SECONDS: time.perf_counter() - begun, TTFT_P50: percentile(ttfts, 50)}


SCENARIOS: Sequence[Scenario] = (
    Scenario(name="1 client", measure=_measure_one_client),
    Scenario(name="8 clients", measure=_make_clients(8)),
    Scenario(name="8 clients, top_p, seeds", measure=_make_clients(8, sampled=True)),
    Scenario(name="32 clients", measure=_make_clients(32)),
    Scenario(name="mixed load", measure=_measure_mixed_load),
    Scenario(name="agent", measure=_measure_agent),
)


def describe_scenarios() -> str:
    return (
        f"Clients send prompts of {PROMPT} tokens and get {ANSWER}; one client gets {LONG_ANSWER}, "
        "and its tokens/s count from the first token. Mixed load: "
        f"{REQUESTS} Poisson arrivals, {RATE:g} per second, prompts of {SHORTEST} to {LONGEST} "
        f"tokens, at most {MAX_RUNNING} at once. Agent: {TURNS} turns of {FIRST_TURN} to "
        f"{FIRST_TURN + (TURNS - 1) * ADDED} tokens, each of which repeats the last one and gets "
        f"{TURN_ANSWER} tokens."
    )


def _make_stream(
    server: HttpServer, label: str, length: int, answer: int, fields: Body | None = None
) -> Stream:
    return _send(server, _make_prompt(label, length), answer, fields or {})


def _send(server: HttpServer, prompt: str, answer: int, fields: Body) -> Stream:
    body: Body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        **server.fields,
        **fields,
    }
    return Stream(server.port, body)


def _make_prompt(label: str, length: int) -> str:
    return client.make_prompt(length, seed=label).replace(" ", "q")
