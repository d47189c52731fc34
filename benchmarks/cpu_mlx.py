"""The worker of our backend and of stock MLX: the same code with different environments.

Knows: models, MLX. Must not know: the comparison. Decoding is greedy and pipelined by one step, as
in the engine; keys and values have the engine's layout. The first step is not timed, because it
fills the pipeline, unless it alone takes the whole budget.
"""

import importlib.metadata
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app import store
from app.core.settings import ActivationPrecision
from app.engine.model_info import complete_config
from app.engine.precision import choose_activation_bits, choose_kv_dtype
from app.engine.weights import list_parameters, open_model, read_weights
from models import architectures, cpu_backend, kernels
from models.base import Model, select_all, select_last
from models.cpu_layout import (
    apply_cpu_layout,
    get_activation_bits,
    is_batch_invariant,
    set_activation_bits,
)
from models.kv import KVCache, LayerCache

STEPS, MIN_PROMPT = 16, 4

SequenceCaches = Sequence[LayerCache]


class DecodeLoop:
    """Sequences that decode together."""

    def __init__(self, model: Model, caches: SequenceCaches, streams: int) -> None:
        """Each row continues after a copy of `caches`."""
        self._model = model
        self.streams, self.cached = streams, caches[0].offset
        self._rows = [[layer.copy() for layer in caches] for _ in range(streams)]

    def step(self, tokens: mx.array) -> mx.array:
        """[B] ids -> [B] ids, lazy."""
        hidden = self._model(tokens[:, None], self._make_batch())
        return mx.argmax(self._model.logits(hidden[:, -1]), axis=-1)

    def rewind(self) -> None:
        for row in self._rows:
            for layer in row:
                layer.trim(layer.offset - self.cached)

    def _make_batch(self) -> Sequence[object]:
        if self.streams == 1:
            return self._rows[0]
        offsets = mx.array([row[0].offset for row in self._rows])
        return [rows[0].make_batch(rows, offsets) for rows in zip(*self._rows, strict=True)]


def make_random_caches(model: Model, length: int) -> SequenceCaches:
    """Keys and values of one token followed by noise: their values do not change the time, and
    stock MLX would take minutes for the prefill."""
    kv = model.make_kv()
    mx.eval(model(mx.array([[0]]), kv), [layer.state() for layer in kv])
    for layer in kv:
        assert isinstance(layer, KVCache)
        like, _ = layer.state()
        _, heads, _, dim = like.shape
        noise = mx.random.normal((2, 1, heads, length - 1, dim)).astype(like.dtype)
        layer.update(*noise)
    mx.eval([layer.state() for layer in kv])
    return kv


def measure_decode(loop: DecodeLoop, budget: float, steps: int) -> tuple[float, int]:
    """Seconds per step, and the number of steps measured."""
    # the very first step also allocates the grown caches
    mx.eval(loop.step(mx.arange(loop.streams)))
    loop.rewind()
    begun = time.perf_counter()
    tokens = loop.step(mx.arange(loop.streams))
    mx.eval(tokens)
    first = time.perf_counter() - begun
    if first > budget:
        return first, 1
    steps = max(1, min(steps, int((budget - first) / first)))
    found: list[float] = []
    while not found or time.perf_counter() - begun < budget:
        if found:
            loop.rewind()
            tokens = loop.step(mx.arange(loop.streams))
            mx.eval(tokens)
        started = time.perf_counter()
        for _ in range(steps):
            after = loop.step(tokens)
            mx.async_eval(after)
            tokens.tolist()
            tokens = after
        mx.eval(tokens)
        found.append((time.perf_counter() - started) / steps)
    return statistics.median(found), steps


def measure_prefill(model: Model, length: int) -> float:
    """Seconds to the first token of a prompt. Selects the last position as the engine does."""
    select = select_last if is_batch_invariant(model) else select_all
    ids = mx.random.randint(0, 256, (1, length))
    mx.eval(ids)
    begun = time.perf_counter()
    hidden = model(ids, model.make_kv(), select)
    mx.eval(mx.argmax(model.logits(hidden[:, -1]), axis=-1))
    return time.perf_counter() - begun


def measure_prefill_rate(
    model: Model, length: int, budget: float, capped: bool
) -> tuple[float, int]:
    """Tokens per second, and the number of tokens measured."""
    begun = time.perf_counter()
    if capped:
        took = measure_prefill(model, MIN_PROMPT)
        length = max(MIN_PROMPT, min(length, int(MIN_PROMPT * budget / took)))
        if length == MIN_PROMPT:
            return length / took, length
    found: list[float] = []
    while not found or time.perf_counter() - begun < budget:
        found.append(measure_prefill(model, length))
    return length / statistics.median(found), length


class MlxWorker:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._loops: dict[tuple[int, int], DecodeLoop] = {}
        self._random_caches: dict[int, SequenceCaches] = {}

    def measure(self, request: dict[str, Any]) -> tuple[float, int]:
        """Tokens per second, and the number of steps or tokens measured."""
        streams, budget = request["streams"], request["budget"]
        if streams == 0:
            return measure_prefill_rate(self._model, request["prompt"], budget, request["capped"])
        key = streams, request["cached"]
        if key not in self._loops:
            self._loops[key] = DecodeLoop(self._model, self._get_caches(key[1]), streams)
        loop = self._loops[key]
        loop.rewind()
        seconds, count = measure_decode(loop, budget, STEPS)
        return streams / seconds, count

    def _get_caches(self, length: int) -> SequenceCaches:
        if length not in self._random_caches:
            self._random_caches[length] = make_random_caches(self._model, length)
        return self._random_caches[length]


def load(folder: Path, *, stock: bool = False, activations: ActivationPrecision = "auto") -> Model:
    """Load a model with the CPU layout, as the engine does; or with `stock` in the stored types, as
    in mlx-lm. folder: or a GGUF file."""
    if folder.suffix == ".gguf":
        files = complete_config(store.find(str(folder)))
        opened = open_model(files, None, activations=activations)
        read_weights(opened, files.path, lambda _percent, _bytes: None)
        return opened
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    model = architectures.build(json.loads((folder / "config.json").read_text()), weights)
    assert isinstance(model, nn.Module)
    mx.eval(model.parameters())
    if not stock:
        parameters = list_parameters(model)
        model.kv_dtype = choose_kv_dtype(parameters, "auto")
        bits = choose_activation_bits(parameters, activations, has_blocks=False)
        del parameters  # frees the weights in their usual order
        apply_cpu_layout(model)
        if get_activation_bits(model) is not None:
            set_activation_bits(model, bits)
        mx.eval(model.parameters())
    return model


def describe_backend() -> str:
    ours, blas = kernels.describe(), cpu_backend.ACTIVE
    tiles = f"tiles off ({ours.why_no_tiles})" if ours.why_no_tiles else "tiles on"
    own = (
        f"kernels {ours.isa}, {ours.threads} thread(s), {tiles}"
        if ours.enabled
        else f"no kernels: {ours.why}"
    )
    return f"MLX {importlib.metadata.version('mlx')}, {own}, {blas.blas or blas.why}"
