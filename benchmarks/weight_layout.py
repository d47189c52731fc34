"""The speedup from transposed weights (models/cpu_layout.py)."""

import statistics
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from benchmarks import client, random_model
from benchmarks.kv_layout_caches import PerSequenceLayout
from models.base import Model

ROWS, PROMPT, STEPS, REPEATS = (1, 8), 64, 12, 9


def measure_step(model: Model, count: int) -> float:
    """Milliseconds of a decode step of `count` rows."""
    rows = [model.make_kv() for _ in range(count)]
    for row, kv in enumerate(rows):
        mx.eval(model(mx.array([list(client.make_prompt(PROMPT, seed=row).encode())]), kv))
    batch = PerSequenceLayout(rows)  # pyright: ignore[reportArgumentType]  # a Llama's are KVCaches
    tokens = mx.zeros((count,), mx.int32)
    begun = time.perf_counter()
    for _ in range(STEPS):
        tokens = mx.argmax(model.logits(batch.step(model, tokens)), axis=-1)
        mx.eval(tokens)
    return 1000 * (time.perf_counter() - begun) / STEPS


def report(folder: Path) -> str:
    laid_out, as_stored = random_model.load(folder), random_model.load(folder)
    assert isinstance(as_stored, nn.Module)
    for _, module in as_stored.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight = mx.contiguous(module.weight)
    mx.eval(as_stored.parameters())
    lines = ["| rows | as stored, ms | as read, ms | ratio |", "|---|---|---|---|"]
    for count in ROWS:
        pairs = [
            (measure_step(as_stored, count), measure_step(laid_out, count)) for _ in range(REPEATS)
        ]
        before, after = ([pair[i] for pair in pairs] for i in (0, 1))
        ratio = statistics.median(before) / statistics.median(after)
        lines.append(
            f"| {count} | {client.format_spread(before)} | {client.format_spread(after)} "
            f"| {ratio:.2f} |"
        )
    return "\n".join(lines)
