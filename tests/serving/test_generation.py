"""Generation with a scripted runner: the jobs that it submits, its events, and its ends."""

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
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    PrefillProgress,
    TextDelta,
    Timings,
    Usage,
)
from app.core.images import ImagePixels, Pixels
from app.core.jobs import (
    CacheMiss,
    Capacity,
    Ended,
    EngineStats,
    Job,
    JobUpdate,
    PixelsNeeded,
    Prefilled,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import Engine, RunnerStatus
from app.core.requests import (
    Conversation,
    EmbedJob,
    GenerateRequest,
    JsonSchema,
    Message,
    PromptBatch,
    Regex,
    Tool,
    ToolChoice,
    ToolSchemaPolicy,
)
from app.core.sampling_params import SamplingParams
from app.core.settings import Settings
from app.grammar import llguidance_backend
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving.generation import Generation
from app.serving.prompt_jobs import DEFAULT_NUM_KEEP, DecodeImage, JobBuilder, PreparedChoice
from tests import tiny
from tests.batches import flatten


class FakeRunner:
    """Answers every job with the same text, one byte per token, and records the jobs."""

    def __init__(
        self,
        text: str | bytes,
        *,
        reason: Any = "stop",
        logprobs: bool = False,
        capacity: Capacity | None = None,
        miss: CacheMiss | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        self.stop_token_id = stop_token_id
        self.capacity = capacity
        self.miss = miss
        self.bytes = text.encode() if isinstance(text, str) else text
        self.reason = reason
        self.logprobs = logprobs
        self.jobs: list[Job] = []
        self.kept_tokens: int | None = None
        self.num_closed = 0

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
            Ended(
                job_id=job.id,
                reason=self.reason,
                timestamp_ns=5000,
                error=error,
                stop_token_id=self.stop_token_id,
            ),
        ]

    # the attributes of a submission
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
            self.num_closed += 1

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        for update in self.updates(self.jobs[-1]):
            yield [update]

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        self.kept_tokens = tokens

    async def start(self, files: ModelFiles) -> None: ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("this runner does not embed")

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


def collect_events(
    files: ModelFiles, runner: Engine, settings: Settings = PLAIN, **changes: Any
) -> list[Event]:
    async def collect() -> list[Event]:
        async with Generation(files, runner, settings).open(request(**changes)) as stream:
            return [event async for event in flatten(stream)]

    return asyncio.run(collect())


def join_text(received: list[Event]) -> str:
    return "".join(event.text for event in received if isinstance(event, TextDelta))


def get_error(
    files: ModelFiles,
    settings: Settings = PLAIN,
    capacity: Capacity | None = None,
    **changes: Any,
) -> AppError:
    runner = FakeRunner("x", capacity=capacity)
    with pytest.raises(AppError) as caught:
        collect_events(files, runner, settings, **changes)
    assert not runner.jobs, "a rejected request must not reach the runner"
    return caught.value


def test_a_grammar_is_passed_to_the_runner_unchanged(files: ModelFiles) -> None:
    grammar = JsonSchema(text='{"type":"integer"}')
    runner = FakeRunner("7")
    collect_events(files, runner, grammar=grammar)
    assert runner.jobs[0].grammar == grammar


PIXELS = ImagePixels(key=b"cat", tiles=(Pixels(height=1, width=1, data=b"rgb"),))


class ImageRunner(FakeRunner):
    """Requests the pixels of an image. provided: those that it got."""

    def __init__(self) -> None:
        super().__init__("a cat")
        self.provided: list[ImagePixels] = []

    def updates(self, job: Job) -> Sequence[JobUpdate]:
        first, *rest = super().updates(job)
        return [first, PixelsNeeded(job_id=job.id, keys=(b"cat",)), *rest]

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        self.provided += images


def collect_with_image(
    files: ModelFiles, runner: Engine, decode: DecodeImage, monkeypatch: pytest.MonkeyPatch
) -> list[Event]:
    """The events of a request whose jobs have an image."""
    prepare = JobBuilder.prepare

    def prepare_with_image(self: JobBuilder, *args: Any) -> list[PreparedChoice]:
        return [replace(choice, images={b"cat": decode}) for choice in prepare(self, *args)]

    monkeypatch.setattr(JobBuilder, "prepare", prepare_with_image)
    return collect_events(files, runner)


def test_requested_pixels_are_decoded_and_provided(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode() -> ImagePixels:
        return PIXELS

    runner = ImageRunner()
    assert join_text(collect_with_image(files, runner, decode, monkeypatch)) == "a cat"
    assert runner.provided == [PIXELS]


def test_an_image_that_cannot_be_decoded_ends_the_request_with_its_error(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode() -> ImagePixels:
        raise AppError(ErrorKind.INVALID, "the PNG is truncated")

    runner = ImageRunner()
    with pytest.raises(AppError, match="the PNG is truncated"):
        collect_with_image(files, runner, decode, monkeypatch)
    assert runner.num_closed == 1
    assert runner.provided == []


def test_progress_has_the_index_of_its_prompt(files: ModelFiles) -> None:
    progress = collect_events(
        files, FakeRunner("hi"), prompt=PromptBatch(prompts=("hello", "good day")), n=2
    )
    totals = {
        (event.prompt_index, event.total_tokens)
        for event in progress
        if isinstance(event, PrefillProgress)
    }
    assert {prompt for prompt, _ in totals} == {0, 1}
    assert len(totals) == 2


def test_events_come_in_order(files: ModelFiles) -> None:
    runner = FakeRunner("hi")
    assert collect_events(files, runner) == [
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
    assert runner.num_closed == 1


def _any(kind: type) -> Any:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, kind)

        __hash__ = None  # pyright: ignore[reportAssignmentType]

    return Any_()


def test_characters_are_never_split(files: ModelFiles) -> None:
    received = collect_events(files, FakeRunner("aé🎉z"))
    assert [e.text for e in received if isinstance(e, TextDelta)] == ["a", "é", "🎉", "z"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_finish_reason_of_the_engine_is_reported(files: ModelFiles, reason: str) -> None:
    finish = collect_events(files, FakeRunner("x", reason=reason))[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == reason


@pytest.mark.parametrize(
    ("generated", "stops", "expected", "kept_tokens", "num_tokens"),
    [
        ("one two three", ("two",), "one ", 4, 7),
        ("one two three", ("e t", "zzz"), "on", 2, 5),
        ("aé🎉", ("🎉",), "aé", 3, 7),
        ("abc", ("b", "ab"), "", 0, 2),
    ],
)
def test_a_stop_string_ends_the_answer_and_limits_the_cached_tokens(
    files: ModelFiles,
    generated: str,
    stops: tuple[str, ...],
    expected: str,
    kept_tokens: int,
    num_tokens: int,
) -> None:
    runner = FakeRunner(generated, reason="length")
    received = collect_events(files, runner, stop=stops)
    finish = received[-1]
    assert isinstance(finish, Finish)
    assert (join_text(received), finish.reason) == (expected, "stop")
    assert (runner.kept_tokens, finish.usage.completion_tokens, runner.num_closed) == (
        kept_tokens,
        num_tokens,
        1,
    )


def test_text_held_back_for_a_stop_string_is_sent_at_the_end(files: ModelFiles) -> None:
    received = collect_events(files, FakeRunner("one tw", reason="length"), stop=("two",))
    assert join_text(received) == "one tw"
    assert isinstance(received[-1], Finish)
    assert received[-1].reason == "length"


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(
    files: ModelFiles,
) -> None:
    assert join_text(collect_events(files, FakeRunner(b"a\xf0\x9f"))) == "a\ufffd"


@given(
    text=st.text(st.sampled_from("abé🎉"), max_size=12),
    stops=st.lists(st.text(st.sampled_from("abé🎉"), min_size=1, max_size=3), max_size=3),
)
def test_logprobs_cover_exactly_the_visible_text(
    files: ModelFiles, text: str, stops: list[str]
) -> None:
    runner = FakeRunner(text, logprobs=True)
    received = collect_events(files, runner, stop=tuple(stops), top_logprobs=2)
    entries = [entry for e in received if isinstance(e, TextDelta) for entry in e.logprobs]
    assert b"".join(entry.token_bytes for entry in entries) == join_text(received).encode()
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]
        assert entry.top_logprobs[1].text == "A"


def test_an_engine_error_is_raised_in_the_stream(files: ModelFiles) -> None:
    runner = FakeRunner("half an ans", reason="error")
    with pytest.raises(AppError, match="planted") as caught:
        collect_events(files, runner)
    assert (caught.value.kind, runner.num_closed) == (ErrorKind.ENGINE, 1)


def test_a_too_complex_grammar_is_an_error_of_the_request(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", -50)
    many_states = Regex(pattern="[ab]*a[ab]{14}" + "c{0,3}" * 10, param="guided_regex")

    async def answer() -> None:
        runner = ThreadRunner(PLAIN)
        await runner.start(files)
        try:
            request_ = request(grammar=many_states, max_tokens=200, sampling={"seed": 3})
            async with Generation(files, Admission(runner, 4), PLAIN).open(request_) as stream:
                async for _ in stream:
                    pass
        finally:
            await runner.stop()

    with pytest.raises(AppError, match="too many states: simplify") as caught:
        asyncio.run(answer())
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "guided_regex")


class StrictRunner(FakeRunner):
    """Rejects every grammar with `pattern`."""

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncIterator[FakeRunner]:
        if "pattern" in getattr(job.grammar, "text", ""):
            raise AppError(ErrorKind.INVALID, "unsupported", param="tools.0.parameters")
        async with super().submit(job) as submission:
            yield submission


def called_tool(choice: ToolChoice, policy: ToolSchemaPolicy) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}
    tool = Tool(name="f", description=None, parameters=schema, strict=True, param="tools.0")
    return {
        "prompt": Conversation(messages=(Message(role="user", content="hi"),)),
        "tools": (tool,),
        "tool_choice": choice,
        "tool_schemas": policy,
    }


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_schemas_that_are_not_supported_are_ignored_where_they_are_preferred(
    files: ModelFiles, choice: ToolChoice
) -> None:
    runner = StrictRunner("x")
    collect_events(files, runner, **called_tool(choice, "prefer"))
    [job] = runner.jobs
    assert (job.grammar is None) == (choice == "auto")
    plain = FakeRunner("x")
    collect_events(files, plain, **called_tool(choice, "enforce"))
    assert job.prompt_token_ids == plain.jobs[0].prompt_token_ids
    with pytest.raises(AppError, match="unsupported"):
        collect_events(files, StrictRunner("x"), **called_tool(choice, "enforce"))


def test_closing_the_stream_early_closes_the_job(files: ModelFiles) -> None:
    runner = FakeRunner("hello")

    async def disconnect() -> None:
        async with Generation(files, runner, PLAIN).open(request()) as stream:
            await anext(stream)

    asyncio.run(disconnect())
    assert (runner.num_closed, runner.kept_tokens) == (1, None)


def test_a_job_has_the_parameters_of_the_request(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    collect_events(
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


def test_conversations_are_rendered_with_the_chat_template(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    conversation = Conversation(messages=(Message(role="user", content="hi"),))
    collect_events(files, runner, prompt=conversation)
    assert bytes(runner.jobs[0].prompt_token_ids) == b"user: hi\nassistant: "


@pytest.mark.parametrize(("requested", "expected"), [(None, 4091), (5000, 4091), (10, 10)])
def test_max_tokens_is_limited_by_the_context(
    files: ModelFiles, requested: int | None, expected: int
) -> None:
    runner = FakeRunner("x")
    collect_events(files, runner, max_tokens=requested)
    assert runner.jobs[0].max_tokens == expected


def test_a_prompt_that_fills_the_context_is_rejected_with_both_numbers(files: ModelFiles) -> None:
    error = get_error(files, prompt="x" * 4096)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
    assert "4096 tokens, but the model's context is 4096" in error.message
    runner = FakeRunner("x")
    collect_events(files, runner, prompt="x" * 4095)
    assert runner.jobs[0].max_tokens == 1


def test_a_huge_prompt_is_tokenized_only_up_to_a_bound(files: ModelFiles) -> None:
    error = get_error(files, prompt="x" * 5_000_000)
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
def test_invalid_requests_are_rejected(
    files: ModelFiles, changes: dict[str, Any], kind: ErrorKind, param: str
) -> None:
    error = get_error(files, **changes)
    assert (error.kind, error.param) == (kind, param)


def test_the_models_defaults_override_ours_and_the_request_overrides_both(
    tmp_path: Path, tiny_model: Path
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    files, runner = store.resolve(str(tmp_path)), FakeRunner("x")
    collect_events(files, runner, model=files.name, sampling={"top_p": 1.0})
    assert runner.jobs[0].sampling == SamplingParams(temperature=0.6, top_k=20, top_p=1.0)


def test_an_invalid_generation_config_is_a_startup_error(files: ModelFiles) -> None:
    invalid = replace(files, generation_config={"temperature": "hot"})
    with pytest.raises(AppError, match=r"generation_config\.json of .*: temperature is 'hot'"):
        Generation(invalid, FakeRunner("x"), PLAIN)


@pytest.mark.parametrize(("requested", "expected"), [(None, 9), (20, 20), (3, 3)])
def test_max_new_tokens_of_the_model_is_the_default(
    files: ModelFiles, requested: int | None, expected: int
) -> None:
    short_answers, runner = replace(files, generation_config={"max_new_tokens": 9}), FakeRunner("x")
    collect_events(short_answers, runner, max_tokens=requested)
    collect_events(short_answers, runner, SHIFTING, max_tokens=requested)
    assert [job.max_tokens for job in runner.jobs] == [expected, expected]


def test_stop_strings_of_the_model_and_of_the_request_are_used(files: ModelFiles) -> None:
    with_stops = replace(files, generation_config={"stop_strings": ["two", "</s>", "<s>"]})
    runner = FakeRunner("one two three")
    assert join_text(collect_events(with_stops, runner)) == "one "
    assert join_text(collect_events(with_stops, runner, stop=("e",))) == "on"
    assert join_text(collect_events(with_stops, runner, stop=("three",))) == "one "
    # a special token becomes a stop token, not a stop string
    assert runner.jobs[0].stop_token_ids == {tiny.BOS, tiny.END}


def build_conversation(*roles: str) -> Conversation:
    return Conversation(messages=tuple(Message(role=role, content="hi") for role in roles))


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (("user",), b"system: Be kind.\nuser: hi\n"),
        (("system", "user"), b"system: hi\nuser: hi\n"),
        (("user", "system"), b"system: Be kind.\nuser: hi\nsystem: hi\n"),
        (("developer", "user"), b"system: hi\nuser: hi\n"),
    ],
)
def test_the_models_system_prompt_is_added_to_conversations_without_one(
    files: ModelFiles, roles: tuple[str, ...], prompt: bytes
) -> None:
    with_prompt, runner = replace(files, system_prompt="Be kind."), FakeRunner("x")
    collect_events(with_prompt, runner, prompt=build_conversation(*roles))
    assert bytes(runner.jobs[0].prompt_token_ids) == prompt + b"assistant: "
    collect_events(with_prompt, runner, prompt="hi")
    assert bytes(runner.jobs[1].prompt_token_ids) == b"hi"


def test_the_recommended_context_is_used_until_the_model_is_loaded(
    files: ModelFiles,
) -> None:
    short = replace(files, recommended_context=64)
    assert Generation(short, FakeRunner("x"), PLAIN).context_length == 64
    longer = Generation(short, FakeRunner("x"), Settings(context=128))
    assert longer.context_length == 128
    message = get_error(short, prompt="x" * 64).message
    assert "the server's context is 64 tokens" in message
    assert "--context" in message


TRIMS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_next_prompt_has_the_bytes_that_were_generated(files: ModelFiles, reason: str) -> None:
    """This holds only for a turn that the model ended itself; other ends are not cached."""
    runner = FakeRunner("\n seven \n", reason=reason)
    generation = Generation(replace(files, chat_template=TRIMS), runner, PLAIN)
    user, answer = Message(role="user", content="hi"), Message(role="assistant", content="seven")

    async def ask(*messages: Message) -> bytes:
        asked = request(prompt=Conversation(messages=messages), caller="one")
        async with generation.open(asked) as stream:
            assert [event async for event in flatten(stream)]
        counted = await generation.tokenize_chat(asked)
        assert tuple(counted) == runner.jobs[-1].prompt_token_ids
        return bytes(id for id in counted if id < 256)

    first = asyncio.run(ask(user))
    second = asyncio.run(ask(user, answer, user))
    generated = runner.bytes if reason == "stop" else b"seven"
    assert second == first + generated + b"user: hiassistant: "


class TestIdsThatOnlyOneSideHas:
    """The embedding rows of a model may be padded; a tokenizer may have more tokens."""

    def test_ids_without_a_token_are_rejected_in_logit_bias(self, files: ModelFiles) -> None:
        padded = replace(files, config={**files.config, "vocab_size": 320})
        bias = {"logit_bias": ((tiny.VOCAB, 1.0),)}
        error = get_error(padded, sampling=bias)
        assert (error.kind, error.param) == (ErrorKind.INVALID, "logit_bias")
        assert f"whose IDs are 0 to {tiny.VOCAB - 1}" in error.message

    def test_ids_without_a_token_are_accepted_in_prompts(self, files: ModelFiles) -> None:
        """They have embedding rows, and the client sent them on purpose."""
        padded = replace(files, config={**files.config, "vocab_size": 320})
        runner = FakeRunner("x")
        collect_events(padded, runner, prompt=(1, 319))
        assert runner.jobs[0].prompt_token_ids == (1, 319)
        assert get_error(padded, prompt=(1, 320)).kind is ErrorKind.INVALID

    def test_tokens_without_an_embedding_row_are_rejected(self, files: ModelFiles) -> None:
        small = replace(files, config={**files.config, "vocab_size": tiny.END})
        collect_events(small, FakeRunner("x"), prompt="hello<s>")
        error = get_error(small, prompt="hello</s>")
        assert (error.kind, error.param) == (ErrorKind.INVALID, "prompt")
        assert "the prompt contains '</s>', a token that the tokenizer has" in error.message
        assert get_error(small, prompt=(tiny.END,)).kind is ErrorKind.INVALID

    def test_an_eos_id_without_a_token_is_ignored(self, files: ModelFiles) -> None:
        runner = FakeRunner("x")
        collect_events(
            replace(files, config={**files.config, "eos_token_id": [tiny.END, 999]}), runner
        )
        assert runner.jobs[0].stop_token_ids == {tiny.END}


def run_with_generation(files: ModelFiles, use: Callable[[Generation], Any]) -> Any:
    async def body() -> Any:
        return await use(Generation(files, FakeRunner("x"), PLAIN))

    return asyncio.run(body())


def test_text_is_tokenized_and_detokenized(files: ModelFiles) -> None:
    assert run_with_generation(files, lambda g: g.tokenize("hé")) == list("hé".encode())
    assert run_with_generation(files, lambda g: g.tokenize("")) == []
    assert run_with_generation(files, lambda g: g.detokenize([104, tiny.END])) == "h</s>"
    with pytest.raises(AppError, match="not a token"):
        run_with_generation(files, lambda g: g.detokenize([9999]))


def test_special_tokens_are_added_on_request(files: ModelFiles) -> None:
    with_bos = replace(files, tokenizer_config={**files.tokenizer_config, "add_bos_token": True})
    assert run_with_generation(with_bos, lambda g: g.tokenize("h")) == [tiny.BOS, 104]
    assert run_with_generation(with_bos, lambda g: g.tokenize("h", add_special_tokens=False)) == [
        104
    ]
    assert run_with_generation(
        with_bos, lambda g: g.tokenize("</s>", add_special_tokens=False)
    ) == [tiny.END]


def test_tokenize_chat_returns_the_ids_of_the_prompt(files: ModelFiles) -> None:
    runner, messages = FakeRunner("x"), (Message(role="user", content="hé"),)
    collect_events(files, runner, prompt=Conversation(messages=messages))
    request = GenerateRequest(model=files.name, prompt=Conversation(messages=messages))
    assert run_with_generation(files, lambda g: g.tokenize_chat(request)) == [
        *runner.jobs[0].prompt_token_ids
    ]
    open_ended = replace(request, chat_template_kwargs={"add_generation_prompt": False})
    received = run_with_generation(files, lambda g: g.tokenize_chat(open_ended))
    assert bytes(received).decode() == "user: hé\n"


def test_a_conversation_longer_than_the_context_can_be_tokenized(files: ModelFiles) -> None:
    long = Conversation(messages=(Message(role="user", content="x" * 9000),))
    request = GenerateRequest(model=files.name, prompt=long)
    assert (
        len(run_with_generation(files, lambda g: g.tokenize_chat(request)))
        > 9000
        > tiny.CONFIG["max_position_embeddings"]
    )


def test_a_conversation_far_longer_than_the_context_is_rejected_with_its_tokens(
    files: ModelFiles,
) -> None:
    long = Conversation(messages=(Message(role="user", content="x" * 90_000),))
    request = GenerateRequest(model=files.name, prompt=long)
    with pytest.raises(AppError, match="shorten the conversation") as caught:
        run_with_generation(files, lambda g: g.tokenize_chat(request))
    assert caught.value.kind is ErrorKind.CONTEXT_LENGTH
    assert caught.value.excess is not None
    assert caught.value.excess.prompt_tokens > caught.value.excess.context_length


def test_tokens_have_bytes(files: ModelFiles) -> None:
    ids = [104, 195, tiny.END, 9999]
    assert run_with_generation(files, lambda g: g.get_token_bytes(ids)) == [
        b"h",
        b"\xc3",
        b"</s>",
        b"",
    ]


def test_tokenizer_info_has_the_context_of_the_server(files: ModelFiles) -> None:
    received = run_with_generation(files, lambda g: g.get_tokenizer_info())
    assert (received["eos_token"], received["model_max_length"]) == ("</s>", 4096)
    assert received["chat_template"] == tiny.CHAT_TEMPLATE


def build_capacity(context: int, **changes: Any) -> Capacity:
    """The capacity of an engine in which a position takes one KiB."""
    defaults: dict[str, Any] = {
        "parallel": 2,
        "context_length": context,
        "kv_budget": 1 << 30,
        "kv_bytes_per_sequence": context << 10,
    }
    return Capacity(**{**defaults, **changes})


def test_the_configured_context_is_used_before_the_model_is_loaded(files: ModelFiles) -> None:
    generation = Generation(files, FakeRunner("x"), Settings(context=100))
    assert generation.context_length == 100
    error = get_error(files, Settings(context=100), prompt="x" * 100)
    assert "100 tokens, but the server's context is 100 tokens" in error.message
    assert "the model's own is 4096" in error.message
    assert "--context" in error.message


def test_the_context_is_limited_by_the_model(files: ModelFiles) -> None:
    generation = Generation(files, FakeRunner("x"), Settings(context=9999))
    assert generation.context_length == 4096


def test_the_context_is_limited_by_the_capacity_of_the_engine(files: ModelFiles) -> None:
    runner = FakeRunner("x", capacity=build_capacity(50))
    assert Generation(files, runner, PLAIN).context_length == 50
    collect_events(files, runner, prompt="x" * 20)
    collect_events(files, runner, prompt="x" * 20, max_tokens=1000)
    assert [job.max_tokens for job in runner.jobs] == [30, 30]


def test_a_prompt_that_never_fits_memory_is_rejected_with_both_numbers(files: ModelFiles) -> None:
    limited = build_capacity(2048, limited_by_memory=True)
    error = get_error(files, capacity=limited, prompt="x" * 3071)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
    assert "has 3071 tokens, but only 2048 tokens fit in memory" in error.message
    assert "about 3.0 MiB" in error.message
    assert "a request can have 2.0 MiB" in error.message
    assert "--memory" in error.message


@pytest.mark.parametrize(("requested", "expected"), [(None, 640), (7, 7), (10**12, 10**12)])
def test_an_answer_may_be_longer_than_a_shifting_context(
    files: ModelFiles, requested: int | None, expected: int
) -> None:
    runner = FakeRunner("x")
    collect_events(files, runner, SHIFTING, max_tokens=requested)
    assert runner.jobs[0].max_tokens == expected


def test_a_prompt_beyond_a_shifting_context_loses_its_middle(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    text = "abcdefghij" * 20
    collect_events(files, runner, SHIFTING, prompt=tuple(range(200)), num_keep=10)
    assert runner.jobs[0].prompt_token_ids == (*range(10), *range(200 - 53, 200))
    assert (len(runner.jobs[0].prompt_token_ids), runner.jobs[0].num_keep) == (63, 10)
    collect_events(files, runner, SHIFTING, prompt=text, num_keep=0)
    assert bytes(runner.jobs[1].prompt_token_ids).decode() == text[-63:]


def test_the_end_of_a_very_long_prompt_is_kept_with_context_shift(files: ModelFiles) -> None:
    runner = FakeRunner("x")
    collect_events(files, runner, SHIFTING, prompt="x" * 5000 + "the end")
    assert bytes(runner.jobs[0].prompt_token_ids).endswith(b"xthe end")


@pytest.mark.parametrize(
    ("prompt", "num_keep", "kept_tokens"),
    [
        ((1, 2, 3, 4, 5, 6), None, DEFAULT_NUM_KEEP),
        ((1, 2, 3, 4, 5, 6), 0, 0),
        ((1, 2, 3, 4, 5, 6), 2, 2),
        ((tiny.BOS, 2, 3, 4, 5, 6), 2, 3),  # num_keep counts text tokens only
        ((1, 2, 3, 4, 5, 6), -1, 6),
        (tuple(range(200)), -1, 63),
        (tuple(range(200)), 10**9, 63),
    ],
)
def test_num_keep_tokens_are_never_discarded(
    files: ModelFiles, prompt: tuple[int, ...], num_keep: int | None, kept_tokens: int
) -> None:
    runner = FakeRunner("x")
    collect_events(files, runner, SHIFTING, prompt=prompt, num_keep=num_keep)
    assert runner.jobs[0].num_keep == kept_tokens
    assert runner.jobs[0].prompt_token_ids[-1] == prompt[-1]


def test_an_empty_prompt_is_rejected_with_context_shift(files: ModelFiles) -> None:
    assert get_error(files, SHIFTING, prompt="").kind is ErrorKind.INVALID


@pytest.mark.parametrize(("max_time", "text"), [(0.0, "a"), (25e-9, "abcd"), (1.0, "abcdef")])
def test_an_answer_ends_after_max_time(files: ModelFiles, max_time: float, text: str) -> None:
    """The tokens of the script are ten nanoseconds apart; the time counts from the first one."""
    runner = FakeRunner("abcdef", reason="stop")
    received = collect_events(files, runner, Settings(max_time=max_time))
    assert join_text(received) == text
    assert isinstance(end := received[-1], Finish)
    assert end.reason == ("stop" if text == "abcdef" else "length")
    assert end.usage.completion_tokens == len(text)
    assert runner.kept_tokens == (None if text == "abcdef" else len(text))
    assert runner.num_closed == 1


def test_text_held_back_at_max_time_is_sent(files: ModelFiles) -> None:
    """The text held back is the beginning of a stop string."""
    received = collect_events(files, FakeRunner("abcdef"), Settings(max_time=25e-9), stop=("cdx",))
    assert join_text(received) == "abcd"


DIVERGED = CacheMiss(position=3, reason="diverged", cached_ids=(*b"p!", tiny.END, 70_000))


def test_the_reason_of_a_cache_miss_is_logged_with_debug(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    collect_events(files, FakeRunner("x", miss=DIVERGED), Settings(debug=True))
    assert "3 of 5 prompt tokens were cached (diverged at 3)" in caplog.text
    assert (
        "after 'hel' the prompt continues with 'lo', and the cached prefix with 'p!</s>'"
        in caplog.text
    )


def test_a_full_cache_hit_is_logged_without_text(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    collect_events(files, FakeRunner("x"), Settings(debug=True))
    assert "3 of 5 prompt tokens were cached" in caplog.text
    assert "hel" not in caplog.text


def test_without_debug_no_text_is_logged(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """At any log level, which the operator sets."""
    caplog.set_level("DEBUG")
    collect_events(files, FakeRunner("secret", miss=DIVERGED), prompt="a secret")
    assert "secret" not in caplog.text
    assert "tokens were cached" not in caplog.text


def test_a_stop_token_of_the_request_is_the_reason_and_one_of_the_model_is_not(
    files: ModelFiles,
) -> None:
    for ended, asked, reason in ((5, (5,), 5), (tiny.END, (5,), None), (5, (), None)):
        runner = FakeRunner("ab", stop_token_id=ended)
        found = collect_events(files, runner, stop_token_ids=asked)
        last = found[-1]
        assert isinstance(last, Finish)
        assert (last.reason, last.stop_token_id) == ("stop", reason)


def test_the_text_of_a_stop_token_is_output_if_the_request_includes_it(files: ModelFiles) -> None:
    runner = FakeRunner("ab", stop_token_id=ord("."))
    stops: dict[str, Any] = {"stop_token_ids": (ord("."),)}
    assert join_text(collect_events(files, runner, **stops)) == "ab"
    assert join_text(collect_events(files, runner, **stops, include_stop=True)) == "ab."
