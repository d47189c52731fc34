"""One request's life over a scripted runner: what goes down, what comes up, how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import store
from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    PrefillProgress,
    TextDelta,
    Timings,
    Usage,
)
from app.core.jobs import (
    CacheMiss,
    Capacity,
    Ended,
    EngineStats,
    Job,
    JobUpdate,
    Prefilled,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import Engine, RunnerStatus
from app.core.requests import Conversation, GenerateRequest, JsonSchema, Message, PromptBatch, Regex
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.grammar import llguidance_backend
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving.generation import Generation
from app.serving.prompt_jobs import DEFAULT_NUM_KEEP
from tests import tiny


class FakeRunner:
    """Answers every job with the same text, a byte a token, and notes what it was asked."""

    def __init__(
        self,
        text: str | bytes,
        *,
        reason: Any = "stop",
        logprobs: bool = False,
        capacity: Capacity | None = None,
        miss: CacheMiss | None = None,
    ) -> None:
        self.capacity = capacity
        self.miss = miss
        self.bytes = text.encode() if isinstance(text, str) else text
        self.reason = reason
        self.logprobs = logprobs
        self.jobs: list[Job] = []
        self.kept: int | None = None
        self.left = 0

    def updates(self, job: Job) -> Sequence[JobUpdate]:
        tokens = [
            Token(
                job_id=job.id,
                id=id,
                timestamp_ns=2000 + 10 * i,
                logprob=-0.5 if self.logprobs else None,
                top_logprobs=((id, -0.5), (65, -1.5)) if self.logprobs else (),
            )
            for i, id in enumerate(self.bytes)
        ]
        error = "planted" if self.reason == "error" else None
        return [
            Started(job_id=job.id, cached_tokens=3, timestamp_ns=1000, miss=self.miss),
            Prefilled(job_id=job.id, computed_tokens=len(job.prompt_token_ids)),
            *tokens,
            Ended(job_id=job.id, reason=self.reason, timestamp_ns=5000, error=error),
        ]

    # as a submission
    started_ns: int | None = None
    ended_ns: int | None = None

    @contextmanager
    def reserve(self, count: int = 1) -> Iterator["FakeRunner"]:
        self.reserved = count
        yield self

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncIterator["FakeRunner"]:
        self.jobs.append(job)
        try:
            yield self
        finally:
            self.left += 1

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        for update in self.updates(self.jobs[-1]):
            yield update

    def limit_cached_tokens(self, tokens: int) -> None:
        self.kept = tokens

    async def start(self, files: ModelFiles) -> None: ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("nothing is embedded here")

    async def stop(self) -> None: ...

    def status(self) -> RunnerStatus:
        return RunnerStatus(
            state="ready", progress=100, stats=EngineStats(), capacity=self.capacity
        )


PLAIN = Settings()
SHIFTING = Settings(cache="slots", context_shift=True, context=64)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return store.resolve(str(tiny_model))


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "tiny", "prompt": "hello", **changes})


def events(
    files: ModelFiles, runner: Engine, settings: Settings = PLAIN, **changes: Any
) -> list[Event]:
    async def collect() -> list[Event]:
        async with Generation(files, runner, settings).open(request(**changes)) as stream:
            return [event async for event in stream]

    return asyncio.run(collect())


def text_of(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, TextDelta))


def refusal(
    files: ModelFiles,
    settings: Settings = PLAIN,
    capacity: Capacity | None = None,
    **changes: Any,
) -> AppError:
    runner = FakeRunner("x", capacity=capacity)
    with pytest.raises(AppError) as caught:
        events(files, runner, settings, **changes)
    assert not runner.jobs, "a refused request must not reach the runner"
    return caught.value


def test_a_grammar_reaches_the_runner_as_it_is(files: ModelFiles) -> None:
    grammar = JsonSchema(text='{"type":"integer"}')
    runner = FakeRunner("7")
    events(files, runner, grammar=grammar)
    assert runner.jobs[0].grammar == grammar


def test_progress_says_of_which_prompt(files: ModelFiles) -> None:
    said = events(files, FakeRunner("hi"), prompt=PromptBatch(prompts=("hello", "good day")), n=2)
    totals = {
        (event.prompt_index, event.total_tokens)
        for event in said
        if isinstance(event, PrefillProgress)
    }
    assert {prompt for prompt, _ in totals} == {0, 1}
    assert len(totals) == 2


def test_events_come_in_their_order(files: ModelFiles) -> None:
    runner = FakeRunner("hi")
    assert events(files, runner) == [
        PrefillProgress(computed_tokens=3, total_tokens=5),
        PrefillProgress(computed_tokens=5, total_tokens=5),
        TextDelta(text="h"),
        TextDelta(text="i"),
        Finish(
            reason="stop",
            usage=Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3),
            timings=Timings(
                prefill_ns=1000, decode_ns=3000, total_ns=_any(int), inter_token_ns=(10,)
            ),
        ),
    ]
    assert runner.left == 1


def _any(kind: type) -> Any:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, kind)

        __hash__ = None  # pyright: ignore[reportAssignmentType]

    return Any_()


def test_characters_are_never_cut(files: ModelFiles) -> None:
    found = events(files, FakeRunner("aé🎉z"))
    assert [e.text for e in found if isinstance(e, TextDelta)] == ["a", "é", "🎉", "z"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_engines_reason_is_told(files: ModelFiles, reason: str) -> None:
    finish = events(files, FakeRunner("x", reason=reason))[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == reason


@pytest.mark.parametrize(
    ("said", "stops", "shown", "kept", "read"),
    [
        ("one two three", ("two",), "one ", 4, 7),
        ("one two three", ("e t", "zzz"), "on", 2, 5),
        ("aé🎉", ("🎉",), "aé", 3, 7),
        ("abc", ("b", "ab"), "", 0, 2),
    ],
)
def test_a_stop_string_ends_the_answer_and_the_cache_holds_what_was_seen(
    files: ModelFiles, said: str, stops: tuple[str, ...], shown: str, kept: int, read: int
) -> None:
    runner = FakeRunner(said, reason="length")
    found = events(files, runner, stop=stops)
    finish = found[-1]
    assert isinstance(finish, Finish)
    assert (text_of(found), finish.reason) == (shown, "stop")
    assert (runner.kept, finish.usage.completion_tokens, runner.left) == (kept, read, 1)


def test_what_was_held_back_for_a_stop_string_is_given_out_at_the_end(files: ModelFiles) -> None:
    found = events(files, FakeRunner("one tw", reason="length"), stop=("two",))
    assert text_of(found) == "one tw"
    assert isinstance(found[-1], Finish)
    assert found[-1].reason == "length"


def test_half_a_character_at_the_end_is_told_to_be_broken(files: ModelFiles) -> None:
    assert text_of(events(files, FakeRunner(b"a\xf0\x9f"))) == "a\ufffd"


@given(
    text=st.text(st.sampled_from("abé🎉"), max_size=12),
    stops=st.lists(st.text(st.sampled_from("abé🎉"), min_size=1, max_size=3), max_size=3),
)
def test_logprobs_belong_to_the_tokens_in_sight(
    files: ModelFiles, text: str, stops: list[str]
) -> None:
    runner = FakeRunner(text, logprobs=True)
    found = events(files, runner, stop=tuple(stops), top_logprobs=2)
    entries = [entry for e in found if isinstance(e, TextDelta) for entry in e.logprobs]
    assert b"".join(entry.token_bytes for entry in entries) == text_of(found).encode()
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]
        assert entry.top_logprobs[1].text == "A"


def test_an_engine_error_is_raised_to_whoever_listens(files: ModelFiles) -> None:
    runner = FakeRunner("half an ans", reason="error")
    with pytest.raises(AppError, match="planted") as caught:
        events(files, runner)
    assert (caught.value.kind, runner.left) == (ErrorKind.ENGINE, 1)


def test_a_grammar_that_becomes_too_complex_is_an_error_of_the_request(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", -50)
    many_states = Regex(pattern="[ab]*a[ab]{14}" + "c{0,3}" * 10, param="guided_regex")

    async def answer() -> None:
        runner = ThreadRunner(PLAIN)
        await runner.start(files)
        try:
            asked = request(grammar=many_states, max_tokens=200, sampling={"seed": 3})
            async with Generation(files, Admission(runner, 4), PLAIN).open(asked) as stream:
                async for _ in stream:
                    pass
        finally:
            await runner.stop()

    with pytest.raises(AppError, match="too many states: simplify") as caught:
        asyncio.run(answer())
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "guided_regex")


def test_leaving_early_leaves_the_runner(files: ModelFiles) -> None:
    runner = FakeRunner("hello")

    async def leave() -> None:
        async with Generation(files, runner, PLAIN).open(request()) as stream:
            await anext(stream)

    asyncio.run(leave())
    assert (runner.left, runner.kept) == (1, None)


def test_a_job_carries_what_the_request_asked(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    events(
        files,
        runner,
        prompt=(1, 2, 3),
        sampling={"temperature": 0.5, "logit_bias": ((7, 1.0),)},
        max_tokens=9,
        top_logprobs=4,
        cache_prompt=False,
    )
    job = runner.jobs[0]
    assert job.prompt_token_ids == (1, 2, 3)
    assert job.sampling == SamplingParams(temperature=0.5, logit_bias=((7, 1.0),))
    assert (job.max_tokens, job.top_logprobs, job.cache_prompt) == (9, 4, False)
    assert job.stop_token_ids == {tiny.END}


def test_conversations_go_through_the_models_template(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    said = Conversation(messages=(Message(role="user", content="hi"),))
    events(files, runner, prompt=said)
    assert bytes(runner.jobs[0].prompt_token_ids) == b"user: hi\nassistant: "


@pytest.mark.parametrize(("asked", "granted"), [(None, 4091), (5000, 4091), (10, 10)])
def test_answers_end_where_the_context_ends(
    files: ModelFiles, asked: int | None, granted: int
) -> None:
    runner = FakeRunner("x")
    events(files, runner, max_tokens=asked)
    assert runner.jobs[0].max_tokens == granted


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(files: ModelFiles) -> None:
    error = refusal(files, prompt="x" * 4096)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
    assert "4096 tokens, but the model's context is 4096" in error.message
    runner = FakeRunner("x")
    events(files, runner, prompt="x" * 4095)
    assert runner.jobs[0].max_tokens == 1


def test_a_prompt_far_beyond_the_context_is_not_read_to_its_end(files: ModelFiles) -> None:
    error = refusal(files, prompt="x" * 5_000_000)
    assert error.kind is ErrorKind.CONTEXT_LENGTH
    assert "more than 32768 tokens, but the model's context is 4096" in error.message


@pytest.mark.parametrize(
    ("changes", "kind", "param"),
    [
        ({"prompt": ""}, ErrorKind.INVALID, "prompt"),
        ({"prompt": (1, tiny.VOCAB)}, ErrorKind.INVALID, "prompt"),
        ({"prompt": (-1,)}, ErrorKind.INVALID, "prompt"),
        ({"sampling": {"logit_bias": ((tiny.VOCAB, 1.0),)}}, ErrorKind.INVALID, "logit_bias"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    files: ModelFiles, changes: dict[str, Any], kind: ErrorKind, param: str
) -> None:
    error = refusal(files, **changes)
    assert (error.kind, error.param) == (kind, param)


def test_the_models_defaults_stand_between_ours_and_the_request(
    tmp_path: Path, tiny_model: Path
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    files, runner = store.resolve(str(tmp_path)), FakeRunner("x")
    events(files, runner, model=files.name, sampling={"top_p": 1.0})
    assert runner.jobs[0].sampling == SamplingParams(temperature=0.6, top_k=20, top_p=1.0)


def test_a_broken_recommendation_is_told_before_anything_is_served(files: ModelFiles) -> None:
    broken = replace(files, generation_config={"temperature": "hot"})
    with pytest.raises(AppError, match=r"generation_config\.json of .*: temperature is 'hot'"):
        Generation(broken, FakeRunner("x"), PLAIN)


@pytest.mark.parametrize(("asked", "granted"), [(None, 9), (20, 20), (3, 3)])
def test_the_models_own_length_of_an_answer_is_for_whoever_names_none(
    files: ModelFiles, asked: int | None, granted: int
) -> None:
    brief, runner = replace(files, generation_config={"max_new_tokens": 9}), FakeRunner("x")
    events(brief, runner, max_tokens=asked)
    events(brief, runner, SHIFTING, max_tokens=asked)
    assert [job.max_tokens for job in runner.jobs] == [granted, granted]


def test_the_models_stop_strings_end_an_answer_beside_the_requests(files: ModelFiles) -> None:
    ending = replace(files, generation_config={"stop_strings": ["two", "</s>", "<s>"]})
    runner = FakeRunner("one two three")
    assert text_of(events(ending, runner)) == "one "
    assert text_of(events(ending, runner, stop=("e",))) == "on"
    assert text_of(events(ending, runner, stop=("three",))) == "one "
    # a special token is no text that could be found
    assert runner.jobs[0].stop_token_ids == {tiny.BOS, tiny.END}


def said(*roles: str) -> Conversation:
    return Conversation(messages=tuple(Message(role=role, content="hi") for role in roles))


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (("user",), b"system: Be kind.\nuser: hi\n"),
        (("system", "user"), b"system: hi\nuser: hi\n"),
        (("user", "system"), b"user: hi\nsystem: hi\n"),
        (("developer", "user"), b"system: hi\nuser: hi\n"),
    ],
)
def test_the_models_system_prompt_is_for_conversations_without_one(
    files: ModelFiles, roles: tuple[str, ...], prompt: bytes
) -> None:
    told, runner = replace(files, system_prompt="Be kind."), FakeRunner("x")
    events(told, runner, prompt=said(*roles))
    assert bytes(runner.jobs[0].prompt_token_ids) == prompt + b"assistant: "
    events(told, runner, prompt="hi")
    assert bytes(runner.jobs[1].prompt_token_ids) == b"hi"


def test_the_context_that_the_makers_want_is_promised_until_the_model_is_loaded(
    files: ModelFiles,
) -> None:
    short = replace(files, recommended_context=64)
    assert Generation(short, FakeRunner("x"), PLAIN).context_length == 64
    longer = Generation(short, FakeRunner("x"), Settings(context=128))
    assert longer.context_length == 128
    message = refusal(short, prompt="x" * 64).message
    assert "the server's context is 64 tokens" in message
    assert "--context" in message


class TestIdsThatOnlyOneSideHas:
    """A model's rows are rounded up; a tokenizer may have been given more tokens."""

    def test_ids_that_are_no_token_are_never_favoured(self, files: ModelFiles) -> None:
        padded = replace(files, config={**files.config, "vocab_size": 320})
        bias = {"logit_bias": ((tiny.VOCAB, 1.0),)}
        error = refusal(padded, sampling=bias)
        assert (error.kind, error.param) == (ErrorKind.INVALID, "logit_bias")
        assert f"whose ids are 0 to {tiny.VOCAB - 1}" in error.message

    def test_they_may_be_read(self, files: ModelFiles) -> None:
        """They have rows, and it is the client that sent them."""
        padded = replace(files, config={**files.config, "vocab_size": 320})
        runner = FakeRunner("x")
        events(padded, runner, prompt=(1, 319))
        assert runner.jobs[0].prompt_token_ids == (1, 319)
        assert refusal(padded, prompt=(1, 320)).kind is ErrorKind.INVALID

    def test_tokens_that_the_model_has_no_rows_for_are_refused(self, files: ModelFiles) -> None:
        small = replace(files, config={**files.config, "vocab_size": tiny.END})
        events(small, FakeRunner("x"), prompt="hello<s>")
        error = refusal(small, prompt="hello</s>")
        assert (error.kind, error.param) == (ErrorKind.INVALID, "prompt")
        assert "the prompt contains '</s>', a token that the tokenizer has" in error.message
        assert refusal(small, prompt=(tiny.END,)).kind is ErrorKind.INVALID

    def test_an_end_that_is_no_token_is_left_out(self, files: ModelFiles) -> None:
        runner = FakeRunner("x")
        events(replace(files, config={**files.config, "eos_token_id": [tiny.END, 999]}), runner)
        assert runner.jobs[0].stop_token_ids == {tiny.END}


def run(files: ModelFiles, use: Callable[[Generation], Any]) -> Any:
    async def body() -> Any:
        return await use(Generation(files, FakeRunner("x"), PLAIN))

    return asyncio.run(body())


def test_text_becomes_ids_and_text_again(files: ModelFiles) -> None:
    assert run(files, lambda g: g.tokenize("hé")) == list("hé".encode())
    assert run(files, lambda g: g.tokenize("")) == []
    assert run(files, lambda g: g.detokenize([104, tiny.END])) == "h</s>"
    with pytest.raises(AppError, match="not a token"):
        run(files, lambda g: g.detokenize([9999]))


def test_special_tokens_are_added_or_not(files: ModelFiles) -> None:
    begun = replace(files, tokenizer_config={**files.tokenizer_config, "add_bos_token": True})
    assert run(begun, lambda g: g.tokenize("h")) == [tiny.BOS, 104]
    assert run(begun, lambda g: g.tokenize("h", add_special_tokens=False)) == [104]
    assert run(begun, lambda g: g.tokenize("</s>", add_special_tokens=False)) == [tiny.END]


def test_a_conversations_prompt_has_the_ids_that_are_evaluated(files: ModelFiles) -> None:
    runner, messages = FakeRunner("x"), (Message(role="user", content="hé"),)
    events(files, runner, prompt=Conversation(messages=messages))
    request = GenerateRequest(model=files.name, prompt=Conversation(messages=messages))
    assert run(files, lambda g: g.tokenize_chat(request)) == [*runner.jobs[0].prompt_token_ids]
    open_ended = replace(request, chat_template_kwargs={"add_generation_prompt": False})
    found = run(files, lambda g: g.tokenize_chat(open_ended))
    assert bytes(found).decode() == "user: hé\n"


def test_a_conversation_longer_than_the_context_is_counted_too(files: ModelFiles) -> None:
    long = Conversation(messages=(Message(role="user", content="x" * 9000),))
    request = GenerateRequest(model=files.name, prompt=long)
    assert (
        len(run(files, lambda g: g.tokenize_chat(request)))
        > 9000
        > tiny.CONFIG["max_position_embeddings"]
    )


def test_tokens_have_bytes(files: ModelFiles) -> None:
    ids = [104, 195, tiny.END, 9999]
    assert run(files, lambda g: g.get_token_bytes(ids)) == [b"h", b"\xc3", b"</s>", b""]


def test_the_tokenizer_is_described_with_the_context_that_is_served(files: ModelFiles) -> None:
    found = run(files, lambda g: g.get_tokenizer_info())
    assert (found["eos_token"], found["model_max_length"]) == ("</s>", 4096)
    assert found["chat_template"] == tiny.CHAT_TEMPLATE


def capacity(context: int, **changes: Any) -> Capacity:
    """An engine in which a position takes one KiB."""
    given: dict[str, Any] = {
        "parallel": 2,
        "context_length": context,
        "kv_budget": 1 << 30,
        "kv_bytes_per_sequence": context << 10,
    }
    return Capacity(**{**given, **changes})


def test_before_the_model_is_loaded_the_asked_context_counts(files: ModelFiles) -> None:
    generation = Generation(files, FakeRunner("x"), Settings(context=100))
    assert generation.context_length == 100
    error = refusal(files, Settings(context=100), prompt="x" * 100)
    assert "100 tokens, but the server's context is 100 tokens" in error.message
    assert "the model's own is 4096" in error.message
    assert "--context" in error.message


def test_a_context_beyond_the_models_own_does_not_stretch_it(files: ModelFiles) -> None:
    generation = Generation(files, FakeRunner("x"), Settings(context=9999))
    assert generation.context_length == 4096


def test_what_the_engine_can_do_is_what_is_promised_and_granted(files: ModelFiles) -> None:
    runner = FakeRunner("x", capacity=capacity(50))
    assert Generation(files, runner, PLAIN).context_length == 50
    events(files, runner, prompt="x" * 20)
    events(files, runner, prompt="x" * 20, max_tokens=1000)
    assert [job.max_tokens for job in runner.jobs] == [30, 30]


def test_a_prompt_that_never_fits_memory_is_refused_with_both_numbers(files: ModelFiles) -> None:
    scarce = capacity(2048, limited_by_memory=True)
    error = refusal(files, capacity=scarce, prompt="x" * 3071)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
    assert "has 3071 tokens, but only 2048 tokens fit in memory" in error.message
    assert "about 3.0 MiB" in error.message
    assert "a request can have 2.0 MiB" in error.message
    assert "--memory" in error.message


@pytest.mark.parametrize(("asked", "granted"), [(None, 640), (7, 7), (10**12, 10**12)])
def test_an_answer_may_outgrow_a_context_that_shifts(
    files: ModelFiles, asked: int | None, granted: int
) -> None:
    runner = FakeRunner("x")
    events(files, runner, SHIFTING, max_tokens=asked)
    assert runner.jobs[0].max_tokens == granted


def test_a_prompt_beyond_a_context_that_shifts_loses_its_middle(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    text = "abcdefghij" * 20
    events(files, runner, SHIFTING, prompt=tuple(range(200)), num_keep=10)
    assert runner.jobs[0].prompt_token_ids == (*range(10), *range(200 - 53, 200))
    assert (len(runner.jobs[0].prompt_token_ids), runner.jobs[0].num_keep) == (63, 10)
    events(files, runner, SHIFTING, prompt=text, num_keep=0)
    assert bytes(runner.jobs[1].prompt_token_ids).decode() == text[-63:]


def test_the_end_of_a_very_long_prompt_is_read_where_contexts_shift(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    events(files, runner, SHIFTING, prompt="x" * 5000 + "the end")
    assert bytes(runner.jobs[0].prompt_token_ids).endswith(b"xthe end")


@pytest.mark.parametrize(
    ("prompt", "num_keep", "kept"),
    [
        ((1, 2, 3, 4, 5, 6), None, DEFAULT_NUM_KEEP),
        ((1, 2, 3, 4, 5, 6), 0, 0),
        ((1, 2, 3, 4, 5, 6), 2, 2),
        ((tiny.BOS, 2, 3, 4, 5, 6), 2, 3),  # whoever counts, counts text
        ((1, 2, 3, 4, 5, 6), -1, 6),
        (tuple(range(200)), -1, 63),
        (tuple(range(200)), 10**9, 63),
    ],
)
def test_what_a_shift_never_discards(
    files: ModelFiles, prompt: tuple[int, ...], num_keep: int | None, kept: int
) -> None:
    runner = FakeRunner("x")
    events(files, runner, SHIFTING, prompt=prompt, num_keep=num_keep)
    assert runner.jobs[0].num_keep == kept
    assert runner.jobs[0].prompt_token_ids[-1] == prompt[-1]


def test_an_empty_prompt_is_refused_where_contexts_shift_too(files: ModelFiles) -> None:
    assert refusal(files, SHIFTING, prompt="").kind is ErrorKind.INVALID


@pytest.mark.parametrize(("most", "text"), [(0.0, "a"), (25e-9, "abcd"), (1.0, "abcdef")])
def test_an_answer_is_cut_when_its_time_is_up(files: ModelFiles, most: float, text: str) -> None:
    """The script's tokens are ten nanoseconds apart, and time counts from the first."""
    runner = FakeRunner("abcdef", reason="stop")
    found = events(files, runner, Settings(max_time=most))
    assert text_of(found) == text
    assert isinstance(end := found[-1], Finish)
    assert end.reason == ("stop" if text == "abcdef" else "length")
    assert end.usage.completion_tokens == len(text)
    assert runner.kept == (None if text == "abcdef" else len(text))
    assert runner.left == 1


def test_what_is_held_back_when_time_is_up_is_told(files: ModelFiles) -> None:
    """A stop string that had begun, and did not come."""
    found = events(files, FakeRunner("abcdef"), Settings(max_time=25e-9), stop=("cdx",))
    assert text_of(found) == "abcd"


DIVERGED = CacheMiss(position=3, reason="diverged", cached_ids=(*b"p!", tiny.END, 70_000))


def test_the_reason_of_a_miss_is_logged_for_whoever_debugs(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    events(files, FakeRunner("x", miss=DIVERGED), Settings(debug=True))
    assert "3 of 5 prompt tokens were cached (diverged at 3)" in caplog.text
    assert (
        "after 'hel' the prompt continues with 'lo', and the cached prefix with 'p!</s>'"
        in caplog.text
    )


def test_a_lookup_that_found_all_is_told_without_text(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    events(files, FakeRunner("x"), Settings(debug=True))
    assert "3 of 5 prompt tokens were cached" in caplog.text
    assert "hel" not in caplog.text


def test_without_debug_no_text_gets_into_the_log(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the level of the log: that is set by whoever runs the process."""
    caplog.set_level("DEBUG")
    events(files, FakeRunner("secret", miss=DIVERGED), prompt="a secret")
    assert "secret" not in caplog.text
    assert "tokens were cached" not in caplog.text
