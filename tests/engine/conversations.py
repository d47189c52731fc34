"""What several people may ask of one model, one after the other and at the same time.

Requests grow out of one another: a chat goes on, parts from an earlier one at any place, asks
again. What each must be answered is found first, on a fresh engine that has seen nothing; so a
history is the same for every policy.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.core.jobs import Job
from models.base import Model
from tests.engine.harness import Outcome, ScheduledJob, job, make_loop, run_schedule

KINDS = ("goes on", "parts", "asks again", "draws again", "begins")
WEIGHTS = (6, 5, 2, 2, 1)

# ids of the prompt that all begin with, of a question, of an answer; a prompt has LONGEST at most
SYSTEM, ASKED, ANSWER, LONGEST = 15, (2, 17), (2, 9), 120
# steps between two requests, and until one is cancelled; in QUIET of them all that run have ended
PAUSE, PATIENCE, QUIET = (0, 14), (1, 9), 60
# the last two of the requests are a chat that nobody comes into
REQUESTS, CANCELLED = 14, 3


@dataclass(frozen=True, kw_only=True)
class ExpectedAnswer:
    """A request, and what a fresh engine answers it. kind: how its prompt came about."""

    kind: str
    visit: ScheduledJob
    alone: Outcome

    @property
    def prompt(self) -> tuple[int, ...]:
        job = self.visit.job
        assert isinstance(job, Job)
        return job.prompt_token_ids

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.alone.ids)

    def expected(self, got: Outcome) -> Outcome:
        """The same answer; of one that was cancelled, as much as came before."""
        if self.visit.cancelled_at is None or got.reason != "cancelled":
            return self.alone
        return replace(self.alone, tokens=self.alone.tokens[: len(got.tokens)], reason=got.reason)


def random_history(model: Model, vocab: int, rng: random.Random) -> list[ExpectedAnswer]:
    """One request of each kind at least; half of them sampled, the others greedy, each with the
    logprobs of all ids. The highest id ends a turn."""
    end = vocab - 1
    system = (*_text(rng, (SYSTEM, SYSTEM), end), end)
    kinds = [*KINDS, *rng.choices(KINDS, WEIGHTS, k=REQUESTS - len(KINDS) - 3)]
    rng.shuffle(kinds)
    cancelled = rng.sample(range(REQUESTS - 2), CANCELLED)
    told: list[ExpectedAnswer] = []
    at = 0
    for number, kind in enumerate(["begins", *kinds, "begins", "goes on"]):
        alone = number >= REQUESTS - 2
        at += QUIET if alone else rng.randint(*PAUSE)
        if kind == "begins":
            prompt = (*system, *_text(rng, ASKED, end), end)
        else:
            prompt = _grown(rng, kind, told[-1] if alone else _earlier(rng, told), end)
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": number} if rng.random() < 0.5 else {}
        asked = job(
            f"{number} {kind}",
            prompt,
            max_tokens=rng.randint(*ANSWER),
            stop_token_ids=frozenset({end}),
            top_logprobs=vocab,
            **sampled,
        )
        leaves = at + rng.randint(*PATIENCE) if number in cancelled else None
        visit = ScheduledJob(job=asked, at=at, cancelled_at=leaves)
        told.append(ExpectedAnswer(kind=kind, visit=visit, alone=answer_alone(model, vocab, visit)))
    return told


def answer_alone(model: Model, vocab: int, visit: ScheduledJob) -> Outcome:
    """Its answer from an engine that has seen nothing, and caches nothing in between."""
    [outcome] = run_schedule(make_loop(model, vocab=vocab), [ScheduledJob(job=visit.job)]).values()
    assert outcome.cached == 0
    return outcome


def _earlier(rng: random.Random, told: Sequence[ExpectedAnswer]) -> ExpectedAnswer:
    """Mostly of the last ones: these may still be running."""
    back = min(rng.randrange(len(told)), rng.randrange(len(told)))
    return told[-1 - back]


def _grown(rng: random.Random, kind: str, earlier: ExpectedAnswer, end: int) -> tuple[int, ...]:
    question = (*_text(rng, ASKED, end), end)
    match kind:
        case "goes on" if len(earlier.ids) + ASKED[1] + 2 <= LONGEST:
            return (*earlier.ids, end, *question)
        case "goes on" | "parts":
            return (*earlier.ids[: rng.randrange(1, len(earlier.ids))], *question)
        case _:
            return earlier.prompt


def _text(rng: random.Random, length: tuple[int, int], end: int) -> tuple[int, ...]:
    return tuple(rng.randrange(end) for _ in range(rng.randint(*length)))
