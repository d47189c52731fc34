"""JSON Schemas, through the engine: a validator that does not use grammars checks each answer.

The model has random weights, so it writes anything that is allowed.
"""

import json
import math
import random
import sys
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from typing import Any

import jsonschema_rs
import pytest

from app.core.jobs import Job, Token
from app.core.requests import JsonSchema
from tests import tiny
from tests.engine.harness import (
    Outcome,
    assert_same,
    grammar_compiler,
    job,
    make_loop,
    run,
    run_one,
)
from tests.engine.harness import tiny_model as model
from tests.grammar.schemas import EDGE_CASES, Schema, random_schema
from tests.grammar.test_compiler import ids_of

pytestmark = pytest.mark.no_cover  # see tests/conftest.py

ENDS = frozenset({tiny.END})
NUM_SCHEMAS = 500
BATCH_SIZE = 50
MAX_TOKENS = 80

# Ids that complete an answer, the shortest way first; characters that some patterns require come
# early. The comma precedes the digits, because nothing else ends a number before a property.
_CLOSING = tuple(f'"{required}}}],0123456789eE.-+:[{{tfn'.encode() for required in "b@:")
# no schema needs more
_MAX_CLOSING = 300


def choose_sampling(seed: int) -> dict[str, Any]:
    """Sampling parameters that a request may combine with a schema, in turn."""
    closing = tuple((id, 4.0) for id in b'"}],')
    variants: list[dict[str, Any]] = [
        {"logit_bias": closing},
        {"logit_bias": closing, "repetition_penalty": 1.2},
        {"top_k": 40, "presence_penalty": 0.5},
        {"logit_bias": closing, "min_p": 0.02},
        {"top_p": 0.9, "frequency_penalty": 0.3, "repeat_last_n": 32},
        {"temperature": 0.0},
    ]
    return {"temperature": 1.1, "seed": seed, **variants[seed % len(variants)]}


def make_job(name: str, schema: Schema, seed: int) -> Job:
    grammar = JsonSchema(text=json.dumps(schema))
    prompt = tuple(name.encode())
    return job(
        name,
        prompt,
        grammar=grammar,
        stop_token_ids=ENDS,
        max_tokens=MAX_TOKENS,
        **choose_sampling(seed),
    )


def assert_valid(outcome: Outcome, schema: Schema) -> None:
    """A complete answer is valid, and one that was cut off can be completed to a valid one."""
    assert outcome.error is None, f"{outcome.error} for {schema}"
    answer = bytes(outcome.ids)
    if outcome.reason != "stop":
        assert outcome.reason == "length"
        answer = complete(schema, outcome.ids)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    value = json.loads(answer, parse_float=_finite)
    errors = [error.message for error in validator.iter_errors(value)]
    assert not errors, f"{answer!r} is not valid against {json.dumps(schema)}: {errors}"


def _finite(number: str) -> float:
    """A JSON number may have more digits than a float. Rounding could move it onto a bound, so the
    next float on its own side is used."""
    rounded = max(-sys.float_info.max, min(sys.float_info.max, float(number)))
    if rounded == 0 or abs(rounded) == sys.float_info.max:
        return rounded
    exact, shortest = Decimal(number), Decimal(repr(rounded))
    if exact == shortest:
        return rounded
    return math.nextafter(rounded, math.inf if exact > shortest else -math.inf)


def complete(schema: Schema, ids: list[int]) -> bytes:
    """The answer, with a short completion."""
    for closing in _CLOSING:
        answer = _close(schema, ids, closing)
        if answer is not None:
            return answer
    raise AssertionError(f"{bytes(ids)!r} cannot be completed to follow {schema}")


def _close(schema: Schema, ids: list[int], closing: bytes) -> bytes | None:
    """closing: ids that complete an answer, in order of preference."""
    matcher = grammar_compiler().compile(JsonSchema(text=json.dumps(schema)), ENDS)
    answer = list(ids)
    for id in answer:
        matcher.accept(id)
    rng = random.Random(0)
    while not matcher.done and tiny.END not in (allowed := ids_of(matcher)):
        short = [id for id in closing if id in allowed]
        # a pattern may require other ids, and not always the same ones
        usual = bool(short) and rng.random() < 0.9
        answer.append(short[0] if usual else rng.choice(sorted(allowed)))
        matcher.accept(answer[-1])
        if len(answer) - len(ids) > _MAX_CLOSING:
            return None
    return bytes(answer)


@cache
def answer_batch(start: int) -> list[tuple[Schema, Job, Outcome]]:
    """Answers to BATCH_SIZE random schemas, the first of which has the seed `start`, and to a
    request without a schema."""
    loop = make_loop(model(), running=BATCH_SIZE, policy="radix")
    jobs = [
        (random_schema(seed), make_job(f"draw {seed}", random_schema(seed), seed))
        for seed in range(start, start + BATCH_SIZE)
    ]
    plain = job("plain", b"beside", max_tokens=50, stop_token_ids=frozenset[int](), temperature=1.0)
    outcomes = run(loop, plain, *(one for _, one in jobs))
    return [(schema, one, outcomes[one.id]) for schema, one in jobs]


def answers() -> Iterator[tuple[Schema, Job, Outcome]]:
    for start in range(0, NUM_SCHEMAS, BATCH_SIZE):
        yield from answer_batch(start)


@pytest.mark.exhaustive
def test_answers_to_500_random_schemas_are_valid() -> None:
    for schema, _, outcome in answers():
        assert_valid(outcome, schema)


@pytest.mark.exhaustive
def test_most_answers_are_complete_and_many_are_cut_off() -> None:
    """Otherwise the test above would prove little."""
    ended = sum(outcome.reason == "stop" for _, _, outcome in answers())
    assert 0.6 * NUM_SCHEMAS < ended < 0.95 * NUM_SCHEMAS


def test_batched_answers_equal_those_computed_alone(ties: list[int]) -> None:
    for _, one, outcome in answer_batch(0)[::4]:
        ties.append(assert_same(outcome, run_one(make_loop(model()), one)))


def test_answers_to_edge_cases_are_valid() -> None:
    """Six times each, once for each variant of sampling."""
    loop = make_loop(model(), running=BATCH_SIZE, policy="radix")
    jobs = [
        (schema, make_job(f"{name} {seed}", schema, seed))
        for name, schema in EDGE_CASES.items()
        for seed in range(6)
    ]
    outcomes = run(loop, *(one for _, one in jobs))
    for schema, one in jobs:
        assert_valid(outcomes[one.id], schema)


def test_the_validator_rejects_a_wrong_answer() -> None:
    for answer in (b"17", b'"7"', b"[1"):
        tokens = [Token(job_id="it", id=id, timestamp_ns=0) for id in answer]
        with pytest.raises((AssertionError, ValueError)):
            assert_valid(Outcome(reason="stop", tokens=tokens), {"type": "integer", "maximum": 9})
