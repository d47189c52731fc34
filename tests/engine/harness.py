"""Driving a Loop by hand, and comparing what two runs gave."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

import models
from app.core.embeddings import EmbedJob, EmbedResult
from app.core.jobs import Ended, Job, Prefilled, PromptLogprobs, Started, Token
from app.core.ports import PrefixCache
from app.core.sampling_params import SamplingParams
from app.engine.loop import Loop
from app.engine.memory_profile import profile_memory
from app.engine.policy import SchedulerLimits
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from app.engine.sampling.logprobs import PromptLogprob
from app.grammar.compiler import GrammarCompiler, Matcher
from models.base import Model
from models.cpu_layout import apply_cpu_layout
from models.kv import LayerCache
from tests import tiny

# two logits closer than this may change places between equally right computations
NEAR = 1e-4
CONTEXT = 512
TOP = 5


@dataclass(kw_only=True)
class Outcome:
    """What a loop said of one job."""

    cached: int = -1
    progress: list[int] = field(default_factory=list)
    scores: list[PromptLogprob] | None = None
    tokens: list[Token] = field(default_factory=list)
    vectors: list[bytes] | None = None
    reason: str = ""
    error: str | None = None

    def embedded(self, over: EmbedResult) -> None:
        assert self.reason == "", "nothing may follow the end"
        self.vectors, self.error = list(over.vectors), over.error
        self.reason = "embedded" if over.error is None else "error"

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def tiny_model(seed: int = 0) -> Model:
    """As the engine loads it: suited to the device."""
    made: Any = models.build(tiny.CONFIG, tiny.weights(seed=seed))
    apply_cpu_layout(made)
    return made


def evaluate_layers(layers: Sequence[LayerCache]) -> None:
    mx.eval([layer.state() for layer in layers])


def make_prefix(
    model: Model, policy: str, *, running: int = 1, alignment: int = 1, context: int = CONTEXT
) -> PrefixCache[LayerCache]:
    match policy:
        case "single":
            return SinglePrefixCache(model.make_kv, alignment=alignment)
        case "radix":
            return RadixPrefixCache(
                model.make_kv, evaluate=evaluate_layers, alignment=alignment, checkpoint_every=16
            )
        case _:
            return SlotPrefixCache(
                model.make_kv,
                slots=running,
                context=context,
                multi_user=policy == "multi_user",
                evaluate=evaluate_layers,
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
) -> Loop:
    """budget: bytes for layer caches and cached prefixes."""
    memory = profile_memory(
        model, budget=0, weights=0, chunk=chunk, max_batch_size=running, heads=0, context=context
    )
    grid = chunk if exact else 1
    return Loop(
        model,
        make_prefix(model, policy, running=running, alignment=grid, context=context),
        vocab=vocab,
        limits=SchedulerLimits(max_running=running, max_prefill_tokens=chunk, align_chunks=exact),
        memory=replace(memory, budget=budget, working=0),
        context=context,
        exact=exact,
        shift=model.shift if shift else None,
    )


def job(name: str, ids: Sequence[int], **changes: Any) -> Job:
    """A greedy job of 12 tokens with logprobs, unless told otherwise. Sampling fields go to
    SamplingParams, others to Job."""
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
    """Submit and step until nothing runs. cancel_after: cancel all of them after so many steps."""
    outcomes = {job.id: Outcome() for job in jobs}
    for one in jobs:
        submit(loop, one)
    steps = 0
    while not loop.idle:
        if steps == cancel_after:
            for one in jobs:
                loop.cancel(one.id)
        for update in loop.step().updates:
            _note(outcomes[update.job_id], update)
        steps += 1
        assert steps < 5000
    loop.check()
    return outcomes


@dataclass(frozen=True, kw_only=True)
class ScheduledJob:
    """A job that comes at a step, and perhaps is cancelled at a later one. matcher: as `submit`
    takes it."""

    job: Job | EmbedJob
    at: int = 0
    cancelled_at: int | None = None
    matcher: Matcher | None = None


def run_schedule(loop: Loop, scheduled: Iterable[ScheduledJob]) -> dict[str, Outcome]:
    """Let them come and go, step by step, until nothing runs; `check()` after every step."""
    left = list(scheduled)
    outcomes = {visit.job.id: Outcome() for visit in left}
    cancels = [(v.cancelled_at, v.job.id) for v in left if v.cancelled_at is not None]
    step = 0
    while left or not loop.idle:
        for visit in [v for v in left if v.at <= step]:
            if isinstance(visit.job, EmbedJob):
                loop.embed(visit.job)
            else:
                submit(loop, visit.job, visit.matcher)
            left.remove(visit)
        for _, name in [c for c in cancels if c[0] == step]:
            loop.cancel(name)
        said = loop.step()
        for update in said.updates:
            _note(outcomes[update.job_id], update)
        for over in said.embed_results:
            outcomes[over.job_id].embedded(over)
        loop.check()
        assert said.stats.ledger.free >= 0, "the ledger is overdrawn"
        step += 1
        assert step < 5000
    return outcomes


def run_one(loop: Loop, one: Job, cancel_after: int | None = None) -> Outcome:
    return run(loop, one, cancel_after=cancel_after)[one.id]


def _note(outcome: Outcome, update: Any) -> None:
    assert outcome.reason == "", "nothing may follow the end"
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


def near_tie(a: Token, b: Token) -> bool:
    """Whether the two runs differ at this step only because their best candidates all but tie."""
    return all(t.top_logprobs[0][1] - t.top_logprobs[1][1] < NEAR for t in (a, b))


def assert_same(a: Outcome, b: Outcome) -> int:
    """Equal tokens and logprobs to 1e-4, up to the first near-tie; how many of those there were."""
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    same = next((n for n, (x, y) in enumerate(pairs) if x.id != y.id), len(pairs))
    _assert_near([x for x, _ in pairs[:same]], [y for _, y in pairs[:same]])
    if same < len(pairs):
        x, y = pairs[same]
        assert near_tie(x, y), f"{x} is not {y}"
        return 1
    assert (len(a.tokens), a.reason) == (len(b.tokens), b.reason)
    return 0


def token_bits(outcome: Outcome) -> list[Any]:
    """Of each token what must be equal where results are equal to the bit."""
    return [(token.id, token.logprob, token.top_logprobs) for token in outcome.tokens]


def _assert_near(a: Sequence[Token], b: Sequence[Token]) -> None:
    """All at once: numpy takes a tenth of a millisecond for the smallest comparison."""
    assert [len(token.top_logprobs) for token in a] == [len(token.top_logprobs) for token in b]
    np.testing.assert_allclose(_logprobs(a), _logprobs(b), atol=NEAR)


def _logprobs(tokens: Sequence[Token]) -> list[float]:
    """Each token's own, then those of the likeliest."""
    told = list[float]()
    for token in tokens:
        assert token.logprob is not None
        told += (token.logprob, *(logprob for _, logprob in token.top_logprobs))
    return told


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """The plainest generation there is: the whole sequence again for every token."""
    known = list(ids)
    for _ in range(count):
        hidden = model(mx.array([known]), model.make_kv())
        known.append(cast(int, mx.argmax(model.logits(hidden[:, -1])[0]).item()))
    return known[len(ids) :]
