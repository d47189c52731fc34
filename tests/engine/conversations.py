"""Random request histories for one model, sequential and concurrent.

Requests build on each other: a chat continues, branches from an earlier request at any position,
or repeats it. The expected answers are computed first, on a fresh engine with an empty cache, so
a history is the same for every policy.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.core.jobs import Job
from models.base import Model
from tests.engine.harness import Outcome, ScheduledJob, job, make_loop, run_schedule

KINDS = ("continues", "branches", "repeats", "resamples", "begins")
WEIGHTS = (6, 5, 2, 2, 1)

# number of ids of the system prompt, a question and an answer; a prompt has LONGEST at most
SYSTEM, QUESTION, ANSWER, LONGEST = 15, (2, 17), (2, 9), 120
# steps between two requests, and up to a cancellation; after QUIET steps all requests have ended
PAUSE, PATIENCE, QUIET = (0, 14), (1, 9), 60
# the last two requests are a chat without concurrent requests
REQUESTS, CANCELLED = 14, 3


@dataclass(frozen=True, kw_only=True)
class ExpectedAnswer:
    """A request, and its answer from a fresh engine. kind: how the prompt was made."""

    kind: str
    scheduled: ScheduledJob
    alone: Outcome

    @property
    def prompt(self) -> tuple[int, ...]:
        job = self.scheduled.job
        assert isinstance(job, Job)
        return job.prompt_token_ids

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.alone.ids)

    def expected(self, got: Outcome) -> Outcome:
        """The same answer, cut to the tokens before a cancellation."""
        if self.scheduled.cancelled_at is None or got.reason != "cancelled":
            return self.alone
        return replace(self.alone, tokens=self.alone.tokens[: len(got.tokens)], reason=got.reason)


def random_history(model: Model, vocab: int, rng: random.Random) -> list[ExpectedAnswer]:
    """At least one request of each kind; half of them sampled, the others greedy, each with the
    logprobs of all ids. The highest id ends a turn."""
    end = vocab - 1
    system = (*_text(rng, (SYSTEM, SYSTEM), end), end)
    kinds = [*KINDS, *rng.choices(KINDS, WEIGHTS, k=REQUESTS - len(KINDS) - 3)]
    rng.shuffle(kinds)
    cancelled = rng.sample(range(REQUESTS - 2), CANCELLED)
    history: list[ExpectedAnswer] = []
    at = 0
    for number, kind in enumerate(["begins", *kinds, "begins", "continues"]):
        alone = number >= REQUESTS - 2
        at += QUIET if alone else rng.randint(*PAUSE)
        if kind == "begins":
            prompt = (*system, *_text(rng, QUESTION, end), end)
        else:
            prompt = _extend_prompt(
                rng, kind, history[-1] if alone else _choose_earlier(rng, history), end
            )
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": number} if rng.random() < 0.5 else {}
        request = job(
            f"{number} {kind}",
            prompt,
            max_tokens=rng.randint(*ANSWER),
            stop_token_ids=frozenset({end}),
            top_logprobs=vocab,
            **sampled,
        )
        cancelled_at = at + rng.randint(*PATIENCE) if number in cancelled else None
        scheduled = ScheduledJob(job=request, at=at, cancelled_at=cancelled_at)
        history.append(
            ExpectedAnswer(
                kind=kind, scheduled=scheduled, alone=answer_alone(model, vocab, scheduled)
            )
        )
    return history


def answer_alone(model: Model, vocab: int, scheduled: ScheduledJob) -> Outcome:
    """The answer of an engine with an empty cache."""
    [outcome] = run_schedule(
        make_loop(model, vocab=vocab), [ScheduledJob(job=scheduled.job)]
    ).values()
    assert outcome.cached == 0
    return outcome


def _choose_earlier(rng: random.Random, history: Sequence[ExpectedAnswer]) -> ExpectedAnswer:
    """Prefers recent requests, which may still be running."""
    back = min(rng.randrange(len(history)), rng.randrange(len(history)))
    return history[-1 - back]


def _extend_prompt(
    rng: random.Random, kind: str, earlier: ExpectedAnswer, end: int
) -> tuple[int, ...]:
    question = (*_text(rng, QUESTION, end), end)
    match kind:
        case "continues" if len(earlier.ids) + QUESTION[1] + 2 <= LONGEST:
            return (*earlier.ids, end, *question)
        case "continues" | "branches":
            return (*earlier.ids[: rng.randrange(1, len(earlier.ids))], *question)
        case _:
            return earlier.prompt


def _text(rng: random.Random, length: tuple[int, int], end: int) -> tuple[int, ...]:
    return tuple(rng.randrange(end) for _ in range(rng.randint(*length)))
