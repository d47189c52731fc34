"""Whatever a model is made of, a prefix cache changes nothing but the time.

Every architecture's tiny models (tests/models/architectures.py), and the toy with one layer of each
kind of cache, under each policy: a random history gives the answers of a fresh engine.
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

# slots of many users: beside going on and cutting back, as single does, they lend copies
POLICIES = ("single", "multi_user", "radix")
TOYS = {"toy-kwr": "kwr", "toy-kw": "kw", "toy-r": "r"}
PARALLEL, CHUNK = 3, 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model and what is asked of it. vocab: how many ids it has."""

    name: str
    model: Model
    vocab: int

    @cached_property
    def history(self) -> list[ExpectedAnswer]:
        """The same for all policies, so its answers are found once."""
        told = random_history(self.model, self.vocab, random.Random(self.name))
        assert {one.kind for one in told} == set(KINDS)
        return told


@pytest.fixture(scope="module", params=[*TOYS, *cases()], ids=lambda one: getattr(one, "id", one))
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    if isinstance(request.param, str):
        name, vocab = request.param, tiny.VOCAB
        model: Model = hybrid.Model(kinds=TOYS[name])
    else:
        name, vocab = request.param.id, request.param.vocab
        model = _opened(request.param, tmp_path_factory.mktemp(name))
    return Asked(name=name, model=model, vocab=vocab)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_history_gives_the_answers_of_a_fresh_engine(
    asked: Asked, policy: str, ties: list[int]
) -> None:
    loop = make_loop(asked.model, running=PARALLEL, chunk=CHUNK, policy=policy, vocab=asked.vocab)
    got = run_schedule(loop, [told.visit for told in asked.history])
    for told in asked.history:
        outcome = got[told.visit.job.id]
        expected = told.expected(outcome)
        ties.append(assert_same(outcome, expected))
        if is_batch_invariant(asked.model):
            assert token_bits(outcome) == token_bits(expected), "as --exact promises"
    last = asked.history[-1].visit.job
    assert got[last.id].cached >= len(asked.history[-2].ids) - 1, "a chat alone begins where it was"


def _opened(case: Case, folder: Path) -> Model:
    parity.saved(case, folder)
    model: Any = parity.opened(folder)
    apply_cpu_layout(model)
    return model
