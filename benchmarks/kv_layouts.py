"""`make bench ARGS=layouts`: the cost of each layout of keys and values in batched decoding.

The last table names the layout that this device should use.

The contents are random. Before the measurement, an assertion checks that all layouts agree.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from benchmarks import random_model
from benchmarks.kv_layout_caches import (
    KVLayout,
    PaddedLayout,
    PagedLayout,
    PerSequenceLayout,
    ScatterWrittenCache,
    SequenceCaches,
    SlabLayout,
    SliceWrittenCache,
    UnbatchedLayout,
    copy_with_capacity,
)
from models.attention_pieces import detect_attention_device
from models.base import Model
from models.kv import STEP, KVCache

ROWS, LENGTHS, STEPS, ROUNDS = 8, (64, 1500), 24, 3

LAYOUTS: dict[str, Callable[[Sequence[SequenceCaches]], KVLayout]] = {
    "per sequence": PerSequenceLayout,
    "slab": SlabLayout,
    "padded, slices": lambda pasts: PaddedLayout(pasts, SliceWrittenCache),
    "padded, scatter": lambda pasts: PaddedLayout(pasts, ScatterWrittenCache),
    "paged": PagedLayout,
    "alone": UnbatchedLayout,
}


# A layout must be faster than the one of the engine by this factor to be chosen.
WORTHWHILE = 0.95


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The lengths of the sequences of a batch. Different lengths need padding and masks."""

    name: str
    lengths: Sequence[int]

    @property
    def padding(self) -> float:
        """The positions of a padded batch per real position."""
        return max(self.lengths) * len(self.lengths) / sum(self.lengths)


def batches(rows: int = ROWS, lengths: tuple[int, int] = LENGTHS) -> list[Batch]:
    short, long = lengths
    return [
        Batch(name=str(short), lengths=[short + 7 * row for row in range(rows)]),
        Batch(name=str(long), lengths=[long + 7 * row for row in range(rows)]),
        Batch(name=f"one of {long}", lengths=[long, *([short] * (rows - 1))]),
    ]


def report(folder: Path) -> str:
    model = random_model.load(folder)
    device = detect_attention_device(mx.zeros((1,)))
    lines = [
        f"decode of {ROWS} sequences on {device}, {STEPS} steps; medians of {ROUNDS} turns. In "
        "brackets: steps",
        "| layout | tokens | step, ms | tokens/s | join, ms | leave, ms | growth, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    decisions: list[str] = []
    for batch in batches():
        pasts = [_make_caches(folder, n, seed=row) for row, n in enumerate(batch.lengths)]
        _check_equal(model, pasts)
        measured: dict[str, list[Sequence[float]]] = {name: [] for name in LAYOUTS}
        for _ in range(ROUNDS):
            for name, make in LAYOUTS.items():
                measured[name].append(_measure(model, make, pasts))
        steps: dict[str, float] = {}
        for name, turns in measured.items():
            step, *others = (statistics.median(values) for values in zip(*turns, strict=True))
            steps[name] = step
            costs = (f"{cost:.1f} ({cost / step:.2f})" for cost in others)
            rate = 1000 * len(batch.lengths) / step
            lines.append(
                f"| {name} | {batch.name} | {step:.1f} | {rate:.1f} | {' | '.join(costs)} |"
            )
        decisions.append(
            f"| {device} | {len(batch.lengths)} | {batch.padding:.2f} | {decide(steps)} |"
        )
    lines += ["", "| device | rows | padded ÷ real | layout |", "|---|---|---|---|", *decisions]
    return "\n".join(lines)


def decide(steps: Mapping[str, float]) -> str:
    """Returns the layout for a device and a batch: the engine's, unless another one is clearly
    faster. steps: milliseconds per step by layout."""
    fastest = min(steps, key=lambda name: steps[name])
    engine = next(iter(LAYOUTS))
    ratio = steps[fastest] / steps[engine]
    return f"{fastest} ({ratio:.2f} of the time)" if ratio < WORTHWHILE else engine


def _measure(
    model: Model,
    make: Callable[[Sequence[SequenceCaches]], KVLayout],
    pasts: Sequence[SequenceCaches],
) -> tuple[float, float, float, float]:
    """Milliseconds of a step, a join, a leave, a growth."""
    layout = make([_copy_caches(past) for past in pasts])
    newcomer = _copy_caches(pasts[0])
    mx.eval(layout.arrays(), [layer.state() for layer in newcomer])
    step = _measure_step(model, layout, len(pasts))
    leave = _measure_call(layout, lambda: layout.leave(len(pasts) // 2))
    join = _measure_call(layout, lambda: layout.join(newcomer))
    growth = _measure_call(layout, layout.grow)
    return step, join, leave, growth


def _measure_step(model: Model, layout: KVLayout, count: int) -> float:
    """Milliseconds per step, greedy and pipelined by one step, as in the engine."""

    def step(tokens: mx.array) -> mx.array:
        return mx.argmax(model.logits(layout.step(model, tokens)), axis=-1)

    tokens = step(mx.arange(count))
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
    """Check that all layouts give the same hidden states, even after a sequence leaves and another
    joins."""
    found: list[mx.array] = []
    for make in LAYOUTS.values():
        layout = make([_copy_caches(past) for past in pasts])
        first = layout.step(model, mx.arange(len(pasts)))
        # the last row is first, because a padded batch moves it
        layout.leave(len(pasts) - 1)
        layout.join(_copy_caches(pasts[-1]))
        found.append(mx.concatenate([first, layout.step(model, mx.arange(len(pasts)))]))
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
