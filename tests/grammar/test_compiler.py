"""Answers that follow a grammar: a model with random weights writes valid JSON, also in a batch.

The tokens of the tiny vocabulary are bytes, so the ids are the text.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from app.core.errors import AppError, ErrorKind
from app.core.requests import ChoiceGrammar, Grammar, JsonSchema, Regex
from app.core.thread_pools import CancelToken, WorkCancelled
from app.engine.memory_profile import profile_memory
from app.engine.sampling.sampler import SamplerBatch
from app.grammar import llguidance_backend
from app.grammar.compiler import GrammarCompiler, GrammarError, GrammarTooComplexError, Matcher
from models.base import Model
from models.kv import STEP
from tests import tiny
from tests.engine import hybrid
from tests.engine.harness import (
    Outcome,
    ScheduledJob,
    assert_same,
    grammar_compiler,
    job,
    make_loop,
    run,
    run_one,
    run_schedule,
    tiny_model,
)
from tests.fakes import make_rust_panic
from tests.waiting import LIMIT, wait_until_async

PROMPT = tuple(b"the quick brown fox jumps over the lazy dog")
ENDS = frozenset({tiny.END})
NONE = frozenset[int]()

COLOURS = ("red", "green", "blue", "grey")
SCHEMA = JsonSchema(
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                "colour": {"enum": list(COLOURS)},
                "count": {"type": "integer", "minimum": 1, "maximum": 99999},
                "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                "name": {"type": "string", "maxLength": 8},
            },
            "required": ["colour", "count", "flags", "name"],
            "additionalProperties": False,
        }
    )
)
ANYTHING = JsonSchema(text='{"type": "object"}')

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
# greedy, and each method of the sampler
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.3, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 5},
    {"temperature": 1.3, "seed": 3, "top_p": 0.6},
    {"temperature": 1.3, "seed": 4, "min_p": 0.2, "repetition_penalty": 1.4},
)


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def constrained_job(name: str, grammar: JsonSchema = SCHEMA, **changes: Any) -> Any:
    fields: dict[str, Any] = {"max_tokens": 400, "stop_token_ids": ENDS, "grammar": grammar}
    return job(name, [*PROMPT, *name.encode()], **fields | changes)


def assert_satisfied(outcome: Outcome) -> None:
    """Parses the answer as strict JSON, and checks it against SCHEMA by hand."""
    assert (outcome.reason, outcome.error) == ("stop", None)
    value = json.loads(bytes(outcome.ids))
    assert list(value) == ["colour", "count", "flags", "name"]
    assert value["colour"] in COLOURS
    assert isinstance(value["count"], int)
    assert 1 <= value["count"] <= 99999
    assert len(value["flags"]) <= 3
    assert all(isinstance(flag, bool) for flag in value["flags"])
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8


@pytest.mark.product
@pytest.mark.no_cover
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("stop_token_ids", [ENDS, NONE], ids=["with an end", "without one"])
def test_random_weights_satisfy_a_schema_and_stop(
    model: Model, sampling: dict[str, Any], stop_token_ids: frozenset[int]
) -> None:
    one = constrained_job("it", stop_token_ids=stop_token_ids, **sampling)
    assert_satisfied(run_one(make_loop(model), one))


def test_without_a_grammar_the_same_model_writes_no_json(model: Model) -> None:
    """Otherwise the tests above would prove nothing."""
    plain = run_one(make_loop(model), job("it", PROMPT, max_tokens=40))
    with pytest.raises(ValueError, match=r".*"):
        json.loads(bytes(id for id in plain.ids if id < 256))


@pytest.mark.no_cover
def test_rows_with_and_without_grammars_give_the_same_output_as_alone(
    model: Model, ties: list[int]
) -> None:
    """The rows join and leave at different steps, and some end in the middle of a batch."""
    jobs = [
        job("plain", PROMPT, max_tokens=60, stop_token_ids=NONE, temperature=1.0, seed=5),
        constrained_job("a", temperature=1.2, seed=6, presence_penalty=0.5),
        job("counted", PROMPT, max_tokens=30, stop_token_ids=NONE, frequency_penalty=0.8),
        constrained_job("b", ANYTHING, max_tokens=25, temperature=1.0, seed=7, top_p=0.9),
        constrained_job("c"),
    ]
    loop = make_loop(model, running=4, policy="radix")
    together = run_schedule(loop, [ScheduledJob(job=one, at=3 * i) for i, one in enumerate(jobs)])
    for one in jobs:
        ties.append(assert_same(together[one.id], run_one(make_loop(model), one)))
    assert_satisfied(together["a"])
    assert_satisfied(together["c"])


def test_a_prefill_advances_equally_beside_rows_with_and_without_grammars() -> None:
    """Decoding rows count towards a step, whether they are sampled early or late in it."""
    late = ScheduledJob(job=job("late", bytes(range(100)) * 2, stop_token_ids=NONE), at=12)
    progress = list[list[int]]()
    for grammar in (None, JsonSchema(text='{"type": "array", "minItems": 99}')):
        beside = [job(str(i), PROMPT, max_tokens=90, stop_token_ids=NONE) for i in range(3)]
        scheduled = [ScheduledJob(job=replace(one, grammar=grammar)) for one in beside]
        loop = make_loop(tiny_model(), running=4, policy="slots", chunk=16)
        progress.append(run_schedule(loop, [*scheduled, late])["late"].progress)
    assert progress[0] == progress[1]


@pytest.mark.product
@pytest.mark.no_cover
def test_a_preempted_answer_resumes_in_its_grammar_state(model: Model, ties: list[int]) -> None:
    """Each answer fits at first, but together they outgrow the memory."""
    memory = profile_memory(
        model, budget=0, weights=0, chunk=64, max_batch_size=1, heads=0, context=1024
    )
    items = '"items": {"type": "boolean"}, "minItems": 105, "maxItems": 120'
    many = JsonSchema(text=f'{{"type": "array", {items}}}')
    dense = tuple((space, -100.0) for space in b" \t\n")
    jobs = [
        constrained_job(str(i), many, temperature=1.2, seed=i, max_tokens=900, logit_bias=dense)
        for i in range(3)
    ]
    wide: dict[str, Any] = {"chunk": 64, "context": 1024}
    loop = make_loop(
        model, running=3, policy="radix", budget=2 * memory.kv_footprint(2 * STEP), **wide
    )
    together = run_schedule(loop, [ScheduledJob(job=one) for one in jobs])
    assert loop.stats().preemptions > 0
    for one in jobs:
        assert together[one.id].reason == "stop"
        assert set(json.loads(bytes(together[one.id].ids))) == {True, False}
        ties.append(assert_same(together[one.id], run_one(make_loop(model, **wide), one)))


def test_an_answer_resumes_in_its_grammar_state_after_a_failed_batch(
    monkeypatch: pytest.MonkeyPatch, ties: list[int]
) -> None:
    """One failure is in the forward pass, one in the sampling that waits for earlier tokens."""
    model = tiny_model()
    jobs = [constrained_job(str(i), temperature=1.2, seed=i) for i in range(3)]
    loop = make_loop(model, running=3, policy="radix")
    logits, sample = model.logits, SamplerBatch.sample
    calls = {"logits": 0, "sample": 0}

    def fail_now(what: str, rows: int) -> None:
        calls[what] += rows == 3
        if rows == 3 and calls[what] in (8, 20):
            calls[what] += 1
            raise RuntimeError("planted")

    def failing_logits(hidden: mx.array) -> mx.array:
        fail_now("logits", hidden.shape[0])
        return logits(hidden)

    def failing_sample(rows: SamplerBatch, scores: mx.array, **options: Any) -> Any:
        fail_now("sample", scores.shape[0])
        return sample(rows, scores, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", failing_logits)
        patch.setattr(SamplerBatch, "sample", failing_sample)
        together = run(loop, *jobs)
    assert min(calls.values()) > 8
    for one in jobs:
        assert_satisfied(together[one.id])
        ties.append(assert_same(together[one.id], run_one(make_loop(model), one)))


def test_a_context_shift_does_not_confuse_a_grammar() -> None:
    """The grammar keeps the tokens that the context shift discards."""
    one = replace(constrained_job("it", temperature=1.2, seed=3), num_keep=4)
    outcome = run_one(make_loop(tiny_model(), policy="slots", context=64, shift=True), one)
    assert len(PROMPT) + len(outcome.ids) > 64
    assert_satisfied(outcome)


def test_a_failing_matcher_ends_only_its_own_request(model: Model, ties: list[int]) -> None:
    """The matcher fails in the middle of the answer, as with a grammar that is too complex."""
    bad = constrained_job("bad")
    tokenizer = LLTokenizer(tiny.tokenizer().to_str(), n_vocab=tiny.VOCAB, eos_token=[tiny.END])
    limits = LLParserLimits(max_lexer_states=50, verbose_errors=False)
    text = LLMatcher.grammar_from_json_schema(SCHEMA.text, overrides={"whitespace_flexible": False})
    inner = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    fragile = Matcher(inner, stop_ids=ENDS, eos_ids=ENDS)
    beside = [constrained_job("good"), job("plain", PROMPT, max_tokens=40, stop_token_ids=NONE)]
    loop = make_loop(model, running=3, policy="radix")
    outcomes = run_schedule(
        loop, [*(ScheduledJob(job=one) for one in beside), ScheduledJob(job=bad, matcher=fragile)]
    )
    assert outcomes["bad"].reason == "error"
    assert outcomes["bad"].ids
    assert "too many states" in (outcomes["bad"].error or "")
    for one in beside:
        ties.append(assert_same(outcomes[one.id], run_one(make_loop(model), one)))
    assert loop.stats().failures == 1


def test_a_model_that_masks_every_allowed_token_ends_only_that_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    logits, brace = model.logits, mx.arange(tiny.VOCAB) == ord("{")
    monkeypatch.setattr(model, "logits", lambda h: mx.where(brace, -mx.inf, logits(h)))
    loop = make_loop(model, running=2, policy="radix")
    outcomes = run(loop, constrained_job("bad"), job("plain", PROMPT, stop_token_ids=NONE))
    assert (outcomes["bad"].reason, outcomes["bad"].ids) == ("error", [])
    assert "every token that the grammar allows" in (outcomes["bad"].error or "")
    assert outcomes["plain"].reason == "length"


def test_a_logit_bias_cannot_allow_a_forbidden_token() -> None:
    biased = constrained_job("it", logit_bias=((ord("!"), 100.0), (tiny.END, 100.0)))
    assert_satisfied(run_one(make_loop(tiny_model()), biased))


def test_an_answer_that_is_complete_at_max_tokens_has_stopped() -> None:
    yes = JsonSchema(text='{"const": true}')
    for max_tokens, reason in ((3, "length"), (4, "stop"), (5, "stop")):
        outcome = run_one(
            make_loop(tiny_model()), constrained_job("it", yes, max_tokens=max_tokens)
        )
        assert (bytes(outcome.ids), outcome.reason) == (b"true"[:max_tokens], reason)


def test_stop_tokens_are_allowed_only_where_the_answer_may_end() -> None:
    number = JsonSchema(text='{"type": "integer"}')
    for stop_ids in (NONE, ENDS, frozenset({tiny.BOS, tiny.END})):
        matcher = grammar_compiler().compile(number, stop_ids)
        digits = {*b"0123456789"}
        assert ids_of(matcher) == digits | {ord("-")}
        matcher.accept(ord("7"))
        assert ids_of(matcher) == digits | stop_ids
        assert not matcher.done


def test_white_space_is_bounded() -> None:
    """Otherwise a confused model writes white space forever."""
    matcher = grammar_compiler().compile(ANYTHING, ENDS)
    matcher.accept(ord("{"))
    assert ids_of(matcher) == {*b'"}'}
    for token in b'"a": ':
        matcher.accept(token)
    assert ids_of(matcher) == {*b'"[{-0123456789tfn'}


def test_padding_ids_of_the_model_are_never_allowed(tmp_path: Path) -> None:
    """Output layers are padded beyond the tokenizer."""
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    matcher = GrammarCompiler(tmp_path / "tokenizer.json", vocab=320).compile(
        JsonSchema(text='{"type": "string"}'), ENDS
    )
    matcher.accept(ord('"'))
    assert len(matcher.bitmask) * 8 >= 320
    assert max(ids_of(matcher)) < tiny.BOS


def test_a_forbidden_id_is_a_permanent_error() -> None:
    matcher = grammar_compiler().compile(ANYTHING, ENDS)
    for token in b"x{":
        with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
            matcher.accept(token)


def test_compiled_grammars_and_errors_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matcher has its own state from the start; errors are cached too."""
    compiled = list[Grammar]()
    monkeypatch.setattr("app.grammar.compiler.compile_grammar", record_compilations(compiled))
    compiler = new_compiler()
    one, other = (compiler.compile(SCHEMA, ENDS) for _ in range(2))
    one.accept(ord("{"))
    assert ids_of(other) == {ord("{")}
    other.accept(ord("{"))
    assert ids_of(other) == ids_of(one)
    for _ in range(2):
        with pytest.raises(AppError, match="not is not supported"):
            compiler.compile(JsonSchema(text='{"not": {}}'), ENDS)
    assert ids_of(compiler.compile(SCHEMA, NONE)) == {ord("{")}, "with other stop ids"
    assert len(compiled) == 2


def test_a_grammar_whose_lexer_has_no_states_left_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of a compiled grammar share its lexer, so all later answers failed too."""
    monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", -50)
    many_states = Regex(pattern="[ab]*a[ab]{14}" + "c{0,3}" * 10)
    compiler = new_compiler()
    for _ in range(2):
        matcher = compiler.compile(many_states, ENDS)
        accept_all(matcher, b"abbabaab")
        with pytest.raises(GrammarTooComplexError, match="too many states: simplify"):
            accept_all(matcher, b"abbbabaaaabaabbabbbaababab" * 9)


def test_the_least_recently_used_grammar_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[Grammar]()
    monkeypatch.setattr("app.grammar.compiler.compile_grammar", record_compilations(compiled))
    compiler = new_compiler()
    choices = [ChoiceGrammar(options=(str(i),)) for i in range(40)]
    for choice in (choices[0], *choices[1:32], choices[0], choices[32], choices[0], choices[1]):
        compiler.compile(choice, ENDS)
    assert compiled == [*choices[:33], choices[1]]


def test_concurrent_requests_wait_for_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the choices of one request."""
    compiled = list[Grammar]()
    monkeypatch.setattr("app.grammar.compiler.compile_grammar", record_compilations(compiled))
    compiler = new_compiler()
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(lambda _: compiler.compile(SCHEMA, ENDS), range(40)))
    assert compiled == [SCHEMA]
    for matcher in matchers:
        for token in b'{"colour":"':
            matcher.accept(token)
        assert ids_of(matcher) == {*b"rgb"}


def test_an_endless_compilation_does_not_block_known_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with a known grammar are served; others get a busy error."""
    blocked, release = (
        [ChoiceGrammar(options=(name,), param="guided_choice") for name in "ab"],
        Event(),
    )

    def compile_slowly(grammar: Grammar, tokenizer: LLTokenizer, token: CancelToken) -> LLMatcher:
        if grammar in blocked:
            assert release.wait(30)
        return compile_grammar(grammar, tokenizer, token)

    compile_grammar = llguidance_backend.compile_grammar
    monkeypatch.setattr("app.grammar.compiler.compile_grammar", compile_slowly)
    compiler = new_compiler()
    compiler.compile(SCHEMA, ENDS)
    monkeypatch.setattr("app.grammar.compiler._COMPILE_TIMEOUT", 0.2)
    for grammar in (*blocked, blocked[0]):
        with pytest.raises(AppError, match="simplify it") as caught:
            compiler.compile(grammar, ENDS)
        assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "guided_choice")
    with pytest.raises(AppError, match="busy compiling other grammars; retry later") as caught:
        compiler.compile(ANYTHING, ENDS)
    assert caught.value.kind is ErrorKind.BUSY
    assert ids_of(compiler.compile(SCHEMA, ENDS)) == {ord("{")}
    release.set()
    monkeypatch.setattr("app.grammar.compiler._COMPILE_TIMEOUT", 10.0)
    for grammar in (*blocked, ANYTHING):
        compiler.compile(grammar, ENDS)


class BlockedCompiler:
    """Compiles grammars once `gate` is set. started, cancelled: grammars in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[Grammar] = []
        self.cancelled: list[Grammar] = []
        self.gate = Event()
        self._real = llguidance_backend.compile_grammar
        monkeypatch.setattr("app.grammar.compiler.compile_grammar", self._compile)

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer, token: CancelToken) -> LLMatcher:
        self.started.append(grammar)
        try:
            while not self.gate.wait(0.002):
                token.check()
            return self._real(grammar, tokenizer, token)
        except WorkCancelled:
            self.cancelled.append(grammar)
            raise


def choice(name: str) -> ChoiceGrammar:
    return ChoiceGrammar(options=(name,))


async def wait_for_length(grammars: Sequence[Grammar], length: int) -> None:
    await wait_until_async(lambda: len(grammars) >= length)


async def wait_for_compilations(blocked: BlockedCompiler, count: int) -> None:
    await wait_for_length(blocked.started, count)


def test_a_known_grammar_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After twenty schemas of disconnected clients, `yes|no` waited 27 s."""

    async def run() -> None:
        compiler = new_compiler()
        await compiler.compile_async(SCHEMA, ENDS)
        blocked = BlockedCompiler(monkeypatch)
        others = [
            asyncio.create_task(compiler.compile_async(choice(f"{n}"), ENDS)) for n in range(20)
        ]
        await wait_for_compilations(blocked, 2)
        # it would wait for the gate
        async with asyncio.timeout(LIMIT):
            assert ids_of(await compiler.compile_async(SCHEMA, ENDS)) == {ord("{")}
        blocked.gate.set()
        await asyncio.gather(*others)

    asyncio.run(run())


def test_compilations_are_cancelled_when_no_request_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        compiler, blocked = new_compiler(), BlockedCompiler(monkeypatch)
        tasks = [
            asyncio.create_task(compiler.compile_async(choice(f"{n}"), ENDS)) for n in range(20)
        ]
        await wait_for_compilations(blocked, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        late = asyncio.create_task(compiler.compile_async(choice("late"), ENDS))
        await wait_for_compilations(blocked, 3)
        # a compilation that has not noticed its cancellation must not pass the gate
        await wait_for_length(blocked.cancelled, 2)
        blocked.gate.set()
        assert ids_of(await late) == {ord("l")}
        # two threads start at the same time, in any order
        *first, last = (one.options for one in blocked.started if isinstance(one, ChoiceGrammar))
        assert (sorted(first), last) == ([("0",), ("1",)], ("late",))
        assert sorted(
            one.options for one in blocked.cancelled if isinstance(one, ChoiceGrammar)
        ) == [
            ("0",),
            ("1",),
        ]

    asyncio.run(run())


def test_a_compilation_continues_while_one_request_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        compiler, blocked = new_compiler(), BlockedCompiler(monkeypatch)
        first, second = (
            asyncio.create_task(compiler.compile_async(SCHEMA, ENDS)) for _ in range(2)
        )
        await wait_for_compilations(blocked, 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        blocked.gate.set()
        assert ids_of(await second) == {ord("{")}
        assert blocked.started == [SCHEMA]

    asyncio.run(run())


def test_callers_take_turns_in_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        compiler, blocked = new_compiler(), BlockedCompiler(monkeypatch)
        tasks = [
            asyncio.create_task(compiler.compile_async(choice(f"anna {n}"), ENDS, "anna"))
            for n in range(9)
        ]
        await wait_for_compilations(blocked, 2)
        tasks.append(asyncio.create_task(compiler.compile_async(choice("ben"), ENDS, "ben")))
        await asyncio.sleep(0)
        blocked.gate.set()
        await asyncio.gather(*tasks)
        assert blocked.started[2] == choice("ben")

    asyncio.run(run())


def test_stop_tokens_unknown_to_the_tokenizer_are_allowed_where_the_answer_may_end() -> None:
    """The tokenizer is loaded once for all jobs, with any stop ids."""
    compiler = GrammarCompiler(grammar_compiler().tokenizer, vocab=tiny.VOCAB, eos_ids=[tiny.END])
    number = JsonSchema(text='{"type": "integer"}')
    for stop_ids in (NONE, ENDS, frozenset({tiny.BOS}), frozenset({tiny.BOS, tiny.END})):
        matcher = compiler.compile(number, stop_ids)
        digits = {*b"0123456789"}
        matcher.accept(ord("7"))
        assert ids_of(matcher) == digits | stop_ids
        for end in stop_ids:
            matcher = compiler.compile(number, stop_ids)
            matcher.accept(ord("7"))
            matcher.accept(end)
            assert matcher.done


def test_an_unusable_tokenizer_is_a_model_files_error(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("missing.json", "broken.json"):
        with pytest.raises(AppError, match=name) as caught:
            GrammarCompiler(tmp_path / name, vocab=tiny.VOCAB).compile(ANYTHING, ENDS)
        assert caught.value.kind is ErrorKind.MODEL_FILES


def test_a_repaired_tokenizer_serves_the_next_request(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    compiler = GrammarCompiler(file, vocab=tiny.VOCAB)
    with pytest.raises(AppError, match=r"tokenizer\.json"):
        compiler.compile(ANYTHING, ENDS)
    tiny.tokenizer().save(str(file))
    assert ids_of(compiler.compile(ANYTHING, ENDS)) == {ord("{")}


class Panicking:
    """A matcher or a tokenizer of llguidance that panics in every call. The real one catches the
    panics that it expects, so a test cannot cause one."""

    def __init__(self, *_: object, **__: object) -> None:
        self.panics = False

    def __getattr__(self, name: str) -> Any:
        if self.panics:
            raise make_rust_panic()
        return lambda *_: {"compute_bitmask": b"\xff", "is_error": False}.get(name)


def test_a_matcher_that_panics_ends_its_own_request() -> None:
    """A PanicException is not an Exception: it ended the engine's thread and all its requests."""
    inner: Any = Panicking()
    matcher = Matcher(inner, stop_ids=NONE, eos_ids=NONE)
    matcher.accept(1)
    inner.panics = True
    with pytest.raises(GrammarError, match="it is too large"):
        matcher.accept(1)
    with pytest.raises(GrammarError, match="it is too large"):
        Matcher(inner, stop_ids=NONE, eos_ids=NONE)


def test_a_grammar_that_makes_the_library_panic_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def panics(*_: object, **__: object) -> Any:
        raise make_rust_panic()

    monkeypatch.setattr("app.grammar.llguidance_backend.LLMatcher", panics)
    with pytest.raises(AppError, match="invalid choice: it is too large") as caught:
        new_compiler().compile(ChoiceGrammar(options=("a",), param="guided_choice"), ENDS)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "guided_choice")
    monkeypatch.setattr("app.grammar.compiler.LLTokenizer", panics)
    with pytest.raises(
        AppError, match=r"structured output does not support this tokenizer"
    ) as caught:
        new_compiler().compile(ANYTHING, ENDS)
    assert caught.value.kind is ErrorKind.MODEL_FILES


def new_compiler() -> GrammarCompiler:
    """A compiler for the tiny vocabulary, with an empty cache."""
    return GrammarCompiler(grammar_compiler().tokenizer, vocab=tiny.VOCAB)


def accept_all(matcher: Matcher, tokens: bytes) -> None:
    for token in tokens:
        matcher.accept(token)


def record_compilations(
    compiled: list[Grammar],
) -> Callable[[Grammar, LLTokenizer, CancelToken], LLMatcher]:
    """A compile function that appends each grammar to `compiled`."""

    def record(grammar: Grammar, tokenizer: LLTokenizer, token: CancelToken) -> LLMatcher:
        compiled.append(grammar)
        return compile_grammar(grammar, tokenizer, token)

    compile_grammar = llguidance_backend.compile_grammar
    return record


def ids_of(matcher: Matcher) -> set[int]:
    return {id for id in range(8 * len(matcher.bitmask)) if matcher.bitmask[id // 8] >> id % 8 & 1}
