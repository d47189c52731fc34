"""`make bench ARGS=rounding`: differences of logits that would be equal without rounding.

It compares a sequence evaluated at once with one after a cache decoded token by token, and decoding
in a batch with decoding alone; with our CPU kernels, if they are built, and with MLX's operations
(`MLXRUNNER_KERNELS=off`). The differences are not errors: float32 sums have a different order. With
`--exact` all differences are zero.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks import random_model
from models import kernels
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from tests.models import parity, test_glm4_moe_lite, test_llama, test_qwen3_5, test_qwen3_next
from tests.models.architectures import Case
from tests.models.kernel_switch import use_kernels

BUILTIN = Path(__file__).resolve().parents[1] / "models" / "builtin"

# ids of a prompt; numbers of cached ids; the chunk length of the engine on a CPU
LENGTH, CACHED, CHUNK = 200, (1, 37, 100, 150, 190), 128
SEEDS = range(3)
# lengths of the prompts of a batch; decode steps
BATCH, STEPS = (3, 17, 90, 128, 9, 64, 1, 40), 16


def report() -> str:
    """A table: the largest difference of a logit, and the largest logit."""
    lines = [
        f"prompts of {LENGTH} ids, {len(BATCH)} rows, {len(SEEDS)} draws of ids each:",
        "| model | operations | largest logit | cached | batched |",
        "|---|---|---|---|---|",
    ]
    with TemporaryDirectory() as place:
        for name, load, vocab in iter_models(Path(place)):
            for with_kernels in (False, True):
                if with_kernels and kernels.ops() is None:
                    continue
                with use_kernels(enabled=with_kernels):
                    model = load()
                    apply_cpu_layout(cast(nn.Module, model))
                    found = [measure_differences(model, vocab, seed) for seed in SEEDS]
                most = [max(column) for column in zip(*found, strict=True)]
                figures = " | ".join((f"{most[0]:.3g}", *(f"{one:.1e}" for one in most[1:])))
                lines.append(f"| {name} | {'ours' if with_kernels else 'MLX'} | {figures} |")
    return "\n".join(lines)


def iter_models(place: Path) -> Iterator[tuple[str, Callable[[], Model], int]]:
    """Name, function that loads the model, vocabulary size."""
    yield "built-in", lambda: parity.load_model(BUILTIN), 1024
    folder = random_model.write(place, "15M")
    yield "15M Llama", lambda: parity.load_model(folder), random_model.SHAPES["15M"].vocab_size
    for module in (test_llama, test_glm4_moe_lite, test_qwen3_next, test_qwen3_5):
        case: Case = module.CASES[0]
        model_folder = place / case.id
        parity.save_reference(case, model_folder)
        yield (
            f"tiny {case.id}",
            lambda model_folder=model_folder: parity.load_model(model_folder),
            case.vocab,
        )


def measure_differences(model: Model, vocab: int, seed: int) -> tuple[float, float, float]:
    """The largest logit, and the largest differences with a cache and in a batch."""

    def ids(length: int, salt: int) -> list[int]:
        return np.random.default_rng([seed, salt]).integers(0, vocab, length).tolist()

    prompt = ids(LENGTH, 0)
    logits = parity.prefill(model, prompt, [CHUNK, LENGTH - CHUNK])
    cached = max(
        float(np.abs(logits[have:] - _logits_after(model, prompt, have)).max()) for have in CACHED
    )
    prompts = [ids(length, length) for length in BATCH]
    steps = [ids(STEPS, 1000 + length) for length in BATCH]
    together = parity.decode_batch(model, prompts, steps)
    alone = [
        parity.decode_batch(model, [one], [more])[0]
        for one, more in zip(prompts, steps, strict=True)
    ]
    return float(np.abs(logits).max()), cached, float(np.abs(together - np.stack(alone)).max())


def _logits_after(model: Model, prompt: Sequence[int], cached: int) -> Any:
    """Logits of the prompt after its first `cached` ids were decoded one by one."""
    kv = model.make_kv()
    for id_ in prompt[:cached]:
        mx.eval(model(mx.array([[id_]]), kv))
    return np.array(model.logits(model(mx.array([prompt[cached:]]), kv))[0].astype(mx.float32))
