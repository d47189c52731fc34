"""JSON Schemas, driven through the engine: what is said of an answer is asked of a validator that
knows nothing of grammars.

The model has random weights, so it writes whatever it is allowed to.
"""

import json
import math
import random
import sys
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
DRAWN = 500
TOGETHER = 50
MOST_TOKENS = 80

# What brings an answer to its end, the shortest way first; what some patterns want comes early.
# The comma comes before the digits, because a number has no other end where a property must follow.
_CLOSING = tuple(f'"{wanted}}}],0123456789eE.-+:[{{tfn'.encode() for wanted in "b@:")
# no schema needs more
_MOST_CLOSING = 300


def sampling(seed: int) -> dict[str, Any]:
    """Everything that a request may ask for beside a schema, in turn."""
    closing = tuple((id, 4.0) for id in b'"}],')
    ways: list[dict[str, Any]] = [
        {"logit_bias": closing},
        {"logit_bias": closing, "repetition_penalty": 1.2},
        {"top_k": 40, "presence_penalty": 0.5},
        {"logit_bias": closing, "min_p": 0.02},
        {"top_p": 0.9, "frequency_penalty": 0.3, "repeat_last_n": 32},
        {"temperature": 0.0},
    ]
    return {"temperature": 1.1, "seed": seed, **ways[seed % len(ways)]}


def asking(name: str, schema: Schema, seed: int) -> Job:
    grammar = JsonSchema(text=json.dumps(schema))
    prompt = tuple(name.encode())
    return job(
        name, prompt, grammar=grammar, stop_token_ids=ENDS, max_tokens=MOST_TOKENS, **sampling(seed)
    )


def assert_keeps(outcome: Outcome, schema: Schema) -> None:
    """What ended by itself is valid; what was cut can be gone on with to something valid."""
    assert outcome.error is None, f"{outcome.error} for {schema}"
    written = bytes(outcome.ids)
    if outcome.reason != "stop":
        assert outcome.reason == "length"
        written = completed(schema, outcome.ids)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    value = json.loads(written, parse_float=_finite)
    errors = [error.message for error in validator.iter_errors(value)]
    assert not errors, f"{written!r} is not valid against {json.dumps(schema)}: {errors}"


def _finite(number: str) -> float:
    """A number of JSON's may have more digits than a float has room for. Where rounding would bring
    it onto a bound that it only comes close to, the next float on its own side is taken."""
    rounded = max(-sys.float_info.max, min(sys.float_info.max, float(number)))
    if rounded == 0 or abs(rounded) == sys.float_info.max:
        return rounded
    exact, shortest = Decimal(number), Decimal(repr(rounded))
    if exact == shortest:
        return rounded
    return math.nextafter(rounded, math.inf if exact > shortest else -math.inf)


def completed(schema: Schema, ids: list[int]) -> bytes:
    """The answer, and a short way from it to an end."""
    for closing in _CLOSING:
        written = _closed(schema, ids, closing)
        if written is not None:
            return written
    raise AssertionError(f"{bytes(ids)!r} comes to no end that follows {schema}")


def _closed(schema: Schema, ids: list[int], closing: bytes) -> bytes | None:
    """closing: ids, in the order in which they are tried."""
    matcher = grammar_compiler().compile(JsonSchema(text=json.dumps(schema)), ENDS)
    written = list(ids)
    for id in written:
        matcher.accept(id)
    rng = random.Random(0)
    while not matcher.done and tiny.END not in (allowed := ids_of(matcher)):
        short = [id for id in closing if id in allowed]
        # a pattern may want something else, and not always the same
        usual = bool(short) and rng.random() < 0.9
        written.append(short[0] if usual else rng.choice(sorted(allowed)))
        matcher.accept(written[-1])
        if len(written) - len(ids) > _MOST_CLOSING:
            return None
    return bytes(written)


@cache
def answers() -> dict[int, tuple[Schema, Job, Outcome]]:
    """By their seeds, in batches of mixed requests."""
    loop = make_loop(model(), running=TOGETHER, policy="radix")
    answered: dict[int, tuple[Schema, Job, Outcome]] = {}
    for start in range(0, DRAWN, TOGETHER):
        jobs = dict[int, tuple[Schema, Job]]()
        for seed in range(start, start + TOGETHER):
            one = asking(f"draw {seed}", random_schema(seed), seed)
            jobs[seed] = random_schema(seed), one
        plain = job(
            "plain", b"beside", max_tokens=50, stop_token_ids=frozenset[int](), temperature=1.0
        )
        outcomes = run(loop, plain, *(one for _, one in jobs.values()))
        for seed, (schema, one) in jobs.items():
            answered[seed] = schema, one, outcomes[one.id]
    return answered


def test_every_answer_of_500_drawn_schemas_keeps_its_schema() -> None:
    for schema, _, outcome in answers().values():
        assert_keeps(outcome, schema)


def test_most_of_them_end_by_themselves_and_many_are_cut() -> None:
    """Else the test above would prove little."""
    ended = sum(outcome.reason == "stop" for _, _, outcome in answers().values())
    assert 0.6 * DRAWN < ended < 0.95 * DRAWN


def test_answers_among_others_are_those_that_are_given_alone(ties: list[int]) -> None:
    for seed in range(0, DRAWN, 42):
        _, one, outcome = answers()[seed]
        ties.append(assert_same(outcome, run_one(make_loop(model()), one)))


def test_each_corner_keeps_its_schema() -> None:
    """Six times each: sampled in every way."""
    loop = make_loop(model(), running=TOGETHER, policy="radix")
    jobs = [
        (schema, asking(f"{name} {seed}", schema, seed))
        for name, schema in EDGE_CASES.items()
        for seed in range(6)
    ]
    outcomes = run(loop, *(one for _, one in jobs))
    for schema, one in jobs:
        assert_keeps(outcomes[one.id], schema)


def test_the_validator_would_see_a_wrong_answer() -> None:
    for written in (b"17", b'"7"', b"[1"):
        tokens = [Token(job_id="it", id=id, timestamp_ns=0) for id in written]
        with pytest.raises((AssertionError, ValueError)):
            assert_keeps(Outcome(reason="stop", tokens=tokens), {"type": "integer", "maximum": 9})
