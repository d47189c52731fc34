"""The isolation matrix: every kind of request concurrent with every other, in every order.

Other servers mix up answers, lose penalties after a plain request, or sample a batch with the
parameters of its first row. Each answer must equal the one that the request gets alone, on a
fresh engine, even if other requests start, end or are cancelled while it runs.
"""

import random
from collections.abc import Set
from functools import cache
from itertools import product
from typing import Any

import pytest

from app.core.jobs import Ended, Job, Started
from app.core.requests import JsonSchema
from app.engine.loop import Loop
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

pytestmark = [pytest.mark.no_cover, pytest.mark.recorded]  # a matrix: see tests/conftest.py

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

# pairs in a schedule, and the steps in which its requests arrive
PAIRS, SPAN = 6, 20

# the feature of a request, and that of one that starts while the first one is running
Pair = tuple[str, str]


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


def make_schedule(kind: str, missing: Set[Pair], rng: random.Random) -> list[ScheduledJob]:
    """Some of the missing pairs, whose requests arrive shortly one after the other, and two random
    requests that are cancelled."""
    schedule = list[ScheduledJob]()
    for pair in rng.sample(sorted(missing), k=min(PAIRS, len(missing))):
        at = rng.randrange(SPAN)
        for feature in pair:
            name = f"{len(schedule)} {feature}"
            schedule.append(ScheduledJob(job=make_job(name, feature, kind), at=at))
            at += rng.randrange(3)
    for i in range(2):
        start = rng.randrange(SPAN)
        schedule.append(
            ScheduledJob(
                job=make_job(f"gone {i}", rng.choice(sorted(FEATURES)), kind),
                at=start,
                cancelled_at=start + rng.randrange(1, 16),
            )
        )
    return schedule


def watch_pairs(loop: Loop) -> set[Pair]:
    """The pairs that the loop has run. The result grows while the loop runs."""
    found = set[Pair]()
    running = dict[str, str]()
    step = loop.step

    def watched_step() -> Any:
        output = step()
        for update in output.updates:
            if isinstance(update, Started):
                feature = update.job_id.split()[1]
                found.update((other, feature) for other in running.values())
                running[update.job_id] = feature
            elif isinstance(update, Ended):
                running.pop(update.job_id, None)
        return output

    loop.step = watched_step
    return found


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("llama", "radix"),
        ("hybrid", "slots"),
        pytest.param("llama", "multi_user", marks=pytest.mark.exhaustive),
        pytest.param("hybrid", "radix", marks=pytest.mark.exhaustive),
    ],
)
def test_no_pair_of_requests_affects_each_other(kind: str, policy: str, ties: list[int]) -> None:
    """For as many schedules as it takes until every pair of features has been running together, in
    both orders."""
    model = model_of(kind)
    missing: set[Pair] = set(product(FEATURES, FEATURES))
    turns = 0
    while missing:
        rng = random.Random(f"{kind} {policy} {turns}")
        turns += 1
        assert turns < 100, f"these never run together: {sorted(missing)}"
        loop = make_loop(model, running=MAX_RUNNING, policy=policy, chunk=16)
        met = watch_pairs(loop)
        together = run_schedule(loop, make_schedule(kind, missing, rng))
        missing -= met
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
