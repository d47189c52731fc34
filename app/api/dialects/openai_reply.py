"""OpenAI's answers: what chat completions and completions have in common, whole and streamed.

Knows the envelope that chunks and bodies share, how a stream ends, and how what was said of each
choice is put together. Must not know: the shape of a choice, or how a request looked, beyond what
its answer has to repeat.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.dialects.openai_counts import Tally, usage_object
from app.api.wire import JsonObject, envelope, event_frame
from app.core.errors import AppError
from app.core.events import (
    CallDelta,
    Finish,
    Prompt,
    ReasoningDelta,
    Spoken,
    TextDelta,
    TokenLogprob,
)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What an answer repeats of its request and of the server. created: Unix time. prompts: how
    many. n: choices of each that are told, made: that are generated. logprobs, ids: whether they
    were asked for. echo: whether answers begin with their prompts. include_usage: whether a stream
    ends with token counts. running_usage: whether each chunk has the counts of its choice so far.
    tier: the service tier, where one was named."""

    id: str
    created: int
    model: str
    fingerprint: str
    prompts: int = 1
    n: int = 1
    made: int = 1
    logprobs: bool = False
    ids: bool = False
    echo: bool = False
    include_usage: bool = False
    running_usage: bool = False
    tier: str | None = None


# Streamed


class Chunks:
    """Frames of a streamed answer. The choices' chunks come as what they say comes, in any order
    beside each other. The counters of all stand in the chunk with the last choice's end."""

    def __init__(self, head: Head, kind: str) -> None:
        self.head = head
        self.prompts: dict[int, Sequence[int]] = {}  # the ids of each
        self._kind = kind
        self._tally = Tally()
        self._sampled: Counter[int] = Counter()  # tokens of each choice so far

    def speak(self, event: TextDelta | ReasoningDelta | CallDelta) -> list[JsonObject]:
        """What a choice is given, chunk by chunk."""
        raise NotImplementedError

    def close(self, event: Finish) -> JsonObject:
        """A choice with its end, and with whatever was held back."""
        raise NotImplementedError

    def more(self) -> JsonObject:
        """Keys of the next chunk, beside its choice."""
        return {}

    def feed(self, event: Spoken) -> bytes:
        match event:
            case Prompt():
                self.prompts[event.prompt] = event.ids
                return b""
            case Finish():
                self._tally.add(event)
                self._sampled[event.choice] = event.usage.completion_tokens
                counters = self._tally.counters() if self._all_finished else {}
                return self._frame([self.close(event)], counters)
            case _:
                if isinstance(event, TextDelta):
                    self._sampled[event.choice] += len(event.ids)
                return b"".join(self._frame([choice], {}) for choice in self.speak(event))

    def end(self) -> bytes:
        assert self._all_finished, "an answer ended without Finish"
        if not self.head.include_usage:
            return DONE
        return self._frame([], {"usage": usage_object(self._tally.usage)}) + DONE

    def fail(self, error: AppError) -> bytes:
        return event_frame(envelope(error)) + DONE

    @property
    def _all_finished(self) -> bool:
        return self._tally.finished == self.head.prompts * self.head.made

    def _frame(self, choices: list[JsonObject], extra: JsonObject) -> bytes:
        chunk = {**heading(self.head, self._kind), **self.more(), "choices": choices}
        if self.head.running_usage and choices:
            chunk["usage"] = self._usage_so_far(choices[0]["index"])
        elif self.head.include_usage:
            chunk["usage"] = None
        return event_frame(chunk | extra)

    def _usage_so_far(self, choice: int) -> JsonObject:
        """As vLLM counts: of this choice and its prompt alone."""
        prompt, sampled = len(self.prompts[choice // self.head.made]), self._sampled[choice]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }


@dataclass(slots=True)
class Held:
    """What waits for the next chunk of a choice: log-probabilities and ids of tokens whose text is
    still to come, or is no part of the answer."""

    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    ids: list[int] = field(default_factory=list[int])

    def add(self, event: TextDelta) -> None:
        self.logprobs += event.logprobs
        self.ids += event.ids

    def take(self) -> "Held":
        taken = Held(self.logprobs, self.ids)
        self.logprobs, self.ids = [], []
        return taken


# Whole


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


class Said:
    """All that was said of one choice."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.held = Held()
        self.finish: Finish | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def end(self) -> Finish:
        assert self.finish is not None, "a choice without an end"
        return self.finish

    def add(self, event: TextDelta | ReasoningDelta | CallDelta | Finish) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
                self.held.add(event)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case CallDelta():
                if event.id is not None:
                    assert event.name is not None
                    self.calls.append(Call(event.id, event.name))
                self.calls[event.call].arguments += event.arguments
            case Finish():
                self.finish = event


@dataclass(frozen=True, slots=True)
class Whole:
    """A fold over everything that was said. choices: by number. prompts: the ids of each, where
    they were asked for."""

    choices: Mapping[int, Said]
    prompts: Mapping[int, Sequence[int]]
    tally: Tally

    @staticmethod
    def of(events: Sequence[Spoken]) -> "Whole":
        choices: dict[int, Said] = {}
        prompts: dict[int, Sequence[int]] = {}
        tally = Tally()
        for event in events:
            if isinstance(event, Prompt):
                prompts[event.prompt] = event.ids
                continue
            choices.setdefault(event.choice, Said()).add(event)
            if isinstance(event, Finish):
                tally.add(event)
        return Whole(choices, prompts, tally)

    def told(self, head: Head) -> list[Said]:
        """The choices that the answer has, in its order: of each prompt the likeliest, if more
        were made than are told."""
        told: list[Said] = []
        for first in range(0, head.prompts * head.made, head.made):
            made = [self.choices[first + place] for place in range(head.made)]
            if head.n < head.made:
                made.sort(key=lambda said: _likelihood(said, echo=head.echo), reverse=True)
            told += made[: head.n]
        return told


def _likelihood(said: Said, *, echo: bool) -> float:
    """The mean log-probability of what was sampled, which is OpenAI's measure. Behind all others
    where nothing was."""
    prompt = said.end.usage.prompt_tokens if echo else 0
    sampled = [token.logprob for token in said.held.logprobs[prompt:] if token.logprob is not None]
    return sum(sampled) / len(sampled) if sampled else -math.inf


def body(head: Head, kind: str, whole: Whole, choices: list[JsonObject]) -> JsonObject:
    return {
        **heading(head, kind),
        "choices": choices,
        "usage": usage_object(whole.tally.usage),
        **whole.tally.counters(),
    }


def heading(head: Head, kind: str) -> dict[str, Any]:
    told = {} if head.tier is None else {"service_tier": head.tier}
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        **told,
    }
