"""The time of one step by module, measured inside the process.

Knows: modules of a model, the order of evaluation. Must not know: perf, other backends. It measures
the pipelined step as the engine runs it, and the part in which Python builds the graph (which runs
in parallel); then each module is evaluated separately, so that nothing overlaps. The overhead of
the call of eval is measured and subtracted.
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

from benchmarks import cpu_mlx
from benchmarks.cpu_cells import CACHED, PROMPT
from models import batch_cache, kv

REPEATS = 9


@dataclass(slots=True)
class ModuleTime:
    """seconds: without those of inner modules, and without the overhead of separate evaluation."""

    calls: int = 0
    seconds: float = 0.0


class ModuleTimer:
    """Time by kind. Each second counts once, for the innermost open kind."""

    def __init__(self, evaluate: Callable[[Any], None], eval_overhead: float) -> None:
        """evaluate: evaluates its argument. eval_overhead: seconds of a call of `evaluate` without
        work."""
        self._evaluate = evaluate
        self._eval_overhead = eval_overhead
        self._inner: list[float] = []
        self.by_kind: dict[str, ModuleTime] = {}

    def wrap(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            entered = time.perf_counter()
            self._evaluate((args, named))
            self._inner.append(0.0)
            begun = time.perf_counter()
            result = work(*args, **named)
            self._evaluate(result)
            ended = time.perf_counter()
            total, inner = ended - begun, self._inner.pop()
            if self._inner:
                # the evaluation of the arguments counts for no module
                self._inner[-1] += ended - entered
            spent = self.by_kind.setdefault(kind, ModuleTime())
            spent.calls += 1
            spent.seconds += max(0.0, total - inner - self._eval_overhead)
            return result

        return timed


def profile_step(folder: Path, streams: int) -> str:
    """Profile a step; the environment of the process sets the number of threads."""
    model: Any = cpu_mlx.load(folder)
    step, rewind = _make_step(model, streams)
    piped = _measure_pipelined(folder, streams)
    rewind()
    builds: list[float] = []
    totals: list[float] = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        lazy = step()
        builds.append(time.perf_counter() - begun)
        _evaluate(lazy)
        totals.append(time.perf_counter() - begun)
    build, total = statistics.median(builds), statistics.median(totals)
    rewind()
    timer = ModuleTimer(_evaluate, _measure_eval_overhead())
    for _, module in model.named_modules():
        # without the operation of consecutive blocks, so that each block is called
        vars(module).pop("run_layers", None)
    with _wrap_modules(model, timer):
        for _ in range(REPEATS):
            timer.wrap("outside modules", step)()
    lines = [
        cpu_mlx.describe_backend(),
        f"a step, ms: {1000 * piped:.3f} pipelined by one step, as served",
        f"           {1000 * total:.3f} built, then evaluated, then the next",
        f"           {1000 * build:.3f} of that is Python building the graph",
        "",
        f"each module evaluated separately ({1e6 * timer._eval_overhead:.0f} µs of overhead per "
        "call subtracted):",
        "| kind | calls a step | ms a step | share |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *format_rows(timer, REPEATS)])


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
    """A function that builds one lazy step, and one that rewinds the rows to their start."""
    if streams == 0:
        ids = mx.random.randint(0, 256, (1, PROMPT))

        def prefill() -> Any:
            return mx.argmax(model.logits(model(ids, model.make_kv())[:, -1]), axis=-1)

        return prefill, lambda: None
    loop = cpu_mlx.DecodeLoop(model, cpu_mlx.make_random_caches(model, CACHED), streams)
    tokens = mx.arange(streams)
    return lambda: loop.step(tokens), loop.rewind


def _measure_pipelined(folder: Path, streams: int) -> float:
    """Seconds per step, measured as in the comparison of backends."""
    request = {
        "streams": streams,
        "budget": 1.5,
        "capped": False,
        "prompt": PROMPT,
        "cached": CACHED,
    }
    rate, _ = cpu_mlx.MlxWorker(cpu_mlx.load(folder)).measure(request)
    return (streams or PROMPT) / rate


@contextlib.contextmanager
def _wrap_modules(model: Any, timer: ModuleTimer) -> Iterator[None]:
    """Time each class of module in the model, and the attention of layer caches, under its name.
    Python looks up `__call__` in the class, so the class is patched."""
    places = [(type(module), "__call__") for _, module in model.named_modules()]
    # a tied head
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


def _evaluate(value: Any) -> None:
    flat: Any = tree_flatten(value)
    arrays = [value for _, value in flat if isinstance(value, mx.array)]
    if arrays:
        mx.eval(arrays)


def _measure_eval_overhead() -> float:
    """Seconds to build and evaluate a minimal graph."""
    little = mx.zeros((8,))
    mx.eval(little)
    found: list[float] = []
    for _ in range(200):
        begun = time.perf_counter()
        mx.eval(little + 1)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def run_steps(folder: Path, streams: int, seconds: float) -> None:
    """Run steps for perf, which samples the process; prints a line when they start."""
    request = {"streams": streams, "capped": False, "prompt": PROMPT, "cached": CACHED}
    worker = cpu_mlx.MlxWorker(cpu_mlx.load(folder))
    worker.measure({**request, "budget": 0.2})
    print(json.dumps({"pid": os.getpid()}), flush=True)
    worker.measure({**request, "budget": seconds})
