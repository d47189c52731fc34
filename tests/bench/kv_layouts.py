"""`make bench ARGS=layouts`: the cost of each layout of keys and values in batched decoding.

The contents are random. Before the measurement, an assertion checks that all layouts agree.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from models.base import Model
from models.kv import STEP, KVCache
from tests.bench import random_model
from tests.bench.kv_layout_caches import (
    KVLayout,
    PaddedLayout,
    PagedLayout,
    PerSequenceLayout,
    ScatterWrittenCache,
    SequenceCaches,
    SliceWrittenCache,
    UnbatchedLayout,
    copy_with_capacity,
)

ROWS, LENGTHS, STEPS, ROUNDS = 8, (64, 1500), 24, 3

LAYOUTS: dict[str, Callable[[Sequence[SequenceCaches]], KVLayout]] = {
    "per sequence": PerSequenceLayout,
    "padded, slices": lambda pasts: PaddedLayout(pasts, SliceWrittenCache),
    "padded, scatter": lambda pasts: PaddedLayout(pasts, ScatterWrittenCache),
    "paged": PagedLayout,
    "alone": UnbatchedLayout,
}


def report(folder: Path) -> str:
    model = random_model.load(folder)
    lines = [
        f"decode of {ROWS} sequences, {STEPS} steps; medians of {ROUNDS} turns. In brackets: steps",
        "| layout | tokens | step, ms | tokens/s | join, ms | leave, ms | growth, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in LENGTHS:
        # different lengths, for which padding and masks are needed
        pasts = [_make_caches(folder, length + 7 * row, seed=row) for row in range(ROWS)]
        _check_equal(model, pasts)
        measured: dict[str, list[Sequence[float]]] = {name: [] for name in LAYOUTS}
        for _ in range(ROUNDS):
            for name, make in LAYOUTS.items():
                measured[name].append(_measure(model, make, pasts))
        for name, turns in measured.items():
            step, *others = (statistics.median(values) for values in zip(*turns, strict=True))
            costs = (f"{cost:.1f} ({cost / step:.2f})" for cost in others)
            rate = 1000 * ROWS / step
            lines.append(f"| {name} | {length} | {step:.1f} | {rate:.1f} | {' | '.join(costs)} |")
    return "\n".join(lines)


def _measure(
    model: Model,
    make: Callable[[Sequence[SequenceCaches]], KVLayout],
    pasts: Sequence[SequenceCaches],
) -> tuple[float, float, float, float]:
    """Milliseconds of a step, a join, a leave, a growth."""
    layout = make([_copy_caches(past) for past in pasts])
    newcomer = _copy_caches(pasts[0])
    mx.eval(layout.arrays(), [layer.state() for layer in newcomer])
    step = _measure_step(model, layout)
    leave = _measure_call(layout, lambda: layout.leave(ROWS // 2))
    join = _measure_call(layout, lambda: layout.join(newcomer))
    growth = _measure_call(layout, layout.grow)
    return step, join, leave, growth


def _measure_step(model: Model, layout: KVLayout) -> float:
    """Milliseconds per step, greedy and pipelined by one step, as in the engine."""

    def step(tokens: mx.array) -> mx.array:
        return mx.argmax(model.logits(layout.step(model, tokens)), axis=-1)

    tokens = step(mx.arange(ROWS))
    mx.eval(tokens)
    begun = time.perf_counter()
    for _ in range(STEPS):
        after = step(tokens)
        mx.async_eval(after)
        tokens.tolist()
        tokens = after
    mx.eval(tokens)
    return 1000 * (time.perf_counter() - begun) / STEPS


def _measure_call(layout: KVLayout, work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    mx.eval(layout.arrays())
    return 1000 * (time.perf_counter() - begun)


def _check_equal(model: Model, pasts: Sequence[SequenceCaches]) -> None:
    """Check that all layouts give the same hidden states, also after a leave and a join."""
    found: list[mx.array] = []
    for make in LAYOUTS.values():
        layout = make([_copy_caches(past) for past in pasts])
        first = layout.step(model, mx.arange(ROWS))
        # the last row is first, because a padded batch moves it
        layout.leave(ROWS - 1)
        layout.join(_copy_caches(pasts[-1]))
        found.append(mx.concatenate([first, layout.step(model, mx.arange(ROWS))]))
        mx.eval(found)
    for hidden in found[1:]:
        assert mx.allclose(hidden, found[0], rtol=1e-3, atol=1e-3).item(), "the layouts disagree"


def _make_caches(folder: Path, length: int, seed: int) -> SequenceCaches:
    """Random keys and values, with spare capacity, for each layer of the model in the folder."""
    shape = random_model.SHAPES[folder.name]
    mx.random.seed(seed)
    past = [KVCache() for _ in range(shape.num_hidden_layers)]
    size = shape.hidden_size // shape.num_attention_heads
    for layer in past:
        layer.reserve(length + STEP)
        layer.update(*mx.random.normal((2, 1, shape.num_key_value_heads, length, size)))
    return past


def _copy_caches(past: SequenceCaches) -> SequenceCaches:
    return [copy_with_capacity(layer.state(), layer.offset) for layer in past]
