"""`make bench ARGS=versus`: our server compared with mlx-lm's, with the same model and client.

Measurements alternate between the servers (A B A B ...), and figures are ratios of medians, so that
drift of the machine affects both. Waiting times are in units of our server's work: a chunk is the
average time of a chunk of a long prompt without other load, a step is the time per token of eight
running streams. Without MLX_LM (see benchmarks/server_pair.py) only our figures are printed.
"""

import asyncio
import contextlib
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks import client, random_model, server_pair
from benchmarks.kv_layout_caches import PerSequenceLayout
from benchmarks.server_pair import BenchServer
from benchmarks.streams import Body, Stream, run_all, run_in_background
from models.base import Model

STREAMS, PROMPT, ANSWER = 8, 64, 64
LONG, CONTEXT = 4000, 1500
ROUNDS = 4
# a stream that does not end during the measurement
UNENDING_TOKENS = 2000
PREFILL_TIMEOUT = 3.0
# tokens after which the buffers of the seven, which grow by hundreds of positions, have grown after
# the long prompts: the newcomer must not arrive during the growth, which is reported separately
WARMUP_TOKENS = 60
# time in which a server detects all disconnects
SETTLE_SECONDS = 1.0

ScenarioResult = dict[str, list[float]]
Scenario = Callable[[BenchServer, int], Coroutine[Any, Any, ScenarioResult]]

SAMPLED: Body = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}


def make_body(server: BenchServer, prompt: str, tokens: int, sampling: Body | None = None) -> Body:
    greedy: Body = {"temperature": 0}
    sampled = greedy if sampling is None else sampling
    return {"model": server.model, "prompt": prompt, "max_tokens": tokens, **sampled}


def make_throughput_scenario(label: str, sampling: Callable[[int], Body | None]) -> Scenario:
    """Eight concurrent streams with new prompts. sampling: by row."""

    async def measure(server: BenchServer, turn: int) -> ScenarioResult:
        streams = [
            Stream(
                server.port,
                make_body(server, _make_prompt(label, turn, row, PROMPT), ANSWER, sampling(row)),
            )
            for row in range(STREAMS)
        ]
        await run_all(streams)
        seconds = max(s.arrivals[-1] for s in streams) - min(s.sent for s in streams)
        begin = max(s.arrivals[0] for s in streams)
        end = min(s.arrivals[-1] for s in streams)
        decoded = sum(begin < at <= end for s in streams for at in s.arrivals)
        return {
            f"{label}, tokens/s": [STREAMS * ANSWER / seconds],
            # no figure if the streams ran one after the other
            f"{label}, tokens/s while all decode": [decoded / (end - begin)] if end > begin else [],
        }

    return measure


async def measure_interference(server: BenchServer, turn: int) -> ScenarioResult:
    """A long prompt alone; a short one during a long one; a stream during a long one."""

    def long(kind: str) -> Stream:
        prompt = _make_prompt(f"long {kind}", turn, 0, LONG)
        return Stream(server.port, make_body(server, prompt, 2))

    alone = await long("alone").run()
    quiet = await Stream(
        server.port, make_body(server, _make_prompt("quiet", turn, 0, PROMPT), 1)
    ).run()
    short = Stream(server.port, make_body(server, _make_prompt("short", turn, 0, PROMPT), 1))
    other = long("before a short one")
    async with run_in_background([other]):
        await other.wait_for_prefill(PREFILL_TIMEOUT)
        await short.run()
    beside = Stream(
        server.port, make_body(server, _make_prompt("beside", turn, 0, PROMPT), UNENDING_TOKENS)
    )
    other = long("beside a stream")
    async with run_in_background([beside]):
        await beside.wait_for_tokens(8)
        await other.run()
    await asyncio.sleep(SETTLE_SECONDS)
    return {
        f"{LONG} tokens alone: first token, s": [alone.ttft],
        f"{PROMPT} tokens alone: first token, s": [quiet.ttft],
        f"{PROMPT} tokens during {LONG}: first token, s": [short.ttft],
        f"a stream during {LONG} tokens: longest gap, s": [
            max(beside.gaps(other.sent, other.arrivals[0]))
        ],
    }


def make_joining_scenario(length: int) -> Scenario:
    """A stream joins seven decoding ones and ends again. The prompts of the seven, and a long
    prompt of the newcomer, are cached, so the result is the cost of joining."""

    async def measure(server: BenchServer, turn: int) -> ScenarioResult:
        cached = length > PROMPT

        def prompt(row: int) -> str:
            text = _make_prompt(f"joining {length}", 0 if cached else turn, row, length)
            # mlx-lm's server crashes on a completely cached prompt
            return text + (f" {turn}" if cached else "")

        if cached and turn == 0:
            for row in range(STREAMS):
                await Stream(server.port, make_body(server, prompt(row) + " first", 1)).run()
        # all but the end of a long prompt of the newcomer is cached, as in the measurement
        quiet = prompt(7) + "?" if cached else _make_prompt("alone", turn, 0, PROMPT)
        alone = await Stream(server.port, make_body(server, quiet, 1)).run()
        rows = [
            Stream(server.port, make_body(server, prompt(row), UNENDING_TOKENS)) for row in range(7)
        ]
        newcomer = Stream(server.port, make_body(server, prompt(7), 12))
        async with run_in_background(rows):
            for row in rows:
                await row.wait_for_tokens(WARMUP_TOKENS)
            await newcomer.run()
            await rows[0].wait_for_tokens(len(rows[0].arrivals) + 6)
        await asyncio.sleep(SETTLE_SECONDS)
        step = statistics.median(
            gap for row in rows for gap in row.gaps(newcomer.arrivals[0], newcomer.arrivals[-1])
        )
        join = [_excess_seconds(row, newcomer.sent, newcomer.arrivals[0], step) for row in rows]
        leave = [
            _excess_seconds(row, newcomer.arrivals[-1], newcomer.arrivals[-1] + 2 * step, step)
            for row in rows
        ]
        longest = [max(row.gaps(newcomer.sent, newcomer.arrivals[0])) - step for row in rows]
        grown = max(
            b - a
            for row in rows
            for a, b in pairwise(row.arrivals[WARMUP_TOKENS // 3 : WARMUP_TOKENS])
        )
        title = f"7 streams at {length} tokens, one more joins"
        return {
            f"{title}: a step, s": [step],
            f"{title}: its first token, s": [newcomer.ttft],
            f"{title}: its first token beyond that alone, s": [newcomer.ttft - alone.ttft],
            f"{title}: the longest gap before, s": [grown],
            f"{title}: the longest gap beyond a step, s": [statistics.median(longest)],
            f"{title}: total delay of the others, s": [statistics.median(join)],
            f"{title}: total delay of the others when it leaves, s": [statistics.median(leave)],
        }

    return measure


def _excess_seconds(stream: Stream, start: float, end: float, step: float) -> float:
    """The number of seconds by which the gaps within [start, end] exceed steps of length `step`."""
    gaps = stream.gaps(start, end)
    return sum(gaps) - len(gaps) * step


SCENARIOS: Sequence[tuple[Scenario, int]] = (
    (make_throughput_scenario("greedy", lambda row: None), ROUNDS),
    (make_throughput_scenario("sampled", lambda row: SAMPLED), ROUNDS),
    (make_throughput_scenario("seeded", lambda row: {**SAMPLED, "seed": row}), 3),
    (measure_interference, 3),
    (make_joining_scenario(PROMPT), ROUNDS),
    (make_joining_scenario(CONTEXT), ROUNDS),
)


def measure_bare_decode(model: Model, turn: int) -> float:
    """Tokens per second of a minimal batched loop: greedy, pipelined by one step, with separate
    buffers for the keys and values of each row."""
    rows = [model.make_kv() for _ in range(STREAMS)]
    first: list[mx.array] = []
    for row, kv in enumerate(rows):
        ids = list(_make_prompt("bare", turn, row, PROMPT).encode())
        first.append(mx.argmax(model.logits(model(mx.array([ids]), kv)[:, -1]), axis=-1))
    batch = PerSequenceLayout(rows)  # pyright: ignore[reportArgumentType]  # a Llama's are KVCaches
    tokens = mx.concatenate(first)
    mx.eval(tokens)
    begun = time.perf_counter()
    for _ in range(ANSWER):
        after = mx.argmax(model.logits(batch.step(model, tokens)), axis=-1)
        mx.async_eval(after)
        tokens.tolist()
        tokens = after
    mx.eval(tokens)
    return STREAMS * ANSWER / (time.perf_counter() - begun)


async def _measure(folder: Path, servers: Sequence[BenchServer]) -> dict[str, ScenarioResult]:
    """Results by server name."""
    found: dict[str, ScenarioResult] = {server.name: {} for server in servers}
    for server in servers:
        # the first request loads and allocates
        await Stream(server.port, make_body(server, "once", 4)).run()
    for measure, rounds in SCENARIOS:
        for turn in range(rounds):
            for server in servers:
                for title, values in (await measure(server, turn)).items():
                    found[server.name].setdefault(title, []).extend(values)
                    # progress, because the measurement takes half an hour
                    shown = ", ".join(f"{value:.4g}" for value in values)
                    print(f"{server.name}, turn {turn}: {title}: {shown}", file=sys.stderr)
    model = random_model.load(folder)
    decode = make_throughput_scenario("beside the bare loop", lambda row: None)
    bares = found["ours"].setdefault("bare loop of 8, tokens/s", [])
    for turn in range(ROUNDS):
        bares.append(measure_bare_decode(model, turn))
        for title, values in (await decode(servers[0], turn)).items():
            found["ours"].setdefault(title, []).extend(values)
    return found


def report(folder: Path) -> str:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server_pair.run_ours(folder, STREAMS))]
        other = stack.enter_context(server_pair.run_mlx_lm(folder))
        if other is not None:
            servers.append(other)
        found = asyncio.run(_measure(folder, servers))
    lines = [*_format_table(found), *_format_ratios(found["ours"])]
    if other is None:
        lines.insert(0, f"mlx-lm's server: not measured ({server_pair.MLX_LM_VARIABLE} is not set)")
    return "\n".join(lines)


def _format_table(found: dict[str, ScenarioResult]) -> list[str]:
    """Medians and spreads. The ratio is theirs to ours in seconds and ours to theirs in tokens/s,
    so that we are ahead above 1."""
    mine, others = found["ours"], found.get("mlx-lm", {})
    lines = ["| | ours | mlx-lm | ahead by |", "|---|---|---|---|"]
    for title, values in mine.items():
        theirs = others.get(title, [])
        ahead = ""
        # an excess waiting time can be negative
        if values and theirs and min(*values, *theirs) > 0:
            ratio = statistics.median(values) / statistics.median(theirs)
            ahead = f"{ratio if 'tokens/s' in title else 1 / ratio:.2f}"
        cells = (client.format_spread(v) if v else "" for v in (values, theirs))
        lines.append(f"| {title} | {' | '.join(cells)} | {ahead} |")
    return lines


def _format_ratios(mine: ScenarioResult) -> list[str]:
    """Our waiting times in chunks and steps."""

    def median(title: str) -> float:
        return statistics.median(mine[title])

    chunk = median(f"{LONG} tokens alone: first token, s") * server_pair.CHUNK / LONG
    served = median("beside the bare loop, tokens/s while all decode")
    lines = [
        f"served / bare batched loop: {served / median('bare loop of 8, tokens/s'):.3f}",
        f"{PROMPT} tokens during {LONG}, first token, in chunks: "
        f"{median(f'{PROMPT} tokens during {LONG}: first token, s') / chunk:.2f}",
        f"a stream during {LONG} tokens, longest gap, in chunks: "
        f"{median(f'a stream during {LONG} tokens: longest gap, s') / chunk:.2f}",
    ]
    for length in (PROMPT, CONTEXT):
        title = f"7 streams at {length} tokens, one more joins"
        step = median(f"{title}: a step, s")
        for part in (
            "its first token beyond that alone",
            "the longest gap before",
            "the longest gap beyond a step",
            "total delay of the others",
            "total delay of the others when it leaves",
        ):
            lines.append(f"{title}: {part}, in steps: {median(f'{title}: {part}, s') / step:.2f}")
    return lines


def _make_prompt(label: str, turn: int, row: int, length: int) -> str:
    """A prompt of `length` tokens that differs from all others from its first tokens on."""
    return client.make_prompt(length, seed=zlib.crc32(f"{label}/{turn}/{row}".encode()))
