"""`make bench ARGS=grammars`: the cost of grammars.

Decoding with and without a grammar alternates, in one process, on the engine loop. The grammars
never end, so all rows decode the same number of tokens. The second table has the cost of compiling,
the first time and again.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app import store
from app.core.jobs import Job, Token
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, LarkGrammar, Regex
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop
from app.grammar.compiler import GrammarCompiler
from benchmarks import client

ROWS, TOKENS, ROUNDS = (1, 8), 40, 5
NONE = frozenset[int]()

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["tool", "part", "unit"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "price": {"type": ["number", "null"]},
    },
    "required": ["name", "kind", "count", "tags", "price"],
    "additionalProperties": False,
}
_SCHEMA = json.dumps({"type": "array", "items": _ITEM, "minItems": 1000})
_THINKING_TOKENS = TOKENS // 2

GRAMMARS: Mapping[str, Grammar | None] = {
    "none": None,
    "JSON schema": JsonSchema(text=_SCHEMA),
    "regular expression": Regex(pattern=r"([A-Za-z0-9 ]{1,9}, )+"),
    f"{_THINKING_TOKENS} tokens free, then the schema": LarkGrammar(
        text=f'start: thought "." answer\nthought[max_tokens={_THINKING_TOKENS}]: /(?s:.*)/\n'
        f"answer: %json {_SCHEMA}\n"
    ),
}


@dataclass(frozen=True, slots=True)
class _GrammarTiming:
    """rate: tokens per second. work: CPU milliseconds per token on all cores, which other programs
    affect less."""

    rate: float
    work: float


def report(folder: Path) -> str:
    files = store.resolve(str(folder))
    grammars = GrammarCompiler(files.tokenizer_path, vocab=files.sampleable_vocab_size)
    lines = [*_measure_compilation(grammars), "", "decoding, by grammar:"]
    lines += [
        "| rows | grammar | tokens/s | cost | processor, ms a token | cost |",
        "|---|---|---|---|---|---|",
    ]
    for rows in ROWS:
        loop = load(files, Settings(parallel=rows), lambda done, memory: None)
        paces = {name: list[_GrammarTiming]() for name in GRAMMARS}
        for turn in range(ROUNDS):
            for name, grammar in GRAMMARS.items():
                paces[name].append(_measure_decode(loop, grammars, grammar, rows, seed=turn))
        for name, measured in paces.items():
            pairs = list(zip(paces["none"], measured, strict=True))
            slower = statistics.median(plain.rate / bound.rate - 1 for plain, bound in pairs)
            harder = statistics.median(bound.work / plain.work - 1 for plain, bound in pairs)
            lines.append(
                f"| {rows} | {name} | {client.format_spread([pace.rate for pace in measured])} "
                f"| {100 * slower:.1f} % | "
                f"{client.format_spread([pace.work for pace in measured])} "
                f"| {100 * harder:.1f} % |"
            )
    return "\n".join(lines)


def _measure_decode(
    loop: Loop, grammars: GrammarCompiler, grammar: Grammar | None, rows: int, *, seed: int
) -> _GrammarTiming:
    """Measure from the time when each row has its first token until all have their last."""
    for row in range(rows):
        job = Job(
            id=str(row),
            prompt_token_ids=tuple(client.make_prompt(32, seed=100 * seed + row).encode()),
            sampling=SamplingParams(seed=row),
            max_tokens=TOKENS,
            stop_token_ids=NONE,
            cache_prompt=False,
            grammar=grammar,
        )
        loop.submit(job, None if grammar is None else grammars.compile(grammar, NONE))
    tokens_by_job = Counter[str]()
    while len(tokens_by_job) < rows:
        tokens_by_job.update(_job_ids_of_step(loop))
    early, begun, worked = tokens_by_job.total(), time.perf_counter(), time.process_time()
    while not loop.idle:
        tokens_by_job.update(_job_ids_of_step(loop))
    took, work = time.perf_counter() - begun, time.process_time() - worked
    assert set(tokens_by_job.values()) == {TOKENS}, "an answer ended early"
    decoded = tokens_by_job.total() - early
    return _GrammarTiming(rate=decoded / took, work=1000 * work / decoded)


def _job_ids_of_step(loop: Loop) -> list[str]:
    """Job ids of the tokens of a step."""
    return [update.job_id for update in loop.step().updates if isinstance(update, Token)]


def _measure_compilation(grammars: GrammarCompiler) -> list[str]:
    """Milliseconds to compile a grammar for the engine."""
    # the first compilation reads the tokenizer
    grammars.compile(Regex(pattern="a"), NONE)
    examples: dict[str, Grammar] = {
        "the benchmark's JSON schema": JsonSchema(text=_SCHEMA),
        "300 properties, all optional": JsonSchema(text=json.dumps(_make_wide_schema(300))),
        "a regular expression": Regex(pattern=r"\d{4}-\d{2}-\d{2}( \w+){1,5}"),
        "a choice of 500": ChoiceGrammar(options=tuple(f"option {i}" for i in range(500))),
    }
    lines = ["compiling, ms:", "| grammar | first | again |", "|---|---|---|"]
    for name, grammar in examples.items():
        first, again = (_milliseconds(grammars, grammar) for _ in range(2))
        lines.append(f"| {name} | {first:.2f} | {again:.2f} |")
    return lines


def _milliseconds(grammars: GrammarCompiler, grammar: Grammar) -> float:
    begun = time.perf_counter()
    grammars.compile(grammar, NONE)
    return 1000 * (time.perf_counter() - begun)


def _make_wide_schema(count: int) -> dict[str, object]:
    properties = {f"property{i}": {"type": ["string", "null"]} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}
