"""Measures the host's work for decode steps on a GPU, of one library, in a separate process.

python -m benchmarks.graph_worker {ours,mlx-lm} CONFIG ROWS

CONFIG is a JSON object. After each line on stdin, it decodes some steps and prints a JSON object:
the medians of the milliseconds of CPU time to build the graph and to dispatch it, and the numbers
of nodes and launches. The fused functions of MLX are stubs (tests/device/gpu_stubs.py), and the
layers are small, so almost all time is the host's. On the side of mlx-lm, imports only that
library, MLX and the stubs.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from tests.device.gpu_stubs import simulate_metal
from tests.device.graph_counts import GraphCounts, count_graph

PROMPT, WARM_UP, STEPS = 64, 3, 8

# Builds the arrays of a decode step, and returns a function that reads the tokens.
BuildStep = Callable[[], tuple[list[Any], Callable[[], object]]]


def prepare_ours(config: Mapping[str, Any], rows: int) -> BuildStep:
    from tests.device.models import build_model
    from tests.engine import harness

    model = build_model(config)
    loop = harness.make_loop(
        model, running=rows, chunk=128, policy="radix", context=4096, vocab=config["vocab_size"]
    )
    for row in range(rows):
        prompt = _make_prompt(row)
        fields: Any = {"max_tokens": 4000, "stop_token_ids": frozenset(), "top_logprobs": None}
        loop.submit(harness.job(str(row), prompt, **fields))
    for _ in range(2 * rows + 4):
        loop.step()
    sequences = [s for s in loop._scheduler.running if s.decoding]
    assert len(sequences) == rows
    runner, tokens = loop._model_runner, mx.array([1] * rows, dtype=mx.uint32)
    mx.eval(tokens, [layer.state() for s in sequences for layer in s.kv])

    def build() -> tuple[list[Any], Callable[[], object]]:
        dispatched: list[Any] = []
        with patch.object(mx, "async_eval", dispatched.append):
            in_flight = runner.sample(runner.decode(runner.arrange(sequences), tokens))
        for sequence in sequences:
            sequence.num_in_flight = 0
        return dispatched, in_flight.read

    return build


def prepare_mlx_lm(config: Mapping[str, Any], rows: int) -> BuildStep:
    """A step of its batched generation, with logprobs as it computes them, greedy."""
    import mlx.nn as nn

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    caches = importlib.import_module("mlx_lm.models.cache")
    model: Any = module.Model(module.ModelArgs.from_dict(dict(config)))
    model.set_dtype(mx.bfloat16)
    nn.quantize(
        model,
        group_size=64,
        bits=4,
        class_predicate=lambda path, layer: (
            hasattr(layer, "to_quantized") and not path.endswith("mlp.gate")
        ),
    )
    mx.eval(model.parameters())
    kv: list[Any] = [
        caches.KVCache() if rows == 1 else caches.BatchKVCache([0] * rows) for _ in model.layers
    ]
    mx.eval(model(mx.array([_make_prompt(row) for row in range(rows)]), cache=kv))
    tokens = mx.array([1] * rows)

    def build() -> tuple[list[Any], Callable[[], object]]:
        logits = model(tokens[:, None], cache=kv)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampled = mx.argmax(logprobs, axis=-1)
        each = [logprobs] if rows == 1 else list(logprobs)
        return [sampled, each], sampled.tolist

    return build


def _make_prompt(row: int) -> list[int]:
    return [(7 * row + place) % 1000 for place in range(PROMPT)]


def measure(build: BuildStep) -> dict[str, float]:
    built: list[float] = []
    dispatched: list[float] = []
    for _ in range(STEPS):
        begun = time.thread_time()
        arrays, read = build()
        middle = time.thread_time()
        mx.async_eval(arrays)
        ended = time.thread_time()
        read()
        built.append(1e3 * (middle - begun))
        dispatched.append(1e3 * (ended - middle))
    return {"build": statistics.median(built), "eval": statistics.median(dispatched)}


def _count(build: BuildStep) -> GraphCounts:
    arrays, read = build()
    counts = count_graph(arrays)
    mx.eval(arrays)
    read()
    return counts


def main() -> None:
    library, config, rows = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    with simulate_metal():
        build = (prepare_ours if library == "ours" else prepare_mlx_lm)(config, rows)
        for _ in range(WARM_UP):
            counts = _count(build)
        for _ in sys.stdin:
            found = {**measure(build), "nodes": counts.nodes, "launches": counts.launches}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
