"""CPU time of inserting a prompt into a prefix cache that holds many, and the longest collection of
Python's garbage collector meanwhile, with and without freezing (app/core/runtime.py).

Layer caches are real, with one head of one dimension, so that ten thousand prompts fit in memory.
"""

import gc
import random
import statistics
import time
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from app.core.runtime import freeze_survivors
from app.engine.prefix.radix import RadixPrefixCache
from models.kv import KVCache

LAYERS, PROMPT, VOCABULARY = 12, 512, 32_000
SIZES = (10, 100, 1000, 3000, 10_000)


class CollectionTimer:
    """The longest full collection, in CPU seconds of this thread."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != 2:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.longest = max(self.longest, time.thread_time() - self._began)


def report() -> str:
    lines = [
        f"prefix cache: CPU time of inserting {PROMPT} ids, with {LAYERS} layers:",
        "| cached prompts | frozen | insert, µs: median | p90 | longest full collection, ms |",
        "|---|---|---|---|---|",
    ]
    for frozen in (False, True):
        gc.collect()
        mx.clear_cache()  # so that both begin with new buffers
        with freeze_survivors() if frozen else nullcontext():
            lines += _measure(frozen=frozen)
    return "\n".join(lines)


def _measure(*, frozen: bool) -> list[str]:
    cache = RadixPrefixCache[KVCache](lambda: [KVCache() for _ in range(LAYERS)])
    keys = mx.zeros((1, 1, PROMPT, 1))
    mx.eval(keys)
    timer = CollectionTimer()
    gc.callbacks.append(timer)
    lines: list[str] = []
    count = 0
    for size in SIZES:
        times: list[float] = []
        timer.longest = 0.0
        while count < size:
            times.append(_insert(cache, keys, first=count))
            count += 1
        worst = statistics.quantiles(times, n=10)[-1]
        lines.append(
            f"| {size} | {'yes' if frozen else 'no'} | {1e6 * statistics.median(times):.0f} "
            f"| {1e6 * worst:.0f} | {1e3 * timer.longest:.1f} |"
        )
    gc.callbacks.remove(timer)
    return lines


def _insert(cache: RadixPrefixCache[KVCache], keys: mx.array, first: int) -> float:
    """CPU seconds of the cache. first: the first id, unique so that no prompt shares a prefix."""
    ids = [first, *random.Random(first).choices(range(VOCABULARY), k=PROMPT - 1)]
    began = time.thread_time()
    lease = cache.begin(ids)
    leased = time.thread_time()
    for layer in lease.kv:
        layer.update(keys, keys)
    mx.eval([array for layer in lease.kv for array in layer.state()])
    computed = time.thread_time()
    lease.commit(ids, keep=len(ids))
    return time.thread_time() - computed + leased - began
