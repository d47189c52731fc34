"""`make bench ARGS=sampling`: what sampling parameters cost in a decode step.

Eight streams decode on the engine loop, in 4 bits. The rounds alternate between the parameters, and
between the sampling kernel and MLX's operations. The figures are medians of the time between two
steps.
"""

import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app import store
from app.core.jobs import Job
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.sampling import draw, sampler
from tests.bench import client, random_model

STREAMS, TOKENS, ROUNDS = 8, 24, 5

# the vocabularies of Llama 2 and of Qwen3
VOCABULARIES = (32_000, 151_936)

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k 40": {"temperature": 1.0, "top_k": 40},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_k 40, top_p 0.95": {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
}


def report(folder: Path) -> str:
    lines = [
        f"a step of {STREAMS} streams, ms (and as a multiple of greedy):",
        "| vocabulary | parameters | kernel | MLX |",
        "|---|---|---|---|",
    ]
    originals = draw.select_method, draw.choose_method
    for vocab in VOCABULARIES:
        destination = random_model.write(folder.parent / str(vocab), folder.name, vocab=vocab)
        files = store.find(str(destination))
        loop = load(files, Settings(parallel=STREAMS, quantize=4), lambda _done, _bytes: None)
        steps: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in PARAMETERS}
        for _ in range(ROUNDS):
            for name, knobs in PARAMETERS.items():
                for place, select in enumerate(originals):
                    sampler.select_method = select
                    steps[name][place].append(_measure_step(loop, knobs))
        sampler.select_method = draw.select_method
        medians = {
            name: [1e3 * statistics.median(times) for times in pair] for name, pair in steps.items()
        }
        for name, (kernel, mlx) in medians.items():
            base = medians["greedy"]
            lines.append(
                f"| {vocab} | {name} | {kernel:.1f} ({kernel / base[0]:.2f}) "
                f"| {mlx:.1f} ({mlx / base[1]:.2f}) |"
            )
    return "\n".join(lines)


def _measure_step(loop: Loop, knobs: Mapping[str, Any]) -> float:
    """The median of the seconds between two steps that decode all streams."""
    for number in range(STREAMS):
        sampling = SamplingParams(**knobs, seed=number)
        loop.submit(
            Job(
                id=str(number),
                prompt_token_ids=tuple(client.make_prompt(32, seed=number).encode()),
                sampling=sampling,
                max_tokens=TOKENS,
                stop_token_ids=frozenset(),
                cache_prompt=False,
            )
        )
    times: list[float] = []
    while not loop.idle:
        loop.step()
        times.append(time.perf_counter())
    # the first steps compute the prompts
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps[STREAMS:])
