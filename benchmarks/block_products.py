"""`make bench ARGS=blocks`: products with GGUF's block types, and with MLX's affine packing.

One thread, a matrix that stays in the second cache, random numbers, 16 bits of x, as for GGUF
files. The figures are the shortest times of many calls, so they show the instructions and not the
memory.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from models import kernels
from models.gguf.ggml_types import GGML_TYPES
from tests.models.gguf.random_blocks import SCALES, make_blocks

OUTPUTS, INPUTS, ACTIVATIONS = 768, 2048, 16
# rows of x: calls
CALLS = {1: 400, 4: 400, 8: 200, 96: 40}


def report() -> str:
    ops = kernels.ops()
    if ops is None:
        return f"no kernels: {kernels.describe().why}"
    threads = ops.num_threads()
    ops.set_num_threads(1)
    try:
        lines = [_format_line(*found) for found in _measure(ops)]
    finally:
        ops.set_num_threads(threads)
    rows = " | ".join(f"{count} rows" for count in CALLS)
    head = f"| microseconds | bits a weight | {rows} |\n|---|---|{'---|' * len(CALLS)}"
    return "\n".join([f"[{OUTPUTS}, {INPUTS}], {ops.isa()}", "", head, *lines])


def _measure(ops: Any) -> Iterator[tuple[str, float, list[float]]]:
    """Yields name, bits per weight, and seconds per number of rows."""
    for bits, group in ((4, 64), (4, 32), (8, 32)):
        weight = mx.random.normal((OUTPUTS, INPUTS))
        words, *scales = mx.quantize(weight, group, bits)
        parts = [ops.repack_scales(part.astype(mx.float16)) for part in scales]
        words = ops.repack(words, bits)
        matmul = ops.Matmul(words, *parts, group_size=group, bits=bits, activations=ACTIVATIONS)
        yield f"affine {bits} bits, groups of {group}", bits + 32 / group, list(_time(matmul))
    for type_id in SCALES:
        panels = ops.repack_blocks(make_blocks(type_id, OUTPUTS, INPUTS), type_id)
        matmul = ops.Matmul.from_blocks(
            panels, type_id=type_id, outputs=OUTPUTS, inputs=INPUTS, activations=ACTIVATIONS
        )
        yield GGML_TYPES[type_id].name, panels.nbytes * 8 / (OUTPUTS * INPUTS), list(_time(matmul))


def _time(matmul: Any) -> Iterable[float]:
    for rows, calls in CALLS.items():
        x = mx.random.normal((rows, INPUTS))
        mx.eval(matmul(x))
        shortest = float("inf")
        for _ in range(calls):
            begun = time.perf_counter()
            mx.eval(matmul(x))
            shortest = min(shortest, time.perf_counter() - begun)
        yield shortest


def _format_line(name: str, bits: float, seconds: list[float]) -> str:
    return f"| {name} | {bits:.2f} | {' | '.join(f'{1e6 * one:.0f}' for one in seconds)} |"
