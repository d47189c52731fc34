"""Observers of a request: the events that they receive, and the notification of the end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    ModelLoading,
    PrefillProgress,
    PromptTokenIds,
    ReasoningDelta,
    ToolCallDelta,
)
from app.core.request_lifecycle import ObservedGenerate, count_choices
from app.core.requests import Embeddings, EmbedInput, EmbedRequest, GenerateRequest, PromptBatch
from tests.fakes import CARD, FOREVER, FakeGenerate, FakeModel, Script, finish, text

MODEL = FakeModel()
BROKEN = AppError(ErrorKind.ENGINE, "it broke")
EMBED = EmbedRequest(model=CARD.id, inputs=(EmbedInput(content="x", param="input"),))

think = ReasoningDelta(text="hm")
call = ToolCallDelta(call_index=0, id="call_1", name="f")


@dataclass
class Observer:
    """Implements `RequestObserver`: records its calls. calls: names of the methods, in order."""

    request: GenerateRequest | EmbedRequest
    events: list[Event] = field(default_factory=list[Event])
    calls: list[str] = field(default_factory=list[str])
    errors: list[Exception] = field(default_factory=list[Exception])
    embeddings: Embeddings | None = None
    complete: bool | None = None

    def on_event(self, event: Event) -> None:
        self.calls.append("event")
        self.events.append(event)

    def on_embeddings(self, found: Embeddings) -> None:
        self.calls.append("embeddings")
        self.embeddings = found

    def on_error(self, error: Exception) -> None:
        self.calls.append("error")
        self.errors.append(error)

    def on_end(self, *, complete: bool) -> None:
        self.calls.append("end")
        self.complete = complete


class ObserverFactory:
    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def __call__(self, request: GenerateRequest | EmbedRequest) -> Observer:
        self.observers.append(Observer(request))
        return self.observers[-1]


async def read(events: AsyncIterator[Sequence[Event]], count: int | None = None) -> list[Event]:
    """All events, or the first `count`."""
    received: list[Event] = []
    while count is None or len(received) < count:
        try:
            received += await anext(events)
        except StopAsyncIteration:
            break
    return received


def observe(
    script: Script = (),
    count: int | None = None,
    *,
    open_error: Exception | None = None,
    **fields: Any,
) -> tuple[Observer, list[Event]]:
    """The observer of one request, and the events that its client received. count: number of events
    after which the client disconnects."""
    request = GenerateRequest(**{"model": CARD.id, "prompt": "hi", **fields})
    factory = ObserverFactory()
    received: list[Event] = []

    async def run() -> None:
        generate = FakeGenerate(script, open_error=open_error)
        observed = ObservedGenerate(generate, factory, factory)
        with suppress(AppError, KeyError):
            async with observed.open(request, MODEL) as events:
                received.extend(await read(events, count))

    asyncio.run(run())
    first, second = factory.observers
    assert first == second, "all observers receive the same calls"
    assert first.request is request
    assert first.calls[-1] == "end"
    assert first.calls.count("end") == 1
    return first, received


@pytest.mark.parametrize("first", [text(""), text("a"), think, call])
def test_only_the_first_delta_of_a_choice_is_observed(first: Any):
    script = [first, text("b"), think, call, replace(call, arguments="{}"), text("c"), finish()]
    observer, events = observe(script)
    assert events == script
    assert observer.events == [first, finish()]


def test_each_choice_has_a_first_delta():
    def with_choice(choice: int, event: Any) -> Any:
        return replace(event, choice=choice)

    script = [
        with_choice(1, text("a")),
        with_choice(0, think),
        with_choice(1, text("b")),
        with_choice(0, finish()),
        with_choice(2, call),
        with_choice(2, text("c")),
        with_choice(1, finish("length")),
        with_choice(2, finish()),
    ]
    observer, events = observe(script, n=3)
    assert events == script
    assert observer.events == [script[0], script[1], script[3], script[4], *script[6:]]
    assert observer.complete


def test_every_event_except_deltas_is_observed():
    script = [
        ModelLoading(progress=0, queued=True),
        ModelLoading(progress=1),
        ModelLoading(progress=1),
        PrefillProgress(computed_tokens=1, total_tokens=3),
        PromptTokenIds(token_ids=(1, 2, 3)),
        PrefillProgress(computed_tokens=3, total_tokens=3),
        PromptTokenIds(prompt_index=1, token_ids=(1,)),
        text("a"),
        PrefillProgress(prompt_index=1, computed_tokens=1, total_tokens=1),
        finish(),
        replace(finish(), choice=1, prompt_index=1),
    ]
    observer, events = observe(script, prompt=PromptBatch(prompts=("abc", "a")))
    assert observer.events == events == script
    assert observer.complete


def test_observers_are_not_called_for_each_delta():
    observer, events = observe([*[text("a")] * 1000, finish()])
    assert len(events) == 1001
    assert observer.calls == ["event", "event", "end"]


def test_a_request_is_complete_when_all_its_choices_have_finished():
    fields: dict[str, Any] = {"n": 2, "prompt": PromptBatch(prompts=("a", "b"))}
    assert count_choices(GenerateRequest(model=CARD.id, **fields)) == 4
    for finished, complete in ((3, False), (4, True)):
        script = [replace(finish(), choice=choice) for choice in range(finished)]
        observer, _ = observe(script, **fields)
        assert observer.complete is complete


def test_a_disconnect_leaves_the_request_incomplete_without_an_error():
    observer, _ = observe([text("a"), FOREVER], count=1)
    assert (observer.calls, observer.complete) == (["event", "end"], False)


def test_a_rejected_request_is_an_error_without_events():
    observer, _ = observe(open_error=BROKEN)
    assert (observer.calls, observer.errors) == (["error", "end"], [BROKEN])
    assert observer.complete is False


@pytest.mark.parametrize("error", [BROKEN, KeyError("a")])
def test_an_error_between_events_is_observed(error: Exception):
    observer, events = observe([text("a"), error])
    assert events == []
    assert observer.calls[:2] == ["event", "error"]
    assert set(observer.errors) == {error}
    assert observer.complete is False


def test_an_error_that_the_reader_handles_is_observed_too():
    """A streaming response sends the error to its client and leaves the context normally."""
    factory = ObserverFactory()

    async def run() -> None:
        observed = ObservedGenerate(FakeGenerate([text("a"), BROKEN]), factory)
        async with observed.open(GenerateRequest(model=CARD.id, prompt="hi"), MODEL) as events:
            with suppress(AppError):
                await read(events)

    asyncio.run(run())
    assert factory.observers[0].calls == ["event", "error", "end"]


def test_embeddings_are_observed():
    factory = ObserverFactory()

    async def run() -> None:
        embeddings = await ObservedGenerate(FakeGenerate(), factory).embed(EMBED, MODEL)
        assert factory.observers[0].embeddings is embeddings
        with pytest.raises(AppError):
            await ObservedGenerate(FakeGenerate(open_error=BROKEN), factory).embed(EMBED, MODEL)

    asyncio.run(run())
    done, failed = factory.observers
    assert (done.calls, done.complete) == (["embeddings", "end"], True)
    assert (failed.calls, failed.complete) == (["error", "end"], False)


def test_cancelled_embeddings_are_incomplete_without_an_error():
    factory = ObserverFactory()

    class Endless(FakeGenerate):
        async def embed(self, request: Any, model: Any) -> Embeddings:
            return await asyncio.get_running_loop().create_future()

    async def run() -> None:
        task = asyncio.create_task(ObservedGenerate(Endless(), factory).embed(EMBED, MODEL))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert (factory.observers[0].calls, factory.observers[0].complete) == (["end"], False)


def test_the_model_is_passed_on():
    """Observers receive the request; the wrapped generator receives the resolved model."""
    models: list[Any] = []

    class RecordingGenerate(FakeGenerate):
        def open(self, request: Any, model: Any) -> Any:
            models.append(model)
            return FakeGenerate.open(self, request, model)

        async def embed(self, request: Any, model: Any) -> Embeddings:
            models.append(model)
            return await FakeGenerate.embed(self, request, model)

    async def run() -> None:
        observed = ObservedGenerate(RecordingGenerate())
        async with observed.open(GenerateRequest(model=CARD.id, prompt="hi"), MODEL):
            pass
        await observed.embed(EMBED, MODEL)

    asyncio.run(run())
    assert [model is MODEL for model in models] == [True, True]
