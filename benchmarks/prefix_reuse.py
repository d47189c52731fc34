"""The time to the first token of a prompt whose prefix is cached, on its first and later reuses.

The engine runs in this process, without HTTP. Three kinds of reuse:

    same       the same prompt again, whose answer is cached too
    branch     the same long prefix, then other words
    beside     the same long prefix, while the last sequence with it still runs
"""

import time
from pathlib import Path
from statistics import median

from app import store
from app.core.jobs import Ended, Job, Token
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop

PREFIX_TOKENS, ANSWER_TOKENS, REUSES, ROUNDS = 1500, 64, 5, 5
KINDS = ("same", "branch", "beside")


def report(folder: Path) -> str:
    lines = [
        f"time to the first token of a prompt with {PREFIX_TOKENS} cached tokens, ms:",
        "kind    cold  first reuse  later reuses  first / later",
    ]
    for kind in KINDS:
        rounds = [_measure(folder, kind) for _ in range(ROUNDS)]
        cold, first = (median(one[i] for one in rounds) for i in (0, 1))
        later = median(seconds for one in rounds for seconds in one[2:])
        lines.append(
            f"{kind:6}  {1e3 * cold:4.0f}  {1e3 * first:11.1f}  {1e3 * later:12.1f}  "
            f"{first / later:13.2f}"
        )
    return "\n".join(lines)


def _measure(folder: Path, kind: str) -> list[float]:
    """Seconds to the first token: without a cache, and then of each reuse. A new engine, so that no
    memory has been used before."""
    settings = Settings(quantize=4, cache="radix", parallel=REUSES + 2)
    loop = load(store.resolve(str(folder)), settings, lambda *_: None)
    times = list[float]()
    for i in range(REUSES + 1):
        tail = [] if kind == "same" else [1 + i] * 20
        seconds = _first_token(loop, f"{kind} {i}", tail, endless=kind == "beside")
        times.append(seconds)
    for i in range(REUSES + 1):
        loop.cancel(f"{kind} {i}")
    while not loop.idle:
        loop.step()
    return times


def _first_token(loop: Loop, name: str, tail: list[int], *, endless: bool) -> float:
    prefix = [1 + 17 * i % 250 for i in range(PREFIX_TOKENS)]
    began, first = time.perf_counter(), 0.0
    loop.submit(
        Job(
            id=name,
            prompt_token_ids=(*prefix, *tail),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=4000 if endless else ANSWER_TOKENS,
            stop_token_ids=frozenset(),
        )
    )
    while True:
        updates = [update for update in loop.step().updates if update.job_id == name]
        if not first and any(isinstance(update, Token) for update in updates):
            first = time.perf_counter() - began
            if endless:
                return first
        if any(isinstance(update, Ended) for update in updates):
            return first
