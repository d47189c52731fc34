"""Where the time of one step goes, seen from inside the process that takes it.

Knows: modules of a model, when what is evaluated. Must not know: perf, what ours is compared with.
The step as it is served, and what of it is Python building the graph (which runs beside it); then
each module evaluated by itself, so that its time is its own: nothing overlaps, and each pays for a
call of eval, which is measured and taken off.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from models import batch_cache, kv
from tests.bench import cpu_mlx
from tests.bench.cpu_cells import CACHED, PROMPT

REPEATS = 9


@dataclass(slots=True)
class ModuleTime:
    """seconds: without those of what it called, and without the price of evaluating it alone."""

    calls: int = 0
    seconds: float = 0.0


class ModuleTimer:
    """Time by kind, each second booked once: on the innermost kind that is open."""

    def __init__(self, evaluate: Callable[[Any], None], eval_overhead: float) -> None:
        """evaluate: evaluates what it is given. eval_overhead: seconds that this takes by
        itself."""
        self._evaluate = evaluate
        self._eval_overhead = eval_overhead
        self._inner: list[float] = []
        self.by_kind: dict[str, ModuleTime] = {}

    def wrap(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            came = time.perf_counter()
            self._evaluate((args, named))
            self._inner.append(0.0)
            begun = time.perf_counter()
            result = work(*args, **named)
            self._evaluate(result)
            ended = time.perf_counter()
            whole, inner = ended - begun, self._inner.pop()
            if self._inner:
                # what settling the arguments takes is nobody's
                self._inner[-1] += ended - came
            spent = self.by_kind.setdefault(kind, ModuleTime())
            spent.calls += 1
            spent.seconds += max(0.0, whole - inner - self._eval_overhead)
            return result

        return timed


def profile_step(folder: Path, streams: int) -> str:
    """In a process whose environment says on how many threads."""
    model = cpu_mlx.load(folder)
    step, rewind = _make_step(model, streams)
    piped = _measure_pipelined(folder, streams)
    rewind()
    builds: list[float] = []
    wholes: list[float] = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        lazy = step()
        builds.append(time.perf_counter() - begun)
        _evaluate(lazy)
        wholes.append(time.perf_counter() - begun)
    build, whole = statistics.median(builds), statistics.median(wholes)
    rewind()
    ledger = ModuleTimer(_evaluate, _measure_eval_overhead())
    with _wrap_modules(model, ledger):
        for _ in range(REPEATS):
            ledger.wrap("outside modules", step)()
    lines = [
        cpu_mlx.describe_backend(),
        f"a step, ms: {1000 * piped:.3f} pipelined by one step, as served",
        f"           {1000 * whole:.3f} built, then evaluated, then the next",
        f"           {1000 * build:.3f} of that is Python building the graph",
        "",
        f"each module evaluated separately ({1e6 * ledger._eval_overhead:.0f} µs of overhead per "
        "call subtracted):",
        "| kind | calls a step | ms a step | share |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *format_rows(ledger, REPEATS)])


def format_rows(timer: ModuleTimer, turns: int) -> list[str]:
    total = sum(spent.seconds for spent in timer.by_kind.values()) or 1.0
    ranked = sorted(timer.by_kind.items(), key=lambda item: -item[1].seconds)
    rows = [
        f"| {kind} | {spent.calls / turns:g} | {1000 * spent.seconds / turns:.3f} "
        f"| {spent.seconds / total:.0%} |"
        for kind, spent in ranked
    ]
    return [*rows, f"| all | | {1000 * total / turns:.3f} | |"]


def _make_step(model: Any, streams: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """One step, lazy, and what brings all back to where they began."""
    if streams == 0:
        ids = mx.random.randint(0, 256, (1, PROMPT))

        def prefill() -> Any:
            return mx.argmax(model.logits(model(ids, model.make_kv())[:, -1]), axis=-1)

        return prefill, lambda: None
    loop = cpu_mlx.DecodeLoop(model, cpu_mlx.make_random_caches(model, CACHED), streams)
    tokens = mx.arange(streams)
    return lambda: loop.step(tokens), loop.rewind


def _measure_pipelined(folder: Path, streams: int) -> float:
    """Seconds a step, as the arms of the comparison measure it."""
    told = {"streams": streams, "budget": 1.5, "capped": False, "prompt": PROMPT, "cached": CACHED}
    rate, _ = cpu_mlx.MlxWorker(cpu_mlx.load(folder)).measure(told)
    return (streams or PROMPT) / rate


@contextlib.contextmanager
def _wrap_modules(model: Any, timer: ModuleTimer) -> Iterator[None]:
    """Every class of module in the model, and what a layer's cache attends with, booked under its
    name. Python looks `__call__` up in the class, so that is where it is put."""
    places = [(type(module), "__call__") for _, module in model.named_modules()]
    # the head, where it is the embedding
    places += [(type(module), "as_linear") for _, module in model.named_modules()]
    places += [(kind, "attend") for kind in (kv.KVCache, batch_cache.BatchKVCache)]
    with contextlib.ExitStack() as stack:
        for kind, name in dict.fromkeys(places):
            if (work := getattr(kind, name, None)) is None:
                continue
            own = name in vars(kind)
            shown = kind.__name__ if name == "__call__" else f"{kind.__name__}.{name}"
            setattr(kind, name, timer.wrap(f"{kind.__module__}: {shown}", work))
            if own:
                stack.callback(setattr, kind, name, work)
            else:
                stack.callback(delattr, kind, name)
        yield


def _evaluate(held: Any) -> None:
    flat: Any = tree_flatten(held)
    arrays = [value for _, value in flat if isinstance(value, mx.array)]
    if arrays:
        mx.eval(arrays)


def _measure_eval_overhead() -> float:
    """Seconds that building and evaluating next to nothing takes."""
    little = mx.zeros((8,))
    mx.eval(little)
    found: list[float] = []
    for _ in range(200):
        begun = time.perf_counter()
        mx.eval(little + 1)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def run_steps(folder: Path, streams: int, seconds: float) -> None:
    """For perf, which looks on from outside: says when it begins."""
    told = {"streams": streams, "capped": False, "prompt": PROMPT, "cached": CACHED}
    worker = cpu_mlx.MlxWorker(cpu_mlx.load(folder))
    worker.measure({**told, "budget": 0.2})
    print(json.dumps({"pid": os.getpid()}), flush=True)
    worker.measure({**told, "budget": seconds})
