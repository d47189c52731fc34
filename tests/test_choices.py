"""Several choices of one request: generated concurrently and independently, and closed together."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    PromptTokenIds,
    PromptTokenLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from app.core.images import ImagePixels
from app.core.jobs import Ended, EngineStats, Job, JobUpdate, PromptLogprobs, Started, Token
from app.core.model_files import ModelFiles
from app.core.ports import RunnerStatus
from app.core.requests import Conversation, EmbedJob, Message, PromptBatch, Tool
from app.core.settings import Settings
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving import generation
from app.serving.generation import Generation
from app.serving.router import compute_fingerprint
from app.text.output import build_token_logprob
from app.text.tokenizer import Tokenizer
from tests.batches import flatten
from tests.serving.test_generation import (
    PLAIN,
    FakeRunner,
    build_capacity,
    collect_events,
    get_error,
    join_text,
    request,
)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return store.resolve(str(tiny_model))


CONVERSATION = Conversation(messages=(Message(role="user", content="hi"),))


class InterleavedRunner:
    """A runner whose jobs take turns: each generates one byte of its text at a time, and records
    it. max_jobs: jobs that it accepts."""

    def __init__(self, *texts: str, max_jobs: int = 100, fails: int | None = None) -> None:
        self.texts = texts
        self.max_jobs = max_jobs
        self.fails = fails
        self.jobs: list[Job] = []
        self.kept_tokens: dict[int, int] = {}
        self.closed: list[int] = []
        self.generated: list[tuple[int, str]] = []

    @contextmanager
    def reserve(self, count: int = 1) -> Iterator["InterleavedRunner"]:
        if count > self.max_jobs:
            raise AppError(ErrorKind.BUSY, "full", retry_after=1)
        yield self

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncIterator["InterleavedSubmission"]:
        number = len(self.jobs)
        self.jobs.append(job)
        try:
            yield InterleavedSubmission(self, number)
        finally:
            self.closed.append(number)

    async def start(self, files: ModelFiles) -> None: ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("this runner does not embed")

    async def stop(self) -> None: ...

    def status(self) -> RunnerStatus:
        return RunnerStatus(state="ready", progress=100, stats=EngineStats())


class InterleavedSubmission:
    started_ns: int | None = None
    ended_ns: int | None = None

    def __init__(self, runner: InterleavedRunner, number: int) -> None:
        self.runner = runner
        self.number = number

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the jobs have no images")

    def limit_cached_tokens(self, tokens: int) -> None:
        self.runner.kept_tokens[self.number] = tokens

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        runner, number = self.runner, self.number
        job = runner.jobs[number]
        yield [Started(job_id=job.id, cached_tokens=0, timestamp_ns=1000)]
        if job.prompt_logprobs is not None:
            scores = ((-0.5, ((65, -0.5),)),) * (len(job.prompt_token_ids) - 1)
            yield [PromptLogprobs(job_id=job.id, logprobs=scores)]
        text = runner.texts[number % len(runner.texts)]
        for index, id in enumerate(text.encode()[: job.max_tokens]):
            await asyncio.sleep(0)
            if number == runner.fails and index == 1:
                yield [Ended(job_id=job.id, reason="error", timestamp_ns=3000, error="planted")]
                return
            runner.generated.append((number, chr(id)))
            logprob = None if job.top_logprobs is None else -0.25
            yield [Token(job_id=job.id, id=id, timestamp_ns=2000 + index, logprob=logprob)]
        reason = "length" if len(text.encode()) >= job.max_tokens else "stop"
        yield [Ended(job_id=job.id, reason=reason, timestamp_ns=5000)]


def join_choice(received: list[Event], choice: int) -> str:
    return "".join(e.text for e in received if isinstance(e, TextDelta) and e.choice == choice)


def collect_finishes(received: list[Event]) -> dict[int, Finish]:
    ends = [event for event in received if isinstance(event, Finish)]
    assert len({end.choice for end in ends}) == len(ends)
    return {end.choice: end for end in ends}


class TestSeveralChoices:
    def test_choices_are_numbered_across_all_prompts(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("aa", "bb", "cc", "dd", "ee", "ff")
        prompts = PromptBatch(prompts=("one", (1, 2), "three"))
        received = collect_events(files, runner, prompt=prompts, n=2)
        assert [join_choice(received, choice) for choice in range(6)] == list(runner.texts)
        ends = collect_finishes(received)
        assert [ends[choice].prompt_index for choice in range(6)] == [0, 0, 1, 1, 2, 2]
        assert [len(job.prompt_token_ids) for job in runner.jobs] == [3, 3, 2, 2, 5, 5]
        assert len({job.id for job in runner.jobs}) == 6

    @pytest.mark.parametrize(
        ("seed", "seeds"),
        [
            (7, [7, 8, 9]),
            (None, [None, None, None]),
            (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        ],
    )
    def test_choices_have_different_seeds_and_prompts_the_same_ones(
        self, files: ModelFiles, seed: int | None, seeds: list[int | None]
    ) -> None:
        """A prompt in a batch gets the same answer as alone."""
        runner = InterleavedRunner("x")
        sampling = {} if seed is None else {"seed": seed}
        collect_events(
            files, runner, prompt=PromptBatch(prompts=("a", "b")), n=3, sampling=sampling
        )
        assert [job.sampling.seed for job in runner.jobs] == [*seeds, *seeds]

    def test_prompt_token_ids_are_sent_once_before_the_choices(self, files: ModelFiles) -> None:
        prompts = PromptBatch(prompts=("hi", (1, 2)))
        received = collect_events(
            files, InterleavedRunner("x", "y"), prompt=prompts, n=2, return_token_ids=True
        )
        prompt_ids = [event for event in received if isinstance(event, PromptTokenIds)]
        assert prompt_ids == [
            PromptTokenIds(prompt_index=0, token_ids=tuple(b"hi")),
            PromptTokenIds(prompt_index=1, token_ids=(1, 2)),
        ]
        for prompt in prompt_ids:
            positions = [
                index
                for index, event in enumerate(received)
                if isinstance(event, TextDelta) and event.choice // 2 == prompt.prompt_index
            ]
            assert received.index(prompt) < min(positions)

    def test_a_finished_choice_is_closed_while_others_continue(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("ab!" + "x" * 50, "c" * 40)
        closed_before: list[int] = []

        async def collect() -> list[Event]:
            received: list[Event] = []
            generation = Generation(files, runner, PLAIN)
            async with generation.open(request(n=2, stop=("!",))) as stream:
                async for event in flatten(stream):
                    received.append(event)
                    if isinstance(event, Finish) and event.choice == 0:
                        closed_before.extend(runner.closed)
            return received

        received = asyncio.run(collect())
        assert closed_before == [0]
        assert (join_choice(received, 0), join_choice(received, 1)) == ("ab", "c" * 40)
        assert runner.kept_tokens == {0: 2}
        assert (
            collect_finishes(received)[0].stop_string,
            collect_finishes(received)[1].stop_string,
        ) == ("!", None)
        assert sum(number == 0 for number, _ in runner.generated) == 3

    def test_a_failed_choice_ends_all(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("a" * 500, fails=1)
        with pytest.raises(AppError, match="planted") as caught:
            collect_events(files, runner, n=3)
        assert caught.value.kind is ErrorKind.ENGINE
        assert sorted(runner.closed) == [0, 1, 2]
        assert len(runner.generated) < 50

    def test_closing_the_stream_closes_all_choices(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("a" * 500)

        async def disconnect() -> None:
            async with Generation(files, runner, PLAIN).open(request(n=4)) as stream:
                async for event in flatten(stream):
                    if isinstance(event, TextDelta):
                        break
            assert len(asyncio.all_tasks()) == 1, "no task reads a closed choice"

        asyncio.run(disconnect())
        assert sorted(runner.closed) == [0, 1, 2, 3]
        assert len(runner.generated) < 50

    def test_without_capacity_for_all_choices_none_is_started(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("a", max_jobs=2)
        with pytest.raises(AppError) as caught:
            collect_events(files, runner, n=4)
        assert caught.value.kind is ErrorKind.BUSY
        assert runner.jobs == []

    def test_more_choices_than_the_capacity_are_invalid(self, files: ModelFiles) -> None:
        settings = Settings(max_queue=3)
        capacity = build_capacity(100)  # two run at once
        assert collect_events(files, FakeRunner("x", capacity=capacity), settings, n=5)
        error = get_error(files, settings, capacity, n=6)
        assert (error.kind, error.param) == (ErrorKind.INVALID, "n")
        assert "at most 5: ask for fewer" in error.message
        error = get_error(files, settings, capacity, prompt=PromptBatch(prompts=("a",) * 6))
        assert error.param == "prompt"


class TestEcho:
    def test_the_prompt_precedes_each_answer(self, files: ModelFiles) -> None:
        prompts = PromptBatch(prompts=("one ", tuple(b"two ")))
        received = collect_events(
            files, InterleavedRunner("a", "b", "c", "d"), prompt=prompts, n=2, echo=True
        )
        assert [join_choice(received, n) for n in range(4)] == ["one a", "one b", "two c", "two d"]

    def test_the_echo_has_logprobs_except_for_its_first_token(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("xy")
        received = collect_events(files, runner, prompt="abc", echo=True, top_logprobs=1)
        assert runner.jobs[0].prompt_logprobs == 1
        entries = [entry for e in received if isinstance(e, TextDelta) for entry in e.logprobs]
        assert [entry.text for entry in entries] == [*"abcxy"]
        assert [entry.logprob for entry in entries] == [None, -0.5, -0.5, -0.25, -0.25]
        assert join_text(received) == "abcxy"

    def test_the_prompt_has_logprobs_of_its_own(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("xy")
        received = collect_events(
            files, runner, prompt="abc", n=2, prompt_logprobs=0, top_logprobs=0
        )
        assert [job.prompt_logprobs for job in runner.jobs] == [0, None]
        [scores] = [event for event in received if isinstance(event, PromptTokenLogprobs)]
        assert [(entry.text, entry.logprob) for entry in scores.logprobs] == [
            ("a", None),
            ("b", -0.5),
            ("c", -0.5),
        ]
        assert all(entry.top_logprobs == () for entry in scores.logprobs)
        assert [join_choice(received, choice) for choice in range(2)] == ["xy", "xy"]

    def test_both_kinds_of_logprobs_have_their_numbers(self, files: ModelFiles) -> None:
        runner = InterleavedRunner("xy")
        received = collect_events(
            files, runner, prompt="abc", echo=True, prompt_logprobs=0, top_logprobs=1
        )
        assert runner.jobs[0].prompt_logprobs == 1
        [scores] = [event for event in received if isinstance(event, PromptTokenLogprobs)]
        assert all(entry.top_logprobs == () for entry in scores.logprobs)
        echoed = [entry for e in received if isinstance(e, TextDelta) for entry in e.logprobs]
        assert [len(entry.top_logprobs) for entry in echoed[1:3]] == [1, 1]

    @pytest.mark.parametrize("name", ["top_logprobs", "prompt_logprobs"])
    def test_too_many_alternatives_are_refused(self, files: ModelFiles, name: str) -> None:
        options: Any = {name: 1 << 21, "max_tokens": 3, "prompt": "abc"}
        error = get_error(files, Settings(), build_capacity(100), **options)
        assert error.kind is ErrorKind.INVALID
        assert "for each of 3 tokens" in error.message

    def test_logprobs_of_the_echo_are_built_outside_the_event_loop(
        self, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A prompt of ten thousand tokens has two hundred thousand top logprobs."""
        thread_ids: list[int] = []

        def recording_build(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
            thread_ids.append(threading.get_ident())
            return build_token_logprob(tokenizer, token)

        monkeypatch.setattr(generation, "build_token_logprob", recording_build)
        collect_events(files, InterleavedRunner("xy"), prompt="abc", echo=True, top_logprobs=1)
        assert len(thread_ids) == 3
        assert threading.get_ident() not in thread_ids

    def test_a_long_echo_is_split_into_events(self, files: ModelFiles) -> None:
        """16,000 tokens with 20 top logprobs each were one event, encoded on the event loop in 1.2
        s."""
        prompt = "abcdefg" * 100
        received = collect_events(
            files, InterleavedRunner("xy"), prompt=prompt, echo=True, top_logprobs=1
        )
        pieces = [event for event in received if isinstance(event, TextDelta)]
        assert max(len(piece.logprobs) for piece in pieces) == 128
        assert all(piece.text for piece in pieces), "streams hold back events without text"
        entries = [entry for piece in pieces for entry in piece.logprobs]
        assert "".join(entry.text for entry in entries) == prompt + "xy"
        assert [entry.logprob for entry in entries] == [None, *[-0.5] * 699, -0.25, -0.25]
        assert join_text(received) == prompt + "xy"

    @pytest.mark.parametrize("top", [None, 0])
    def test_the_echo_alone_is_the_complete_answer(
        self, files: ModelFiles, top: int | None
    ) -> None:
        runner = InterleavedRunner("never seen")
        received = collect_events(
            files, runner, prompt="abc", echo=True, max_tokens=0, top_logprobs=top
        )
        assert join_text(received) == "abc"
        assert runner.jobs[0].max_tokens == 1
        end = collect_finishes(received)[0]
        assert (end.reason, end.usage.completion_tokens) == ("length", 0)


class TestCallsAndReasoning:
    """A model whose template uses the Hermes format."""

    @pytest.fixture
    def hermes(self, files: ModelFiles) -> ModelFiles:
        template = (
            '{% for t in tools or [] %}<tool_call>{"name": {{ t.function.name | tojson }}'
            ", {{ t.function.parameters | tojson }}{% endfor %}"
            "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
        )
        return replace(files, chat_template=template)

    CALL = '<tool_call>{"name": "paint", "arguments": {}}</tool_call>'
    PAINT = Tool(name="paint", description=None, parameters={"type": "object"})

    @pytest.mark.parametrize(("limit", "reason"), [(None, "tool_calls"), (44, "length")])
    def test_the_finish_reason_is_tool_calls_unless_the_answer_was_truncated(
        self, hermes: ModelFiles, limit: int | None, reason: str
    ) -> None:
        runner = InterleavedRunner(self.CALL)
        fields = {"prompt": CONVERSATION, "tools": (self.PAINT,), "max_tokens": limit}
        received = collect_events(hermes, runner, **fields)
        assert [e.name for e in received if isinstance(e, ToolCallDelta) and e.name] == ["paint"]
        assert collect_finishes(received)[0].reason == reason
        assert join_text(received) == ""

    def test_reasoning_is_separated_and_counted(self, hermes: ModelFiles) -> None:
        received = collect_events(
            hermes, InterleavedRunner("<think>hm</think>yes"), prompt=CONVERSATION
        )
        assert "".join(e.text for e in received if isinstance(e, ReasoningDelta)) == "hm"
        assert join_text(received) == "yes"
        assert collect_finishes(received)[0].usage.reasoning_tokens == len("<think>hm")

    def test_each_choice_is_parsed_separately(self, hermes: ModelFiles) -> None:
        runner = InterleavedRunner(self.CALL, "<think>hm</think>yes", "no")
        received = collect_events(hermes, runner, prompt=CONVERSATION, tools=(self.PAINT,), n=3)
        ends = collect_finishes(received)
        assert [ends[n].reason for n in range(3)] == ["tool_calls", "stop", "stop"]
        assert [join_choice(received, n) for n in range(3)] == ["", "yes", "no"]
        assert {e.choice for e in received if isinstance(e, ToolCallDelta)} == {0}
        assert {e.choice for e in received if isinstance(e, ReasoningDelta)} == {1}

    @pytest.mark.parametrize("field", [{"min_tokens": 3}, {"ignore_eos": True}])
    def test_min_tokens_and_ignore_eos_cannot_be_combined_with_strict_tools(
        self, hermes: ModelFiles, field: dict[str, Any]
    ) -> None:
        """The dialect does not know the grammar of strict tools."""
        strict = replace(self.PAINT, strict=True)
        error = get_error(hermes, prompt=CONVERSATION, tools=(strict,), **field)
        assert (error.kind, error.param) == (ErrorKind.INVALID, next(iter(field)))


def test_the_fingerprint_depends_on_model_and_settings(files: ModelFiles) -> None:
    def compute(files: ModelFiles, settings: Settings = PLAIN) -> str:
        return compute_fingerprint(files, settings)

    assert compute(files) == compute(files)
    changed = {
        compute(replace(files, config={**files.config, "rms_norm_eps": 1e-6})),
        compute(replace(files, name="other")),
        compute(replace(files, weights_digest="other")),
        compute(files, Settings(parallel=3)),
    }
    assert len({compute(files), *changed}) == 5


@pytest.mark.parametrize(
    ("cache", "min_tokens", "max_tokens"),
    [
        # all tokens except for incomplete blocks of the tree
        ("radix", 450, 450 + 3 * 128),
        # sequentially, each with the cache of the previous one
        ("single", 450, 450 + 3),
        # does not share with running sequences
        ("slots", 4 * 450, 4 * 450),
    ],
)
def test_choices_share_their_prompt_if_the_cache_can(
    files: ModelFiles, cache: Any, min_tokens: int, max_tokens: int
) -> None:
    async def count() -> EngineStats:
        settings = Settings(cache=cache, parallel=1 if cache == "single" else 4, context=512)
        runner = ThreadRunner(settings)
        await runner.start(files)
        try:
            engine = Admission(runner, settings.max_queue)
            generation = Generation(files, engine, settings)
            request_ = request(prompt=tuple(n % 256 for n in range(450)), n=4, max_tokens=8)
            async with generation.open(request_) as stream:
                async for _ in flatten(stream):
                    pass
            return runner.status().stats
        finally:
            await runner.stop()

    stats = asyncio.run(count())
    assert stats.cached_tokens + stats.prefilled_tokens == 4 * 450
    assert min_tokens <= stats.prefilled_tokens <= max_tokens
