"""The time to write and to read the message of one engine step, as a model process and the server
do."""

import time
from collections.abc import Callable

from app.core.jobs import EngineStats, Ledger, StepOutput, Token
from app.runners.channel import FrameReader, encode_frame
from app.runners.worker_protocol import WORKER_EVENT, WorkerEvent

TOKENS, ROUNDS, REPEATS = (1, 8, 32), 9, 300


def report() -> str:
    lines = [
        f"the message of a step, best of {ROUNDS} rounds of {REPEATS}:",
        "| tokens | bytes | write, µs | read, µs |",
        "|---|---|---|---|",
    ]
    for tokens in TOKENS:
        step = make_step(tokens)
        frame = encode_frame(step)
        reader: FrameReader[WorkerEvent] = FrameReader(WORKER_EVENT)
        assert list(reader.feed(frame)) == [step]
        write = _measure(lambda step=step: encode_frame(step))
        read = _measure(lambda reader=reader, frame=frame: list(reader.feed(frame)))
        lines.append(f"| {tokens} | {len(frame)} | {write:.1f} | {read:.1f} |")
    return "\n".join(lines)


def make_step(tokens: int) -> StepOutput:
    ledger = Ledger(budget=17 << 30, weights=5 << 30, kv=3 << 20, prefix=2 << 20, working=4 << 20)
    stats = EngineStats(allocated_bytes=6 << 30, running=tokens, ledger=ledger, steps=100_000)
    updates = tuple(
        Token(job_id=f"chatcmpl-{index:024}", id=1000 + index, timestamp_ns=1 << 44)
        for index in range(tokens)
    )
    return StepOutput(updates=updates, stats=stats)


def _measure(call: Callable[[], object]) -> float:
    """Microseconds per call."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        rounds.append(time.perf_counter() - start)
    return 1e6 * min(rounds) / REPEATS
