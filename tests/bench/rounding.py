"""`make bench ARGS=rounding`: how far apart logits are that should be the same.

Of one sequence, evaluated at once and behind a cache that was decoded token by token; and decoded
in a batch and alone. With our operations for a CPU, where they were built, and with MLX's own
(`MLXRUNNER_KERNELS=off`). Nothing here is a fault: float32 is added up in another order. With
`--exact` all of these differences are zero.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from models import kernels
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from tests.bench import random_model
from tests.models import parity, test_glm4_moe_lite, test_llama, test_qwen3_5, test_qwen3_next
from tests.models.architectures import Case
from tests.models.switched import computing

BUILTIN = Path(__file__).resolve().parents[2] / "models" / "builtin"

# ids of a prompt, and how many of them are cached; all of them are read in chunks of as many as the
# engine takes on a CPU
LENGTH, CACHED, CHUNK = 200, (1, 37, 100, 150, 190), 128
SEEDS = range(3)
# lengths of the prompts of a batch, and steps that it decodes
BATCH, STEPS = (3, 17, 90, 128, 9, 64, 1, 40), 16


def report() -> str:
    """A table: the largest difference of any logit, and the largest logit."""
    lines = [
        f"prompts of {LENGTH} ids, {len(BATCH)} rows, {len(SEEDS)} draws of ids each:",
        "| model | operations | largest logit | cached | batched |",
        "|---|---|---|---|---|",
    ]
    with TemporaryDirectory() as place:
        for name, opened, vocab in iter_models(Path(place)):
            for by_kernels in (False, True):
                if by_kernels and kernels.ops() is None:
                    continue
                with computing(by_kernels=by_kernels):
                    model = opened()
                    apply_cpu_layout(cast(nn.Module, model))
                    found = [measure_differences(model, vocab, seed) for seed in SEEDS]
                most = [max(column) for column in zip(*found, strict=True)]
                figures = " | ".join((f"{most[0]:.3g}", *(f"{one:.1e}" for one in most[1:])))
                lines.append(f"| {name} | {'ours' if by_kernels else 'MLX'} | {figures} |")
    return "\n".join(lines)


def iter_models(place: Path) -> Iterator[tuple[str, Callable[[], Model], int]]:
    """Names, what opens them, sizes of their vocabularies."""
    yield "built-in", lambda: parity.opened(BUILTIN), 1024
    folder = random_model.write(place, "15M")
    yield "15M Llama", lambda: parity.opened(folder), random_model.SHAPES["15M"].vocab_size
    for module in (test_llama, test_glm4_moe_lite, test_qwen3_next, test_qwen3_5):
        case: Case = module.CASES[0]
        saved = place / case.id
        parity.saved(case, saved)
        yield f"tiny {case.id}", lambda saved=saved: parity.opened(saved), case.vocab


def measure_differences(model: Model, vocab: int, seed: int) -> tuple[float, float, float]:
    """The largest logit, and the largest differences by the cache and by the batch."""

    def ids(length: int, salt: int) -> list[int]:
        return np.random.default_rng([seed, salt]).integers(0, vocab, length).tolist()

    prompt = ids(LENGTH, 0)
    whole = parity.our_prefilled(model, prompt, [CHUNK, LENGTH - CHUNK])
    cached = max(
        float(np.abs(whole[have:] - _logits_after(model, prompt, have)).max()) for have in CACHED
    )
    prompts = [ids(length, length) for length in BATCH]
    steps = [ids(STEPS, 1000 + length) for length in BATCH]
    together = parity.our_batch(model, prompts, steps)
    alone = [
        parity.our_batch(model, [one], [more])[0] for one, more in zip(prompts, steps, strict=True)
    ]
    return float(np.abs(whole).max()), cached, float(np.abs(together - np.stack(alone)).max())


def _logits_after(model: Model, prompt: Sequence[int], cached: int) -> Any:
    """Logits of what comes behind `cached` ids that were decoded one by one."""
    kv = model.make_kv()
    for id_ in prompt[:cached]:
        mx.eval(model(mx.array([[id_]]), kv))
    return np.array(model.logits(model(mx.array([prompt[cached:]]), kv))[0].astype(mx.float32))
