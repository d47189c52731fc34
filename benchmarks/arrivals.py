"""First tokens and pauses under Poisson arrivals, on a clock that other programs do not affect.

The engine runs in this process. The clock is the CPU time of the process, divided by the number of
CPUs that a step uses on average. Requests arrive by this clock, and latencies are read from it. Two
versions can therefore be compared on a machine whose load changes. HTTP and waiting are not
included.
"""

import itertools
import random
import time
from pathlib import Path
from statistics import mean, median

from app import store
from app.core.jobs import Job, Token
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop

RATES, REQUESTS, ANSWER_TOKENS = (1.6, 5.0), 24, 64
SHORTEST, LONGEST = 50, 1500  # prompt tokens, uniform in the logarithm
CPUS_IN_USE = 1.8


def report(folder: Path) -> str:
    lines = [
        f"{REQUESTS} Poisson arrivals, prompts of {SHORTEST} to {LONGEST} tokens, "
        f"{ANSWER_TOKENS} tokens each, 4 bits, in seconds of CPU time / {CPUS_IN_USE}:",
        "rate/s  slots  TTFT mean   p50   p90  gap p50    p99  end to end  total",
    ]
    return "\n".join([*lines, *(_measure(folder, rate) for rate in RATES)])


def _measure(folder: Path, rate: float) -> str:
    loop = load(store.resolve(str(folder)), Settings(quantize=4, cache="radix"), lambda *_: None)
    rng = random.Random(7)
    _run(loop, [(0.0, _job(rng, "warm-up", SHORTEST))])
    at, arrivals = 0.0, list[tuple[float, Job]]()
    for i in range(REQUESTS):
        at += rng.expovariate(rate)
        length = int(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
        arrivals.append((at, _job(rng, str(i), length)))
    times, total = _run(loop, arrivals)
    first = sorted(times[job.id][0] - at for at, job in arrivals)
    gaps = sorted(b - a for seen in times.values() for a, b in itertools.pairwise(seen))
    whole = mean(times[job.id][-1] - at for at, job in arrivals)
    return (
        f"{rate:6}  {loop.capacity.parallel:5}  {mean(first):9.2f}  {median(first):4.2f}  "
        f"{first[int(0.9 * len(first))]:4.2f}  {median(gaps):7.3f}  "
        f"{gaps[int(0.99 * len(gaps))]:5.3f}  {whole:10.2f}  {total:5.1f}"
    )


def _run(loop: Loop, arrivals: list[tuple[float, Job]]) -> tuple[dict[str, list[float]], float]:
    """Returns the times of each job's tokens, and the time at the end."""
    skipped = -time.process_time() / CPUS_IN_USE

    def now() -> float:
        return time.process_time() / CPUS_IN_USE + skipped

    waiting, times = list(arrivals), dict[str, list[float]]()
    while waiting or not loop.idle:
        if loop.idle and waiting[0][0] > now():
            skipped += waiting[0][0] - now()
        while waiting and waiting[0][0] <= now():
            loop.submit(waiting.pop(0)[1])
        for update in loop.step().updates:
            if isinstance(update, Token):
                times.setdefault(update.job_id, []).append(now())
    return times, now()


def _job(rng: random.Random, name: str, length: int) -> Job:
    return Job(
        id=name,
        prompt_token_ids=tuple(rng.choices(range(1, 250), k=length)),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=ANSWER_TOKENS,
        stop_token_ids=frozenset(),
    )
