"""The isolation matrix: every kind of request concurrent with every other, in every order.

Other servers mix up answers, lose penalties after a plain request, or sample a batch with the
parameters of its first row. Each answer must equal the one that the request gets alone, on a
fresh engine, even if other requests start, end or are cancelled meanwhile.
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

# parameters of a request; each must change the answer, or the matrix proves nothing
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
    "allowed": {"allowed_token_ids": tuple(range(64, 96))},
    "bad_words": {"bad_words": (*((id_,) for id_ in range(0, 256, 2)), (65, 67))},
    "logit_bias": {"logit_bias": ((65, 12.0), (66, -100.0))},
    "logprobs": {"top_logprobs": 3},
    "max_tokens": {"max_tokens": 3},
    "stop": {"stop_token_ids": None},  # see make_job
    "grammar": {"grammar": JsonSchema(text='{"type": "object"}'), "temperature": 1.2, "seed": 16},
}

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
MAX_RUNNING = 5


def make_job(name: str, feature: str, kind: str) -> Job:
    """A request with one feature, after the shared prompt. All requests have logprobs, because
    outcomes are compared by them."""
    changes = {"max_tokens": LENGTH, "top_logprobs": 2, "stop_token_ids": frozenset[int]()}
    changes |= FEATURES[feature]
    if feature == "stop":
        changes["stop_token_ids"] = frozenset({run_without_stop(kind)[5]})
    return job(name, prompt(feature), **changes)


@cache
def run_without_stop(kind: str) -> list[int]:
    """The tokens of the request with a stop token, without that token."""
    endless = job("p", prompt("stop"), max_tokens=LENGTH, stop_token_ids=frozenset[int]())
    return run_schedule(make_loop(model_of(kind)), [ScheduledJob(job=endless)])["p"].ids


def prompt(feature: str) -> tuple[int, ...]:
    return (*SHARED, *feature.encode())


@cache
def model_of(kind: str) -> Model:
    return MODELS[kind]()


@cache
def run_alone(kind: str, feature: str) -> Outcome:
    """The answer of a fresh engine without other requests."""
    return run_schedule(
        make_loop(model_of(kind)), [ScheduledJob(job=make_job("it", feature, kind))]
    )["it"]


def make_schedule(kind: str, pair: tuple[str, str], rng: random.Random) -> list[ScheduledJob]:
    """The pair twice and two random requests, and two more that are cancelled."""
    features = [*pair, *pair, *rng.choices(sorted(FEATURES), k=2)]
    rng.shuffle(features)
    schedule = [
        ScheduledJob(job=make_job(f"{i} {feature}", feature, kind), at=rng.randrange(24))
        for i, feature in enumerate(features)
    ]
    for i in range(2):
        start = rng.randrange(24)
        schedule.append(
            ScheduledJob(
                job=make_job(f"gone {i}", rng.choice(sorted(FEATURES)), kind),
                at=start,
                cancelled_at=start + rng.randrange(1, 16),
            )
        )
    return schedule


@pytest.mark.product
@pytest.mark.parametrize(
    ("kind", "policy"),
    [("llama", "radix"), ("hybrid", "radix"), ("llama", "multi_user"), ("hybrid", "slots")],
)
def test_no_pair_of_requests_affects_each_other(kind: str, policy: str, ties: list[int]) -> None:
    model = model_of(kind)
    for pair in combinations_with_replacement(FEATURES, 2):
        rng = random.Random(f"{kind} {policy} {pair}")
        loop = make_loop(model, running=MAX_RUNNING, policy=policy, chunk=16)
        together = run_schedule(loop, make_schedule(kind, pair, rng))
        for name, outcome in together.items():
            number, feature = name.split()
            if number != "gone":
                ties.append(assert_same(outcome, run_alone(kind, feature)))


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_each_feature_changes_the_answer(kind: str) -> None:
    """Without this the matrix could not fail: no feature's answer equals the greedy answer to the
    same prompt."""
    model = model_of(kind)
    for feature in sorted(set(FEATURES) - {"greedy", "logprobs"}):
        plain = job("plain", prompt(feature), max_tokens=LENGTH, stop_token_ids=frozenset[int]())
        greedy = run_schedule(make_loop(model), [ScheduledJob(job=plain)])["plain"]
        assert run_alone(kind, feature).ids != greedy.ids, feature
