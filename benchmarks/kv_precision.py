"""`make bench ARGS=kv`: the accuracy that `--kv` costs, and the time that it saves in decode steps.

Accuracy: log probabilities of a text in windows of the model's context, computed with keys and
values of each type. The models are the trained ones at hand; all have float32 weights, so that only
the caches differ. Without ../shared/data, only the built-in model is measured.

Speed: steps of random models with caches of noise. The types alternate step by step, and a figure
is the median of the ratios of neighbouring steps.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from benchmarks import cpu_mlx, cpu_models
from benchmarks.rounding import BUILTIN
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from tests.conftest import SHARED
from tests.models import parity

TYPES: Mapping[str, mx.Dtype | None] = {
    "float32": None,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}

TEXT = "corpora/alice_in_wonderland.txt"
# of a text, and of one evaluated piece; the chunk of the engine on a CPU
MAX_IDS, WINDOW, CHUNK = 8192, 256, 128

SPEED_MODELS = (("110M", "q4-bf16"), ("Qwen3-0.6B", "q4-bf16"))
CONTEXTS, STEPS = (2048, 4096, 8192, 16384), 15
# float16 has the size of bfloat16, and a third cache of the larger model may not fit
SPEED_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Compared with float32. perplexity: the perplexity of the text. difference: the largest
    difference of a token's log probability. changed: the share of positions with a different most
    likely token. gap: the largest difference of the two best float32 logits at such a position."""

    perplexity: float
    difference: float
    changed: float
    gap: float


def report() -> str:
    return f"{report_accuracy()}\n\n{report_speed()}"


def report_accuracy() -> str:
    lines = [
        f"{MAX_IDS} tokens in windows of {WINDOW}, in chunks of {CHUNK}:",
        "| model | KV cache | perplexity | largest difference of a log probability "
        "| other most likely token | largest gap at such a token |",
        "|---|---|---|---|---|---|",
    ]
    for name, folder, ids in iter_texts():
        for kind, found in measure_accuracy(folder, ids).items():
            lines.append(
                f"| {name} | {kind} | {found.perplexity:.5f} | {found.difference:.1e} "
                f"| {100 * found.changed:.2f} % | {found.gap:.1e} |"
            )
    return "\n".join(lines)


def iter_texts() -> Iterator[tuple[str, Path, Sequence[int]]]:
    """Yields the name of a model, its folder, and the tokens of a text that it was not trained
    on."""
    texts = {"built-in": (BUILTIN, BUILTIN / "MODEL_CARD.md")}
    if SHARED.is_dir():
        for name in ("stories260K", "babyllama-361"):
            texts[name] = SHARED / "models" / name, SHARED / TEXT
    for name, (folder, text) in texts.items():
        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        yield name, folder, tokenizer.encode(text.read_text()[: 8 * MAX_IDS]).ids[:MAX_IDS]


def measure_accuracy(folder: Path, ids: Sequence[int]) -> Mapping[str, Accuracy]:
    model: Any = parity.load_model(folder)
    apply_cpu_layout(model)
    starts = range(0, len(ids) - WINDOW + 1, WINDOW)
    windows = [list(ids[start : start + WINDOW]) for start in starts]
    logits: dict[str, np.ndarray[Any, Any]] = {}
    for kind, dtype in TYPES.items():
        model.kv_dtype = dtype
        logits[kind] = np.stack([_compute_logits(model, window) for window in windows])
    targets = np.array(windows)[:, 1:, None]
    plain = logits["float32"]
    best, scores = plain.argmax(-1), _score(plain, targets)
    top = np.sort(plain, axis=-1)
    gaps = top[..., -1] - top[..., -2]
    found: dict[str, Accuracy] = {}
    for kind, own in logits.items():
        changed = own.argmax(-1) != best
        own_scores = _score(own, targets)
        found[kind] = Accuracy(
            perplexity=float(np.exp(-own_scores.mean())),
            difference=float(np.abs(own_scores - scores).max()),
            changed=float(changed.mean()),
            gap=float(gaps[changed].max(initial=0.0)),
        )
    return found


def _compute_logits(model: Model, ids: list[int]) -> np.ndarray[Any, Any]:
    """[WINDOW - 1, V] of the positions whose next token is known."""
    return parity.prefill(model, ids, [CHUNK] * (len(ids) // CHUNK))[:-1].astype(np.float64)


def _score(logits: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Log probabilities of the targets."""
    largest = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest
    return (np.take_along_axis(logits, targets, -1) - total)[..., 0]


def report_speed() -> str:
    lines = [
        f"{cpu_mlx.describe_backend()}; one stream, milliseconds per step:",
        "| model | context | float32 | bfloat16 | ratio |",
        "|---|---|---|---|---|",
    ]
    with TemporaryDirectory() as place:
        for size, form in SPEED_MODELS:
            cpu_models.write(Path(place) / size, size, form)
            model = cpu_mlx.load(Path(place) / size)
            for context in CONTEXTS:
                times = measure_steps(model, context)
                ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
                medians = [1000 * statistics.median(own) for own in times.values()]
                figures = " | ".join(f"{one:.1f}" for one in medians)
                lines.append(f"| {size} {form} | {context} | {figures} | {ratio:.2f} |")
    return "\n".join(lines)


def measure_steps(model: Model, context: int) -> dict[str, list[float]]:
    """Seconds of the steps with each type, taken in turns."""
    loops: dict[str, cpu_mlx.DecodeLoop] = {}
    for kind in SPEED_TYPES:
        model.kv_dtype = TYPES[kind]
        caches = cpu_mlx.make_random_caches(model, context)
        loops[kind] = cpu_mlx.DecodeLoop(model, caches, 1)
        del caches
        for _ in range(2):  # allocates, and fills the pipeline
            mx.eval(loops[kind].step(mx.array([1])))
    times: dict[str, list[float]] = {kind: [] for kind in SPEED_TYPES}
    for _ in range(STEPS):
        for kind, loop in loops.items():
            begun = time.perf_counter()
            mx.eval(loop.step(mx.array([1])))
            times[kind].append(time.perf_counter() - begun)
    return times
