"""`make bench ARGS=activations`: the loss of exactness and the gain of speed with `--activations`.

Exactness: the distributions of next tokens in held-out text against the formulas in float64 with
the same quantized weights; to compare, the same formulas with each result rounded to bfloat16, as a
GPU computes with such a checkpoint (sums are float32 inside an operation). A published model
(`make build/smollm2/.installed`) and the trained models of ../shared/data read a book that they
were not trained on. The built-in model reads the held-out questions with the answers of its
unquantized weights. Speed: a model with random weights and bfloat16 scales on one thread, all
precisions in turns. The figures are medians of tokens per second of processor time, which other
programs barely affect, and medians of the ratios of a round.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import Tokenizer

from app import store
from app.engine.model_info import complete_config
from app.engine.weights import open_model, read_weights
from benchmarks.rounding import BUILTIN
from models import architectures, kernels
from models.base import Model
from models.cpu_layout import apply_cpu_layout, set_activation_bits
from models.gguf import reader
from models.gguf.weights import open_weights
from models.kernels.layers import ACTIVATION_BITS
from models.quant import quantize_model
from tests.conftest import SHARED
from tests.models import parity, reference
from tests.models.gguf.download import MODEL
from tools.builtin_model.evaluate import HELD_OUT, load_questions
from tools.builtin_model.tokenization import TURN_END, TURN_START

WEIGHT_BITS = (8, 4)

# windows of a book, and ids per window; fewer windows for the published model
WINDOWS, PUBLISHED_WINDOWS, WINDOW = 24, 6, 250
MAX_ANSWER = 60

# of the speed: ids of a prompt and per chunk, decode steps, streams, rounds
PROMPT, CHUNK, STEPS, STREAMS, ROUNDS = 512, 128, 24, (1, 8), 7


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """stored: opens the model in MLX's packings, as it is stored. served: opens it with the CPU
    layout."""

    weights: str
    stored: Callable[[], Model]
    served: Callable[[], Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutText:
    """texts: ids. scored: the index of the first scored id of each text."""

    name: str
    config: Mapping[str, Any]
    models: Sequence[QuantizedModel]
    texts: Sequence[Sequence[int]]
    scored: Sequence[int]


@dataclass(slots=True, kw_only=True)
class Exactness:
    """Figures of the tokens so far. divergence: the Kullback-Leibler divergence from float64 of
    each position. losses: the losses of the scored ids. error: the largest error of a logit.
    largest: the largest logit. agreed: the number of positions with the same most likely token."""

    divergence: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    error: float = 0.0
    largest: float = 0.0
    agreed: int = 0

    def add(self, found: np.ndarray, exact: np.ndarray, scored: Sequence[int]) -> None:
        """found, exact: logits [L, V]. scored: the ids after the last len(scored) positions but
        one."""
        computed, expected = _log_softmax(found), _log_softmax(exact)
        self.divergence += (np.exp(expected) * (expected - computed)).sum(-1).tolist()
        rows = computed[-1 - len(scored) : -1]
        self.losses += (-rows[np.arange(len(scored)), scored]).tolist()
        self.error = max(self.error, float(np.abs(found - exact).max()))
        self.largest = max(self.largest, float(np.abs(exact).max()))
        self.agreed += int((found.argmax(-1) == exact.argmax(-1)).sum())

    def format(self) -> str:
        divergence = np.maximum(self.divergence, 0)
        return (
            f"{divergence.mean():.1e} | {divergence.max():.1e} "
            f"| {100 * self.agreed / len(divergence):.2f} % | {np.exp(np.mean(self.losses)):.6f} "
            f"| {self.error:.1e} of {self.largest:.3g}"
        )


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
    yield (
        "| model | weights | activations | mean KL | largest KL | same first choice | perplexity "
        "| largest error of a logit |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for held_out in iter_held_out_texts():
        for model in held_out.models:
            for name, found in measure_exactness(held_out, model).items():
                yield f"| {held_out.name} | {model.weights} | {name} | {found.format()} |"


def iter_held_out_texts() -> Iterator[HeldOutText]:
    yield _read_questions()
    if not SHARED.is_dir():
        return
    book = (SHARED / "corpora" / "alice_in_wonderland.txt").read_text(encoding="utf-8")
    for name in ("stories260K", "babyllama-361"):
        folder = SHARED / "models" / name
        yield HeldOutText(
            name=name,
            config=_read_config(folder),
            models=_list_quantized(folder),
            **_cut_windows(folder / "tokenizer.json", book, WINDOWS, [1]),
        )
    if MODEL.is_file():
        files = complete_config(store.find(str(MODEL)))
        yield HeldOutText(
            name="SmolLM2-135M-Instruct",
            config=files.config,
            models=[QuantizedModel(weights="Q4_1", stored=_store_gguf, served=_serve_gguf)],
            **_cut_windows(files.tokenizer_path, book, PUBLISHED_WINDOWS, []),
        )


def _cut_windows(tokenizer: Path, book: str, count: int, first: list[int]) -> Any:
    ids = Tokenizer.from_file(str(tokenizer)).encode(book, add_special_tokens=False).ids
    starts = np.linspace(1, len(ids) - WINDOW, count, dtype=int)
    texts = [[*first, *ids[start : start + WINDOW]] for start in starts]
    return {"texts": texts, "scored": [1] * count}


def _read_config(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _list_quantized(folder: Path) -> Sequence[QuantizedModel]:
    return [
        QuantizedModel(
            weights=f"{bits} bits",
            stored=partial(_quantize, folder, bits),
            served=partial(_serve_quantized, folder, bits),
        )
        for bits in WEIGHT_BITS
    ]


def _quantize(folder: Path, bits: int, dtype: mx.Dtype = mx.float32) -> Model:
    model: Any = parity.load_model(folder)
    model.set_dtype(dtype)
    quantize_model(model, bits)
    return model


def _serve_quantized(folder: Path, bits: int, dtype: mx.Dtype = mx.float32) -> Model:
    model = _quantize(folder, bits, dtype)
    apply_cpu_layout(cast(nn.Module, model))
    return model


def _store_gguf() -> Model:
    file = reader.read(MODEL)
    weights, unread = open_weights(file)
    model = architectures.build(store.find(str(MODEL)).config, weights)
    unread.read()
    return model


def _serve_gguf() -> Model:
    files = complete_config(store.find(str(MODEL)))
    model = open_model(files, None, kv="float32")
    read_weights(model, files.path, lambda _percent, _bytes: None)
    return model


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
    return HeldOutText(
        name="built-in",
        config=_read_config(BUILTIN),
        models=_list_quantized(BUILTIN),
        texts=texts,
        scored=scored,
    )


def _answer(model: Model, prompt: Sequence[int], end: int) -> Iterator[int]:
    kv, ids = model.make_kv(), mx.array([prompt])
    for _ in range(MAX_ANSWER):
        token = int(mx.argmax(model.logits(model(ids, kv)[:, -1])))
        yield token
        if token == end:
            return
        ids = mx.array([[token]])


def measure_exactness(held_out: HeldOutText, quantized: QuantizedModel) -> Mapping[str, Exactness]:
    """The results of float64 itself, of each of ACTIVATION_BITS, and of bfloat16."""
    config = dict(held_out.config)
    weights = _to_float64(quantized.stored())
    narrow = {name: array.astype(np.float32) for name, array in weights.items()}
    model = quantized.served()
    results = {
        name: Exactness() for name in ("float64", *map(str, ACTIVATION_BITS), "all in bfloat16")
    }
    for text, start in zip(held_out.texts, held_out.scored, strict=True):
        ids = list(text)
        exact = reference.llama(config, weights, ids)
        found = {"float64": exact}
        for bits in ACTIVATION_BITS:
            set_activation_bits(model, bits)
            found[str(bits)] = parity.prefill(model, text, [len(text)])
        found["all in bfloat16"] = reference.llama(config, narrow, ids, _round_to_bfloat16)
        for name, logits in found.items():
            results[name].add(logits, exact, ids[start:])
    return results


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def _round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even. The result is float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


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
        model = _serve_quantized(folder, bits, mx.bfloat16)
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
