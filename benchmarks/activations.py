"""`make bench ARGS=activations`: what `--activations` costs in exactness and gains in speed.

Exactness: perplexity of held-out text, and the largest error of a logit against the formulas in
float64 with the same quantized weights. The trained models of ../shared/data read a book that they
were not trained on. The built-in model reads the held-out questions with the answers of its
unquantized weights. Speed: a model with random weights on one thread, all precisions in turns. The
figures are medians of tokens per second of processor time, which other programs hardly affect, and
medians of the ratios of a round.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import Tokenizer

from benchmarks.rounding import BUILTIN
from models import kernels
from models.base import Model
from models.cpu_layout import apply_cpu_layout, set_activation_bits
from models.kernels.layers import ACTIVATION_BITS
from models.quant import quantize_model
from tests.conftest import SHARED
from tests.models import parity, reference
from tools.builtin_model.evaluate import HELD_OUT, load_questions
from tools.builtin_model.tokenization import TURN_END, TURN_START

WEIGHT_BITS = (8, 4)

# windows of a book, and ids per window
WINDOWS, WINDOW = 24, 250
MAX_ANSWER = 60

# of the speed: ids of a prompt and per chunk, decode steps, streams, rounds
PROMPT, CHUNK, STEPS, STREAMS, ROUNDS = 512, 128, 24, (1, 8), 7


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutText:
    """folder: of the unquantized model. texts: ids. scored: the index of the first scored id of
    each text."""

    name: str
    folder: Path
    texts: Sequence[Sequence[int]]
    scored: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """error: the largest error of a logit. largest: the largest logit."""

    perplexity: float
    error: float
    largest: float


def report(folder: Path) -> str:
    if kernels.ops() is None:
        return f"activations: not measured, no kernels: {kernels.describe().why}"
    ops, info = kernels.ops(), kernels.describe()
    exactness = list(_report_exactness())
    ops.set_num_threads(1)
    try:
        speed = list(_report_speed(folder))
    finally:
        ops.set_num_threads(info.threads)
    return "\n".join([*exactness, "", f"instruction set {info.isa}, one thread:", *speed])


def _report_exactness() -> Iterator[str]:
    yield "| model | weights | activations | perplexity | largest error of a logit |"
    yield "|---|---|---|---|---|"
    for held_out in iter_held_out_texts():
        for bits in WEIGHT_BITS:
            exact, *found = measure_exactness(held_out, bits)
            yield f"| {held_out.name} | {bits} bits | float64 | {exact.perplexity:.6f} | |"
            for activations, one in zip(ACTIVATION_BITS, found, strict=True):
                yield (
                    f"| {held_out.name} | {bits} bits | {activations} | {one.perplexity:.6f} "
                    f"| {one.error:.1e} of {one.largest:.3g} |"
                )


def iter_held_out_texts() -> Iterator[HeldOutText]:
    yield _read_questions()
    if not SHARED.is_dir():
        return
    book = (SHARED / "corpora" / "alice_in_wonderland.txt").read_text(encoding="utf-8")
    for name in ("stories260K", "babyllama-361"):
        folder = SHARED / "models" / name
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(book).ids
        starts = np.linspace(1, len(ids) - WINDOW, WINDOWS, dtype=int)
        yield HeldOutText(
            name=name,
            folder=folder,
            texts=[[1, *ids[start : start + WINDOW]] for start in starts],
            scored=[1] * WINDOWS,
        )


def _read_questions() -> HeldOutText:
    """Questions, and the greedy answers of the unquantized weights."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    end = tokenizer.encode(TURN_END).ids[0]
    model = parity.load_model(BUILTIN)
    apply_cpu_layout(cast(nn.Module, model))
    texts: list[list[int]] = []
    scored: list[int] = []
    for question in load_questions(HELD_OUT):
        turns = f"{TURN_START}user\n{question.question}{TURN_END}\n{TURN_START}assistant\n"
        prompt = tokenizer.encode(turns).ids
        texts.append([*prompt, *_answer(model, prompt, end)])
        scored.append(len(prompt))
    return HeldOutText(name="built-in", folder=BUILTIN, texts=texts, scored=scored)


def _answer(model: Model, prompt: Sequence[int], end: int) -> Iterator[int]:
    kv, ids = model.make_kv(), mx.array([prompt])
    for _ in range(MAX_ANSWER):
        token = int(mx.argmax(model.logits(model(ids, kv)[:, -1])))
        yield token
        if token == end:
            return
        ids = mx.array([[token]])


def measure_exactness(held_out: HeldOutText, bits: int) -> Sequence[Exactness]:
    """The result in float64, and of each of ACTIVATION_BITS."""
    model = parity.load_model(held_out.folder)
    quantize_model(cast(nn.Module, model), bits)
    weights = _to_float64(model)
    config = json.loads((held_out.folder / "config.json").read_text())
    exact = [reference.llama(config, weights, list(text)) for text in held_out.texts]
    apply_cpu_layout(cast(nn.Module, model))
    results = [_compare(held_out, exact, exact)]
    for activations in ACTIVATION_BITS:
        set_activation_bits(model, activations)
        found = [parity.prefill(model, text, [len(text)]) for text in held_out.texts]
        results.append(_compare(held_out, found, exact))
    return results


def _compare(
    held_out: HeldOutText, found: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> Exactness:
    losses: list[float] = []
    for text, start, logits in zip(held_out.texts, held_out.scored, found, strict=True):
        rows = logits[start - 1 : -1].astype(np.float64)
        rows = rows - rows.max(axis=-1, keepdims=True)
        chosen = rows[np.arange(len(rows)), text[start:]]
        losses += (np.log(np.exp(rows).sum(axis=-1)) - chosen).tolist()
    pairs = list(zip(found, exact, strict=True))
    return Exactness(
        perplexity=float(np.exp(np.mean(losses))),
        error=max(float(np.abs(one - other).max()) for one, other in pairs),
        largest=max(float(np.abs(other).max()) for _, other in pairs),
    )


def _to_float64(model: Model) -> dict[str, np.ndarray]:
    """The weights by their names, as the formulas need them."""
    weights: dict[str, np.ndarray] = {}
    modules: Any = cast(nn.Module, model).named_modules()
    for path, module in modules:
        if "scales" in module:
            weights[f"{path}.weight"] = _dequantize(module)
        elif "weight" in module:
            weights[f"{path}.weight"] = np.array(module.weight.astype(mx.float32), np.float64)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _dequantize(layer: Any) -> np.ndarray:
    shifts = np.arange(0, 32, layer.bits, dtype=np.uint32)
    numbers = np.array(layer.weight)[..., None] >> shifts & (2**layer.bits - 1)
    scales, biases = (
        np.array(one.astype(mx.float32), np.float64)[..., None]
        for one in (layer.scales, layer.biases)
    )
    groups = numbers.reshape(*scales.shape[:-1], layer.group_size)
    return (groups * scales + biases).reshape(len(numbers), -1)


def _report_speed(folder: Path) -> Iterator[str]:
    workloads: dict[str, Callable[[Model], float]] = {f"prompt {PROMPT}": _measure_prompt}
    workloads |= {
        f"decode {streams}": lambda model, streams=streams: _measure_decode(model, streams)
        for streams in STREAMS
    }
    yield f"| weights | activations | {' | '.join(workloads)} |"
    yield "|---|---|" + "---|" * len(workloads)
    for bits in WEIGHT_BITS:
        model = parity.load_model(folder)
        quantize_model(cast(nn.Module, model), bits)
        apply_cpu_layout(cast(nn.Module, model))
        rounds: list[dict[tuple[int, str], float]] = []
        for _ in range(ROUNDS + 1):
            rounds.append({})
            for activations in ACTIVATION_BITS:
                set_activation_bits(model, activations)
                for name, measure in workloads.items():
                    rounds[-1][activations, name] = measure(model)
        del rounds[0]  # warms up
        for activations in ACTIVATION_BITS:
            cells = [_format_cell(rounds, activations, name) for name in workloads]
            yield f"| {bits} bits | {activations} | {' | '.join(cells)} |"


def _format_cell(
    rounds: Sequence[dict[tuple[int, str], float]], activations: int, name: str
) -> str:
    """Tokens per second, and the ratio to the default."""
    speed = statistics.median(one[activations, name] for one in rounds)
    ratios = [one[activations, name] / one[ACTIVATION_BITS[0], name] for one in rounds]
    return f"{speed:.3g} ({statistics.median(ratios):.2f})"


def _measure_prompt(model: Model) -> float:
    """Tokens per second of processor time of a prompt, in the chunks of the engine."""
    ids, kv = mx.arange(PROMPT)[None], model.make_kv()
    began = time.process_time()
    for start in range(0, PROMPT, CHUNK):
        hidden = model(ids[:, start : start + CHUNK], kv)
        mx.eval(model.logits(hidden[:, -1]))
    return PROMPT / (time.process_time() - began)


def _measure_decode(model: Model, streams: int) -> float:
    """Tokens per second of processor time of all streams together, after a short prompt."""
    kvs = [model.make_kv() for _ in range(streams)]
    for kv in kvs:
        mx.eval(model(mx.arange(64)[None], kv))
    ids = mx.zeros((streams, 1), mx.int32)
    began = time.process_time()
    for _ in range(STEPS):
        layers = [
            one[0].make_batch(one, mx.array([layer.offset for layer in one]))
            for one in zip(*kvs, strict=True)
        ]
        logits = model.logits(model(ids, layers)[:, -1])
        ids = mx.argmax(logits, axis=-1, keepdims=True)
        mx.eval(ids)
    return streams * STEPS / (time.process_time() - began)
