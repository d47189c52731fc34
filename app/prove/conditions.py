"""The conditions under which a proof repeats its requests, and the runs of each.

Knows: settings of an engine, the order of jobs. Must not know: texts, HTTP, the layout of reports.

Each condition differs from the reference in one respect, so that a difference names its cause.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.grammar.compiler import GrammarCompiler
from app.prove.comparison import Answer
from app.prove.engine import ProofEngine, ProofJob

Chains = Sequence[Sequence[ProofJob]]

# The prefill chunk of the condition "chunked". It divides neither the default nor a power of 2, so
# chunks begin at different positions.
ODD_CHUNK = 37

# The shares of the KV memory that all sequences of the condition "preempted" need at their end.
_MEMORY_SHARES = (0.75, 0.6, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """The answers under a condition, by job ID. detail: a summary with numbers. answers: None if
    the condition could not be created, and detail then gives the reason."""

    answers: Mapping[str, Answer] | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofModel:
    """A model and the settings of the user. grammars: shared by all engines."""

    files: ModelFiles
    settings: Settings
    grammars: GrammarCompiler

    def engine(self, kv_bytes: int | None = None, **changes: object) -> ProofEngine:
        """Loads the model with different settings. kv_bytes: see app/engine/loader.py."""
        settings = replace(self.settings, **changes)  # pyright: ignore[reportArgumentType]
        return ProofEngine(self.files, settings, self.grammars, kv_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition. name: in the report. cause: the part of the engine that it adds to the
    reference. run: receives the chains of jobs. changes_chunks: whether prompts are split at
    different positions, which changes the bits of a model that is exact only due to `--exact`.
    uses_long: whether it runs the long answers, instead of the conversations."""

    name: str
    cause: str
    run: Callable[[ProofModel, Chains], ConditionResult]
    changes_chunks: bool = False
    uses_long: bool = False


def run_alone(engine: ProofEngine, chains: Chains) -> Mapping[str, Answer]:
    """The reference: one request at a time, and no cached prefixes."""
    return engine.run(_without_cache(chains), concurrent=False)


def _run_batched(model: ProofModel, chains: Chains) -> ConditionResult:
    jobs = [[job] for chain in _without_cache(chains) for job in chain]
    with model.engine(**_parallel(model, len(jobs))) as engine:
        answers = engine.run(jobs, concurrent=True)
        return ConditionResult(answers=answers, detail=f"up to {engine.max_running} at a time")


def _run_cached(model: ProofModel, chains: Chains) -> ConditionResult:
    with model.engine(cache="radix") as engine:
        first = engine.run(chains, concurrent=False)
        again = engine.run(_rename(chains, "again"), concurrent=False)
        return _describe_cache({**first, **again}, chains)


def _run_batched_and_cached(model: ProofModel, chains: Chains) -> ConditionResult:
    # each conversation runs twice, so that sequences share prefixes while they run
    twice = [*chains, *_rename(chains, "again")]
    with model.engine(cache="radix", **_parallel(model, len(twice))) as engine:
        return _describe_cache(engine.run(twice, concurrent=True), chains)


def _run_chunked(model: ProofModel, chains: Chains) -> ConditionResult:
    with model.engine(prefill_chunk=ODD_CHUNK) as engine:
        answers = engine.run(_without_cache(chains), concurrent=False)
        return ConditionResult(answers=answers, detail=f"{ODD_CHUNK} prompt tokens per step")


def _run_preempted(model: ProofModel, chains: Chains) -> ConditionResult:
    """Lowers the memory until a sequence is preempted."""
    jobs = [job.job for chain in chains for job in chain]
    longest = max(len(job.prompt_token_ids) + job.max_tokens for job in jobs)
    changes = {"context": longest + 1, "parallel": len(jobs)}
    with model.engine(**changes) as engine:
        capacity = engine.capacity
    detail = "no sequence was preempted"
    for share in _MEMORY_SHARES:
        kv_bytes = int(share * len(jobs) * capacity.kv_bytes_per_sequence)
        try:
            # A context that was set must fit for every sequence, which would prevent preemptions.
            with model.engine(kv_bytes, parallel=len(jobs), context=None) as engine:
                answers = engine.run(_without_cache(chains), concurrent=True)
                if engine.stats.preemptions:
                    return ConditionResult(
                        answers=answers, detail=f"{engine.stats.preemptions} preemptions"
                    )
        except AppError as error:  # too little memory for one sequence
            detail = error.message
    return ConditionResult(answers=None, detail=detail)


CONDITIONS = (
    Condition(name="batched", cause="other sequences in the batch", run=_run_batched),
    Condition(name="cached", cause="the prefix cache", run=_run_cached),
    Condition(
        name="batched + cached",
        cause="prefixes that running sequences share",
        run=_run_batched_and_cached,
    ),
    Condition(
        name="chunked",
        cause="the split of the prompt into prefill chunks",
        run=_run_chunked,
        changes_chunks=True,
    ),
    Condition(
        name="preempted", cause="the restart of a sequence", run=_run_preempted, uses_long=True
    ),
)


def _parallel(model: ProofModel, count: int) -> Mapping[str, int]:
    """Returns the setting for `count` concurrent sequences, unless the user has chosen one. With
    --exact, an engine selects the number itself."""
    settings = model.settings
    return {} if settings.parallel or settings.exact else {"parallel": count}


def _without_cache(chains: Chains) -> Chains:
    return [
        [replace(request, job=replace(request.job, cache_prompt=False)) for request in c]
        for c in chains
    ]


def _rename(chains: Chains, suffix: str) -> Chains:
    return [
        [
            replace(request, job=replace(request.job, id=f"{request.job.id} {suffix}"))
            for request in chain
        ]
        for chain in chains
    ]


def _describe_cache(answers: Mapping[str, Answer], chains: Chains) -> ConditionResult:
    total = 2 * sum(len(request.job.prompt_token_ids) for chain in chains for request in chain)
    cached = sum(answer.cached_tokens for answer in answers.values())
    return ConditionResult(answers=answers, detail=f"{cached} of {total} prompt tokens cached")
