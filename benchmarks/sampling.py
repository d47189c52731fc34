"""`make bench ARGS=sampling`: the cost of sampling parameters in a decode step.

Eight streams decode on the engine loop, in 4 bits. The rounds alternate between the parameters, and
between the sampling kernel and MLX's operations; greedy sampling is measured again before each of
them. The figures are medians of the time between two steps; a ratio is the median of the ratios of
all rounds.
"""

import itertools
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app import store
from app.core.jobs import Job
from app.core.requests import Grammar, JsonSchema
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.sampling import sampler
from app.engine.sampling.logprobs import compute_logprobs, compute_logprobs_with_mlx
from app.engine.sampling.sampler import can_fuse
from app.grammar.compiler import GrammarCompiler
from benchmarks import client, random_model

STREAMS, TOKENS, ROUNDS = 8, 24, 5

# the vocabularies of Llama 2 and of Qwen3
VOCABULARIES = (32_000, 151_936)

_NO_STOP = frozenset[int]()
_SCHEMA = JsonSchema(
    text=json.dumps({"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 99})
)
_BIAS = tuple((token, 1.5) for token in range(300, 320))
_WORDS = ((300,), (301, 302), (303, 304, 305))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The parameters of all streams. Streams with odd numbers have `odd` in addition."""

    knobs: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    odd: Mapping[str, Any] = field(default_factory=dict[str, Any])
    grammar: Grammar | None = None
    logprobs: int | None = None
    stops: frozenset[int] = _NO_STOP
    min_tokens: int = 0


def _greedy(**knobs: Any) -> Mapping[str, Any]:
    return {"temperature": 0.0, **knobs}


_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}

LOADS: Mapping[str, Load] = {
    "greedy": Load(),
    "temperature": Load(knobs={"temperature": 1.0}),
    "top_k 40": Load(knobs={"temperature": 1.0, "top_k": 40}),
    "top_p 0.95": Load(knobs={"temperature": 1.0, "top_p": 0.95}),
    "top_k 40, top_p 0.95": Load(knobs={"temperature": 1.0, "top_k": 40, "top_p": 0.95}),
    "penalties": Load(knobs=_greedy(**_PENALTIES)),
    "penalties, last 64": Load(knobs=_greedy(**_PENALTIES, repeat_last_n=64)),
    "logit_bias": Load(knobs=_greedy(logit_bias=_BIAS)),
    "allowed_token_ids": Load(knobs=_greedy(allowed_token_ids=tuple(range(256, 1256)))),
    "bad_words": Load(knobs=_greedy(bad_words=_WORDS)),
    "min_tokens": Load(stops=frozenset({299}), min_tokens=TOKENS),
    "logprobs 5": Load(logprobs=5),
    "JSON schema": Load(grammar=_SCHEMA),
    "half greedy, half top_p": Load(odd={"temperature": 1.0, "top_p": 0.95}),
    "half plain, half penalties": Load(odd=_PENALTIES),
    "all of these": Load(
        knobs={
            **_PENALTIES,
            "temperature": 1.0,
            "top_p": 0.95,
            "logit_bias": _BIAS,
            "bad_words": _WORDS,
        },
        grammar=_SCHEMA,
        logprobs=5,
    ),
}


def report(folder: Path) -> str:
    lines = [
        f"a step of {STREAMS} streams, ms (and as a multiple of greedy):",
        "| vocabulary | parameters | kernel | MLX | MLX / kernel |",
        "|---|---|---|---|---|",
    ]
    pipelines: tuple[tuple[Any, Any], ...] = (
        (can_fuse, compute_logprobs),
        (lambda stages: False, compute_logprobs_with_mlx),
    )
    for vocab in VOCABULARIES:
        destination = random_model.write(folder.parent / str(vocab), folder.name, vocab=vocab)
        files = store.find(str(destination))
        grammars = GrammarCompiler(files.tokenizer_path, vocab=files.sampleable_vocab_size)
        loop = load(files, Settings(parallel=STREAMS, quantize=4), lambda _done, _bytes: None)
        steps: dict[str, tuple[_Steps, _Steps]] = {name: (_Steps(), _Steps()) for name in LOADS}
        for _ in range(ROUNDS):
            for name, one in LOADS.items():
                for place, pipeline in enumerate(pipelines):
                    sampler.can_fuse, sampler.compute_logprobs = pipeline
                    steps[name][place].greedy.append(_measure_step(loop, grammars, Load()))
                    steps[name][place].measured.append(_measure_step(loop, grammars, one))
        sampler.can_fuse, sampler.compute_logprobs = pipelines[0]
        for name, (kernel, mlx) in steps.items():
            lines.append(
                f"| {vocab} | {name} | {kernel} | {mlx} "
                f"| {_median_ratio(mlx.measured, kernel.measured):.2f} |"
            )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Seconds per step in each round, and those of the greedy steps before."""

    measured: list[float] = field(default_factory=list[float])
    greedy: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        median = 1e3 * statistics.median(self.measured)
        return f"{median:.1f} ({_median_ratio(self.measured, self.greedy):.2f})"


def _median_ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def _measure_step(loop: Loop, grammars: GrammarCompiler, one: Load) -> float:
    """The median of the seconds between two steps that decode all streams."""
    for number in range(STREAMS):
        knobs = {**one.knobs, **(one.odd if number % 2 else {})}
        job = Job(
            id=str(number),
            prompt_token_ids=tuple(client.make_prompt(32, seed=number).encode()),
            sampling=SamplingParams(**knobs, seed=number),
            max_tokens=TOKENS,
            min_tokens=one.min_tokens,
            stop_token_ids=one.stops,
            top_logprobs=one.logprobs,
            grammar=one.grammar,
            cache_prompt=False,
        )
        grammar = None if one.grammar is None else grammars.compile(one.grammar, one.stops)
        loop.submit(job, grammar)
    times: list[float] = []
    while not loop.idle:
        loop.step()
        times.append(time.perf_counter())
    # the first steps compute the prompts
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps[STREAMS:])
