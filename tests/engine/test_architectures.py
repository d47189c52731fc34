"""A prefix cache changes the speed, and never the answers, for every architecture.

Every architecture's tiny models (tests/models/architectures.py), and the toy with one layer of each
kind of cache, run under each policy: a random history gives the answers of a fresh engine.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.engine.kv_layout import SlabPolicy
from models.base import Model
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from tests import tiny
from tests.engine import hybrid
from tests.engine.conversations import KINDS, ExpectedAnswer, random_history
from tests.engine.harness import assert_same, make_loop, run_schedule, token_bits
from tests.models import parity
from tests.models.architectures import Case, cases

pytestmark = pytest.mark.no_cover  # a matrix: see tests/conftest.py

# multi_user slots extend and trim caches as single does, and also lend copies
POLICIES = ("single", "multi_user", "radix")
TOYS = {"toy-kwr": "kwr", "toy-kw": "kw", "toy-r": "r"}
PARALLEL, CHUNK = 3, 16


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model and a history of requests. vocab: the number of its ids."""

    name: str
    model: Model
    vocab: int

    @cached_property
    def history(self) -> list[ExpectedAnswer]:
        """Shared by all policies, so the expected answers are computed once."""
        history = random_history(self.model, self.vocab, random.Random(self.name))
        assert {request.kind for request in history} == set(KINDS)
        return history


@pytest.fixture(scope="module", params=[*TOYS, *cases()], ids=lambda one: getattr(one, "id", one))
def model_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelCase:
    if isinstance(request.param, str):
        name, vocab = request.param, tiny.VOCAB
        model: Model = hybrid.Model(kinds=TOYS[name])
    else:
        name, vocab = request.param.id, request.param.vocab
        model = _load_model(request.param, tmp_path_factory.mktemp(name))
    return ModelCase(name=name, model=model, vocab=vocab)


@pytest.mark.product
@pytest.mark.parametrize("policy", POLICIES)
def test_a_history_gives_the_answers_of_a_fresh_engine(
    model_case: ModelCase, policy: str, ties: list[int]
) -> None:
    loop = make_loop(
        model_case.model, running=PARALLEL, chunk=CHUNK, policy=policy, vocab=model_case.vocab
    )
    got = run_schedule(loop, [request.scheduled for request in model_case.history])
    for request in model_case.history:
        outcome = got[request.scheduled.job.id]
        expected = request.expected(outcome)
        ties.append(assert_same(outcome, expected))
        if is_batch_invariant(model_case.model):
            assert token_bits(outcome) == token_bits(expected), "as --exact promises"
    last = model_case.history[-1].scheduled.job
    assert got[last.id].cached >= len(model_case.history[-2].ids) - 1, (
        "a chat without other requests resumes"
    )


@pytest.mark.slow
@pytest.mark.product
def test_a_history_gives_the_same_tokens_with_slabs(model_case: ModelCase, ties: list[int]) -> None:
    """Rows of all lengths share a slab. It rounds differently from separate caches, so only tokens
    are equal."""
    loop = make_loop(
        model_case.model,
        running=PARALLEL,
        chunk=CHUNK,
        policy="radix",
        vocab=model_case.vocab,
        slab_policy=SlabPolicy(layout="slab", min_rows=1, join_padding=1e9, stay_padding=1e9),
    )
    got = run_schedule(loop, [request.scheduled for request in model_case.history])
    for request in model_case.history:
        outcome = got[request.scheduled.job.id]
        ties.append(assert_same(outcome, request.expected(outcome)))


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize(
    ("policy", "kv"), [("radix", mx.bfloat16), ("multi_user", mx.float16)], ids=str
)
def test_a_history_gives_equal_bits_with_keys_and_values_of_16_bits(
    model_case: ModelCase, policy: str, kv: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_batch_invariant(model_case.model):
        pytest.skip("chunks change the bits, and rounding enlarges the difference")
    monkeypatch.setattr(model_case.model, "kv_dtype", kv)
    history = random_history(model_case.model, model_case.vocab, random.Random(model_case.name))
    loop = make_loop(
        model_case.model, running=PARALLEL, chunk=CHUNK, policy=policy, vocab=model_case.vocab
    )
    got = run_schedule(loop, [request.scheduled for request in history])
    for request in history:
        outcome = got[request.scheduled.job.id]
        assert token_bits(outcome) == token_bits(request.expected(outcome))
    assert loop.capacity.kv_dtype == str(kv).removeprefix("mlx.core.")


def _load_model(case: Case, folder: Path) -> Model:
    parity.save_reference(case, folder)
    model: Any = parity.load_model(folder)
    apply_cpu_layout(model)
    return model
