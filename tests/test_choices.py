"""Several answers to one request: beside each other, each for itself, and all over together."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.embeddings import EmbedJob
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    PromptTokenIds,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from app.core.jobs import Ended, EngineStats, Job, JobUpdate, PromptLogprobs, Started, Token
from app.core.model_files import ModelFiles
from app.core.ports import RunnerStatus
from app.core.requests import Conversation, Message, PromptBatch, Tool
from app.core.settings import Settings
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving import generation
from app.serving.generation import Generation, compute_fingerprint
from app.text.output import build_token_logprob
from app.text.tokenizer import Tokenizer
from tests.serving.test_generation import (
    PLAIN,
    FakeRunner,
    capacity,
    events,
    refusal,
    request,
    text_of,
)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return store.resolve(str(tiny_model))


SPEAKS = Conversation(messages=(Message(role="user", content="hi"),))


class Lines:
    """A runner whose jobs wait for each other: each says one byte of its text in turn, and notes
    what became of it. room: jobs that it takes on."""

    def __init__(self, *texts: str, room: int = 100, fails: int | None = None) -> None:
        self.texts = texts
        self.room = room
        self.fails = fails
        self.jobs: list[Job] = []
        self.kept: dict[int, int] = {}
        self.left: list[int] = []
        self.said: list[tuple[int, str]] = []

    @contextmanager
    def reserve(self, count: int = 1) -> Iterator["Lines"]:
        if count > self.room:
            raise AppError(ErrorKind.BUSY, "full", retry_after=1)
        yield self

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncIterator["Line"]:
        number = len(self.jobs)
        self.jobs.append(job)
        try:
            yield Line(self, number)
        finally:
            self.left.append(number)

    async def start(self, files: ModelFiles) -> None: ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("nothing is embedded here")

    async def stop(self) -> None: ...

    def status(self) -> RunnerStatus:
        return RunnerStatus(state="ready", progress=100, stats=EngineStats())


class Line:
    started_ns: int | None = None
    ended_ns: int | None = None

    def __init__(self, runner: Lines, number: int) -> None:
        self.runner = runner
        self.number = number

    def limit_cached_tokens(self, tokens: int) -> None:
        self.runner.kept[self.number] = tokens

    async def __aiter__(self) -> AsyncIterator[JobUpdate]:
        runner, number = self.runner, self.number
        job = runner.jobs[number]
        yield Started(job_id=job.id, cached_tokens=0, timestamp_ns=1000)
        if job.prompt_logprobs is not None:
            scores = ((-0.5, ((65, -0.5),)),) * (len(job.prompt_token_ids) - 1)
            yield PromptLogprobs(job_id=job.id, logprobs=scores)
        text = runner.texts[number % len(runner.texts)]
        for place, id in enumerate(text.encode()[: job.max_tokens]):
            await asyncio.sleep(0)
            if number == runner.fails and place == 1:
                yield Ended(job_id=job.id, reason="error", timestamp_ns=3000, error="planted")
                return
            runner.said.append((number, chr(id)))
            logprob = None if job.top_logprobs is None else -0.25
            yield Token(job_id=job.id, id=id, timestamp_ns=2000 + place, logprob=logprob)
        reason = "length" if len(text.encode()) >= job.max_tokens else "stop"
        yield Ended(job_id=job.id, reason=reason, timestamp_ns=5000)


def spoken(found: list[Event], choice: int) -> str:
    return "".join(e.text for e in found if isinstance(e, TextDelta) and e.choice == choice)


def finishes(found: list[Event]) -> dict[int, Finish]:
    ends = [event for event in found if isinstance(event, Finish)]
    assert len({end.choice for end in ends}) == len(ends)
    return {end.choice: end for end in ends}


class TestSeveralChoices:
    def test_they_are_numbered_through_all_prompts(self, files: ModelFiles) -> None:
        runner = Lines("aa", "bb", "cc", "dd", "ee", "ff")
        asked = PromptBatch(prompts=("one", (1, 2), "three"))
        found = events(files, runner, prompt=asked, n=2)
        assert [spoken(found, choice) for choice in range(6)] == list(runner.texts)
        ends = finishes(found)
        assert [ends[choice].prompt_index for choice in range(6)] == [0, 0, 1, 1, 2, 2]
        assert [len(job.prompt_token_ids) for job in runner.jobs] == [3, 3, 2, 2, 5, 5]
        assert len({job.id for job in runner.jobs}) == 6

    @pytest.mark.parametrize(
        ("seed", "drawn"),
        [
            (7, [7, 8, 9]),
            (None, [None, None, None]),
            (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        ],
    )
    def test_each_draws_otherwise_and_prompts_alike(
        self, files: ModelFiles, seed: int | None, drawn: list[int | None]
    ) -> None:
        """A prompt among several is answered as it is alone."""
        runner = Lines("x")
        sampling = {} if seed is None else {"seed": seed}
        events(files, runner, prompt=PromptBatch(prompts=("a", "b")), n=3, sampling=sampling)
        assert [job.sampling.seed for job in runner.jobs] == [*drawn, *drawn]

    def test_ids_of_a_prompt_are_told_once_and_before_its_choices(self, files: ModelFiles) -> None:
        asked = PromptBatch(prompts=("hi", (1, 2)))
        found = events(files, Lines("x", "y"), prompt=asked, n=2, return_token_ids=True)
        told = [event for event in found if isinstance(event, PromptTokenIds)]
        assert told == [
            PromptTokenIds(prompt_index=0, token_ids=tuple(b"hi")),
            PromptTokenIds(prompt_index=1, token_ids=(1, 2)),
        ]
        for prompt in told:
            spoke = [
                place
                for place, event in enumerate(found)
                if isinstance(event, TextDelta) and event.choice // 2 == prompt.prompt_index
            ]
            assert found.index(prompt) < min(spoke)

    def test_one_that_stops_leaves_at_once_while_others_go_on(self, files: ModelFiles) -> None:
        runner = Lines("ab!" + "x" * 50, "c" * 40)
        seen: list[int] = []

        async def watch() -> list[Event]:
            found: list[Event] = []
            generation = Generation(files, runner, PLAIN)
            async with generation.open(request(n=2, stop=("!",))) as stream:
                async for event in stream:
                    found.append(event)
                    if isinstance(event, Finish) and event.choice == 0:
                        seen.extend(runner.left)
            return found

        found = asyncio.run(watch())
        assert seen == [0]
        assert (spoken(found, 0), spoken(found, 1)) == ("ab", "c" * 40)
        assert runner.kept == {0: 2}
        assert (finishes(found)[0].stop_string, finishes(found)[1].stop_string) == ("!", None)
        assert sum(number == 0 for number, _ in runner.said) == 3

    def test_one_that_fails_ends_all(self, files: ModelFiles) -> None:
        runner = Lines("a" * 500, fails=1)
        with pytest.raises(AppError, match="planted") as caught:
            events(files, runner, n=3)
        assert caught.value.kind is ErrorKind.ENGINE
        assert sorted(runner.left) == [0, 1, 2]
        assert len(runner.said) < 50

    def test_leaving_early_leaves_all(self, files: ModelFiles) -> None:
        runner = Lines("a" * 500)

        async def leave() -> None:
            async with Generation(files, runner, PLAIN).open(request(n=4)) as stream:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        break
            assert len(asyncio.all_tasks()) == 1, "nobody listens to what was left"

        asyncio.run(leave())
        assert sorted(runner.left) == [0, 1, 2, 3]
        assert len(runner.said) < 50

    def test_without_places_for_all_of_them_none_is_begun(self, files: ModelFiles) -> None:
        runner = Lines("a", room=2)
        with pytest.raises(AppError) as caught:
            events(files, runner, n=4)
        assert caught.value.kind is ErrorKind.BUSY
        assert runner.jobs == []

    def test_more_than_can_ever_be_here_are_refused_for_good(self, files: ModelFiles) -> None:
        settings = Settings(max_queue=3)
        room = capacity(100)  # two run
        assert events(files, FakeRunner("x", capacity=room), settings, n=5)
        error = refusal(files, settings, room, n=6)
        assert (error.kind, error.param) == (ErrorKind.INVALID, "n")
        assert "at most 5: ask for fewer" in error.message
        error = refusal(files, settings, room, prompt=PromptBatch(prompts=("a",) * 6))
        assert error.param == "prompt"


class TestEcho:
    def test_the_prompt_stands_before_each_answer(self, files: ModelFiles) -> None:
        asked = PromptBatch(prompts=("one ", tuple(b"two ")))
        found = events(files, Lines("a", "b", "c", "d"), prompt=asked, n=2, echo=True)
        assert [spoken(found, n) for n in range(4)] == ["one a", "one b", "two c", "two d"]

    def test_it_brings_its_own_logprobs_but_for_the_first(self, files: ModelFiles) -> None:
        runner = Lines("xy")
        found = events(files, runner, prompt="abc", echo=True, top_logprobs=1)
        assert runner.jobs[0].prompt_logprobs == 1
        told = [entry for e in found if isinstance(e, TextDelta) for entry in e.logprobs]
        assert [entry.text for entry in told] == [*"abcxy"]
        assert [entry.logprob for entry in told] == [None, -0.5, -0.5, -0.25, -0.25]
        assert text_of(found) == "abcxy"

    def test_its_logprobs_are_spelled_beside_the_event_loop(
        self, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A prompt of ten thousand tokens has two hundred thousand rivals."""
        spelled: list[int] = []

        def noting(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
            spelled.append(threading.get_ident())
            return build_token_logprob(tokenizer, token)

        monkeypatch.setattr(generation, "build_token_logprob", noting)
        events(files, Lines("xy"), prompt="abc", echo=True, top_logprobs=1)
        assert len(spelled) == 3
        assert threading.get_ident() not in spelled

    def test_a_long_one_comes_in_pieces(self, files: ModelFiles) -> None:
        """16,000 tokens with 20 rivals each were one event, written on the event loop: 1.2 s."""
        prompt = "abcdefg" * 100
        found = events(files, Lines("xy"), prompt=prompt, echo=True, top_logprobs=1)
        pieces = [event for event in found if isinstance(event, TextDelta)]
        assert max(len(piece.logprobs) for piece in pieces) == 128
        assert all(piece.text for piece in pieces), "a stream holds back what has no text"
        told = [entry for piece in pieces for entry in piece.logprobs]
        assert "".join(entry.text for entry in told) == prompt + "xy"
        assert [entry.logprob for entry in told] == [None, *[-0.5] * 699, -0.25, -0.25]
        assert text_of(found) == prompt + "xy"

    @pytest.mark.parametrize("top", [None, 0])
    def test_alone_it_is_all_there_is(self, files: ModelFiles, top: int | None) -> None:
        runner = Lines("never seen")
        found = events(files, runner, prompt="abc", echo=True, max_tokens=0, top_logprobs=top)
        assert text_of(found) == "abc"
        assert runner.jobs[0].max_tokens == 1
        end = finishes(found)[0]
        assert (end.reason, end.usage.completion_tokens) == ("length", 0)


class TestCallsAndReasoning:
    """A model whose template speaks Hermes."""

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
    def test_an_answer_with_calls_ends_for_them_unless_it_was_cut(
        self, hermes: ModelFiles, limit: int | None, reason: str
    ) -> None:
        runner = Lines(self.CALL)
        asked = {"prompt": SPEAKS, "tools": (self.PAINT,), "max_tokens": limit}
        found = events(hermes, runner, **asked)
        assert [e.name for e in found if isinstance(e, ToolCallDelta) and e.name] == ["paint"]
        assert finishes(found)[0].reason == reason
        assert text_of(found) == ""

    def test_reasoning_is_told_apart_and_counted(self, hermes: ModelFiles) -> None:
        found = events(hermes, Lines("<think>hm</think>yes"), prompt=SPEAKS)
        assert "".join(e.text for e in found if isinstance(e, ReasoningDelta)) == "hm"
        assert text_of(found) == "yes"
        assert finishes(found)[0].usage.reasoning_tokens == len("<think>hm")

    def test_choices_are_read_each_for_itself(self, hermes: ModelFiles) -> None:
        runner = Lines(self.CALL, "<think>hm</think>yes", "no")
        found = events(hermes, runner, prompt=SPEAKS, tools=(self.PAINT,), n=3)
        ends = finishes(found)
        assert [ends[n].reason for n in range(3)] == ["tool_calls", "stop", "stop"]
        assert [spoken(found, n) for n in range(3)] == ["", "yes", "no"]
        assert {e.choice for e in found if isinstance(e, ToolCallDelta)} == {0}
        assert {e.choice for e in found if isinstance(e, ReasoningDelta)} == {1}

    @pytest.mark.parametrize("field", [{"min_tokens": 3}, {"ignore_eos": True}])
    def test_what_must_not_end_cannot_follow_a_grammar(
        self, hermes: ModelFiles, field: dict[str, Any]
    ) -> None:
        """The dialect does not see the grammar that is made of strict tools."""
        strict = replace(self.PAINT, strict=True)
        error = refusal(hermes, prompt=SPEAKS, tools=(strict,), **field)
        assert (error.kind, error.param) == (ErrorKind.INVALID, next(iter(field)))


def test_the_fingerprint_changes_with_what_changes_answers(files: ModelFiles) -> None:
    def told(files: ModelFiles, settings: Settings = PLAIN) -> str:
        return compute_fingerprint(files, settings)

    assert told(files) == told(files)
    others = {
        told(replace(files, config={**files.config, "rms_norm_eps": 1e-6})),
        told(replace(files, name="other")),
        told(replace(files, weights_digest="other")),
        told(files, Settings(parallel=3)),
    }
    assert len({told(files), *others}) == 5


@pytest.mark.parametrize(
    ("cache", "least", "most"),
    [
        # all but what does not fill a block of the tree
        ("radix", 450, 450 + 3 * 128),
        # one after the other, each behind what the last left
        ("single", 450, 450 + 3),
        # lends nothing of what runs beside it
        ("slots", 4 * 450, 4 * 450),
    ],
)
def test_choices_share_their_prompt_as_far_as_the_cache_can(
    files: ModelFiles, cache: Any, least: int, most: int
) -> None:
    async def count() -> EngineStats:
        settings = Settings(cache=cache, parallel=1 if cache == "single" else 4, context=512)
        runner = ThreadRunner(settings)
        await runner.start(files)
        try:
            engine = Admission(runner, settings.max_queue)
            generation = Generation(files, engine, settings)
            asked = request(prompt=tuple(n % 256 for n in range(450)), n=4, max_tokens=8)
            async with generation.open(asked) as stream:
                async for _ in stream:
                    pass
            return runner.status().stats
        finally:
            await runner.stop()

    stats = asyncio.run(count())
    assert stats.cached_tokens + stats.prefilled_tokens == 4 * 450
    assert least <= stats.prefilled_tokens <= most
