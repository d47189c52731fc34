"""A prefix cache changes the speed, and never the answers, for every architecture.

Every architecture's tiny models (tests/models/architectures.py), and the toy with one layer of each
kind of cache, run under each policy: a random history gives the answers of a fresh engine.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

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


def _load_model(case: Case, folder: Path) -> Model:
    parity.save_reference(case, folder)
    model: Any = parity.load_model(folder)
    apply_cpu_layout(model)
    return model
