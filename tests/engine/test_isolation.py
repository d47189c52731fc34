"""The isolation matrix: every kind of request beside every other, in every order.

Peers mix answers between requests, lose penalties after a plain request, sample a batch with the
parameters of its first row. Here each answer must be the one that the request gets alone, on a
fresh engine, whoever comes, goes or hangs up around it.
"""

import random
from functools import cache
from itertools import combinations_with_replacement
from typing import Any

import pytest

from app.core.jobs import Job
from app.core.requests import JsonSchema
from models.base import Model
from tests.engine import hybrid
from tests.engine.harness import (
    Outcome,
    ScheduledJob,
    assert_same,
    job,
    make_loop,
    run_schedule,
    tiny_model,
)

pytestmark = pytest.mark.no_cover  # a matrix: see tests/conftest.py

SHARED = tuple(b"a system prompt that all of them share. ")
LENGTH = 16

# what a request may ask for; each must change the answer, or the matrix proves nothing
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.2, "seed": 11},
    "seed": {"temperature": 1.2, "seed": 12},
    "top_k": {"temperature": 1.5, "top_k": 6, "seed": 13},
    "top_p": {"temperature": 1.5, "top_p": 0.7, "seed": 14},
    "min_p": {"temperature": 1.8, "min_p": 0.1, "seed": 15},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5, "repeat_last_n": 12},
    "logit_bias": {"logit_bias": ((65, 12.0), (66, -100.0))},
    "logprobs": {"top_logprobs": 3},
    "max_tokens": {"max_tokens": 3},
    "stop": {"stop_token_ids": None},  # see asked
    "grammar": {"grammar": JsonSchema(text='{"type": "object"}'), "temperature": 1.2, "seed": 16},
}

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
CROWD = 5


def asked(name: str, feature: str, kind: str) -> Job:
    """A request with one feature, behind the prompt that all share. Outcomes can only be compared
    where logprobs come along, so all ask for some."""
    changes = {"max_tokens": LENGTH, "top_logprobs": 2, "stop_token_ids": frozenset[int]()}
    changes |= FEATURES[feature]
    if feature == "stop":
        changes["stop_token_ids"] = frozenset({unstopped(kind)[5]})
    return job(name, prompt(feature), **changes)


@cache
def unstopped(kind: str) -> list[int]:
    """What the request that stops would say if nothing stopped it."""
    endless = job("p", prompt("stop"), max_tokens=LENGTH, stop_token_ids=frozenset[int]())
    return run_schedule(make_loop(model_of(kind)), [ScheduledJob(job=endless)])["p"].ids


def prompt(feature: str) -> tuple[int, ...]:
    return (*SHARED, *feature.encode())


@cache
def model_of(kind: str) -> Model:
    return MODELS[kind]()


@cache
def alone(kind: str, feature: str) -> Outcome:
    """Its answer on a fresh engine with nobody else."""
    return run_schedule(make_loop(model_of(kind)), [ScheduledJob(job=asked("it", feature, kind))])[
        "it"
    ]


def visits(kind: str, pair: tuple[str, str], rng: random.Random) -> list[ScheduledJob]:
    """The two of the pair several times over, among others that come and hang up."""
    crowd = [*pair, *pair, *rng.choices(sorted(FEATURES), k=2)]
    rng.shuffle(crowd)
    made = [
        ScheduledJob(job=asked(f"{i} {feature}", feature, kind), at=rng.randrange(24))
        for i, feature in enumerate(crowd)
    ]
    for i in range(2):
        comes = rng.randrange(24)
        made.append(
            ScheduledJob(
                job=asked(f"gone {i}", rng.choice(sorted(FEATURES)), kind),
                at=comes,
                cancelled_at=comes + rng.randrange(1, 16),
            )
        )
    return made


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("llama", "radix"), ("hybrid", "radix"), ("llama", "multi_user"), ("hybrid", "slots")],
)
def test_every_pair_of_requests_leaves_each_other_alone(
    kind: str, policy: str, ties: list[int]
) -> None:
    model = model_of(kind)
    for pair in combinations_with_replacement(FEATURES, 2):
        rng = random.Random(f"{kind} {policy} {pair}")
        loop = make_loop(model, running=CROWD, policy=policy, chunk=16)
        together = run_schedule(loop, visits(kind, pair, rng))
        for name, outcome in together.items():
            number, feature = name.split()
            if number != "gone":
                ties.append(assert_same(outcome, alone(kind, feature)))


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_each_feature_changes_the_answer(kind: str) -> None:
    """Without this the matrix could not fail: every feature's answer is not the greedy one's for
    the same prompt."""
    model = model_of(kind)
    for feature in sorted(set(FEATURES) - {"greedy", "logprobs"}):
        plain = job("plain", prompt(feature), max_tokens=LENGTH, stop_token_ids=frozenset[int]())
        greedy = run_schedule(make_loop(model), [ScheduledJob(job=plain)])["plain"]
        assert alone(kind, feature).ids != greedy.ids, feature
