"""Drives a Loop step by step, and compares the results of two runs."""

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from app.core.jobs import Ended, Job, Prefilled, PromptLogprobs, Started, Token
from app.core.requests import EmbedJob, EmbedResult
from app.core.sampling_params import SamplingParams
from app.engine import memory_profile
from app.engine.adapters import Adapters
from app.engine.decode_slab import DEFAULT_SLAB_POLICY, SlabPolicy
from app.engine.loop import Loop
from app.engine.memory_profile import profile_memory
from app.engine.policy import SchedulerLimits
from app.engine.prefix.cache import PrefixCache
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from app.engine.sampling.logprobs import PromptLogprob
from app.grammar.compiler import GrammarCompiler, Matcher
from models import architectures
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from models.kv import LayerCache, dispatch_caches, evaluate_caches
from tests import tiny

# two logits closer than this may swap places between equally correct computations
NEAR = 1e-4
CONTEXT = 512
TOP = 5


@dataclass(kw_only=True)
class Outcome:
    """All updates of one job."""

    cached: int = -1
    progress: list[int] = field(default_factory=list)
    scores: list[PromptLogprob] | None = None
    tokens: list[Token] = field(default_factory=list)
    vectors: list[bytes] | None = None
    reason: str = ""
    error: str | None = None

    def add_result(self, result: EmbedResult) -> None:
        assert self.reason == "", "an update after the end"
        self.vectors, self.error = list(result.vectors), result.error
        self.reason = "embedded" if result.error is None else "error"

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def tiny_model(seed: int = 0) -> Model:
    """Prepared for the device, as the engine loads it."""
    model: Any = architectures.build(tiny.CONFIG, tiny.weights(seed=seed))
    apply_cpu_layout(model)
    return model


def make_prefix(
    model: Model, policy: str, *, running: int = 1, alignment: int = 1, context: int = CONTEXT
) -> PrefixCache[LayerCache]:
    match policy:
        case "single":
            return SinglePrefixCache(model.make_kv, alignment=alignment)
        case "radix":
            return RadixPrefixCache(
                model.make_kv,
                evaluate=evaluate_caches,
                dispatch=dispatch_caches,
                alignment=alignment,
                checkpoint_every=16,
            )
        case _:
            return SlotPrefixCache(
                model.make_kv,
                slots=running,
                context=context,
                multi_user=policy == "multi_user",
                evaluate=evaluate_caches,
                alignment=alignment,
            )


def make_loop(
    model: Model,
    *,
    running: int = 1,
    chunk: int = 8,
    policy: str = "single",
    exact: bool = False,
    budget: int = 1 << 34,
    context: int = CONTEXT,
    shift: bool = False,
    vocab: int = tiny.VOCAB,
    step_seconds: float | None = None,
    decode_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    slab_policy: SlabPolicy = DEFAULT_SLAB_POLICY,
    adapters: Adapters | None = None,
    min_kv_budget: int = 0,
    image_cache_bytes: int | None = None,
) -> Loop:
    """budget: bytes for layer caches and cached prefixes."""
    # the measured working memory is not used, so nothing has to delay the device
    with patch.object(memory_profile, "_DELAY_SHAPE", (1, 1)):
        memory = profile_memory(
            model,
            budget=0,
            weights=0,
            chunk=chunk,
            max_batch_size=running,
            heads=0,
            context=context,
        )
    alignment = chunk if exact else 1
    return Loop(
        model,
        make_prefix(model, policy, running=running, alignment=alignment, context=context),
        vocab=vocab,
        limits=SchedulerLimits(
            max_running=running,
            max_prefill_tokens=chunk,
            align_chunks=exact,
            step_seconds=step_seconds,
            decode_seconds=decode_seconds,
        ),
        memory=replace(memory, budget=budget, working=0),
        context=context,
        exact=exact,
        shift=model.shift if shift else None,
        clock=clock,
        slab_policy=slab_policy,
        adapters=adapters,
        min_kv_budget=min_kv_budget,
        image_cache_bytes=image_cache_bytes,
    )


def job(name: str, ids: Sequence[int], **changes: Any) -> Job:
    """By default a greedy job of 12 tokens with logprobs. Sampling fields go to SamplingParams,
    others to Job."""
    knobs = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__dataclass_fields__}
    fields: dict[str, Any] = {
        "max_tokens": 12,
        "stop_token_ids": frozenset({tiny.END}),
        "top_logprobs": TOP,
        **changes,
    }
    sampling = SamplingParams(**{"temperature": 0.0, **knobs})
    return Job(id=name, prompt_token_ids=tuple(ids), sampling=sampling, **fields)


@cache
def grammar_compiler() -> GrammarCompiler:
    """Compiles for the tiny vocabulary, whose ids are bytes."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder / "tokenizer.json", vocab=tiny.VOCAB)


def submit(loop: Loop, one: Job, matcher: Matcher | None = None) -> None:
    """matcher: None compiles the job's grammar."""
    if matcher is None and one.grammar is not None:
        matcher = grammar_compiler().compile(one.grammar, one.stop_token_ids)
    loop.submit(one, matcher)


def run(loop: Loop, *jobs: Job, cancel_after: int | None = None) -> dict[str, Outcome]:
    """Submit and step until the loop is idle. cancel_after: cancel all jobs after this many
    steps."""
    outcomes = {job.id: Outcome() for job in jobs}
    for one in jobs:
        submit(loop, one)
    steps = 0
    while not loop.idle:
        if steps == cancel_after:
            for one in jobs:
                loop.cancel(one.id)
        for update in loop.step().updates:
            record(outcomes[update.job_id], update)
        steps += 1
        assert steps < 5000
    loop.check()
    return outcomes


@dataclass(frozen=True, kw_only=True)
class ScheduledJob:
    """A job that is submitted at a step, and may be cancelled at a later one. matcher: see
    `submit`."""

    job: Job | EmbedJob
    at: int = 0
    cancelled_at: int | None = None
    matcher: Matcher | None = None


def run_schedule(loop: Loop, scheduled: Iterable[ScheduledJob]) -> dict[str, Outcome]:
    """Submit and cancel jobs at their steps until the loop is idle; `check()` after every step."""
    pending = list(scheduled)
    outcomes = {item.job.id: Outcome() for item in pending}
    cancels = [(v.cancelled_at, v.job.id) for v in pending if v.cancelled_at is not None]
    step = 0
    while pending or not loop.idle:
        for item in [v for v in pending if v.at <= step]:
            if isinstance(item.job, EmbedJob):
                loop.embed(item.job)
            else:
                submit(loop, item.job, item.matcher)
            pending.remove(item)
        for _, name in [c for c in cancels if c[0] == step]:
            loop.cancel(name)
        output = loop.step()
        for update in output.updates:
            record(outcomes[update.job_id], update)
        for result in output.embed_results:
            outcomes[result.job_id].add_result(result)
        loop.check()
        assert output.stats.ledger.free >= 0, "the ledger is overdrawn"
        step += 1
        assert step < 5000
    return outcomes


def run_one(loop: Loop, one: Job, cancel_after: int | None = None) -> Outcome:
    return run(loop, one, cancel_after=cancel_after)[one.id]


def record(outcome: Outcome, update: Any) -> None:
    assert outcome.reason == "", "an update after the end"
    match update:
        case Started():
            outcome.cached = update.cached_tokens
        case Prefilled():
            assert not outcome.tokens
            outcome.progress.append(update.computed_tokens)
        case PromptLogprobs():
            assert outcome.scores is None, "a prompt is scored once"
            assert not outcome.tokens
            outcome.scores = list(update.logprobs)
        case Token():
            outcome.tokens.append(update)
        case Ended():
            outcome.reason, outcome.error = update.reason, update.error


def near_tie(a: Token, b: Token, near: float = NEAR) -> bool:
    """Whether two runs differ at this step only because their best candidates nearly tie."""
    return all(t.top_logprobs[0][1] - t.top_logprobs[1][1] < near for t in (a, b))


def assert_same(a: Outcome, b: Outcome, near: float = NEAR) -> int:
    """Assert equal tokens and nearly equal logprobs, up to the first near-tie. Returns the number
    of near-ties."""
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    same = next((n for n, (x, y) in enumerate(pairs) if x.id != y.id), len(pairs))
    _assert_near([x for x, _ in pairs[:same]], [y for _, y in pairs[:same]], near)
    if same < len(pairs):
        x, y = pairs[same]
        assert near_tie(x, y, near), f"{x} is not {y}"
        return 1
    assert (len(a.tokens), a.reason) == (len(b.tokens), b.reason)
    return 0


def token_bits(outcome: Outcome) -> list[Any]:
    """The fields of each token that are equal where results are bitwise equal."""
    return [(token.id, token.logprob, token.top_logprobs) for token in outcome.tokens]


def _assert_near(a: Sequence[Token], b: Sequence[Token], near: float) -> None:
    """One comparison for all tokens: numpy takes a tenth of a millisecond for the smallest one."""
    assert [len(token.top_logprobs) for token in a] == [len(token.top_logprobs) for token in b]
    np.testing.assert_allclose(_logprobs(a), _logprobs(b), atol=near)


def _logprobs(tokens: Sequence[Token]) -> list[float]:
    """For each token: its own logprob, then those of the top candidates."""
    values = list[float]()
    for token in tokens:
        assert token.logprob is not None
        values += (token.logprob, *(logprob for _, logprob in token.top_logprobs))
    return values


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """Reference generation: computes the whole sequence again for every token."""
    sequence = list(ids)
    for _ in range(count):
        hidden = model(mx.array([sequence]), model.make_kv())
        sequence.append(cast(int, mx.argmax(model.logits(hidden[:, -1])[0]).item()))
    return sequence[len(ids) :]
