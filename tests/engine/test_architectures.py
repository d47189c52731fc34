"""A prefix cache changes the speed, and never the answers, for every architecture.

The tiny models of the architectures (tests/models/architectures.py), and the toy with one layer of
each kind of cache, run a random history: it gives the answers of a fresh engine. The toys run under
each policy. Of each kind of cache, one model runs under one policy; `make test-all` runs all models
under all policies.
"""

import importlib
import inspect
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import models
from app.engine.decode_slab import SlabPolicy
from models.base import Model
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from tests import tiny
from tests.engine import conversations, hybrid
from tests.engine.conversations import ExpectedAnswer, random_history
from tests.engine.harness import assert_same, make_loop, run_schedule, token_bits
from tests.models import parity
from tests.models.architectures import KINDS, Case, cases, group_by_cache

pytestmark = [pytest.mark.no_cover, pytest.mark.recorded]  # a matrix: see tests/conftest.py

# multi_user slots extend and trim caches as single does, and also lend copies
POLICIES = ("single", "multi_user", "radix")
TOYS = {"toy-kwr": "kwr", "toy-kw": "kw", "toy-r": "r"}
CASES = {case.id: case for case in cases()}
PARALLEL, CHUNK = 3, 16
MODELS = Path(models.__file__).parent


def make_runs(*options: Sequence[Any]) -> list[Any]:
    """The parameters of a test: the name of a model, and one of the options, which are lists of
    values. All pairs that `make test` skips are marked `exhaustive`. With `scope="module"`, pytest
    runs the tests of a model one after another, so its history is computed once."""
    runs = [
        pytest.param(toy, *option, id="-".join(map(str, (toy, *option))))
        for toy in TOYS
        for option in options
    ]
    # the kinds take turns with the options
    turns = {name: number % len(options) for number, name in enumerate(KINDS.values())}
    for name in CASES:
        for place, option in enumerate(options):
            runs.append(
                pytest.param(
                    name,
                    *option,
                    id="-".join(map(str, (name, *option))),
                    marks=() if turns.get(name) == place else pytest.mark.exhaustive,
                )
            )
    return runs


HISTORIES = make_runs(*((policy,) for policy in POLICIES))


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
        assert {request.kind for request in history} == set(conversations.KINDS)
        return history


@pytest.fixture(scope="module")
def model_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelCase:
    name: str = request.param
    if name in TOYS:
        return ModelCase(name=name, model=hybrid.Model(kinds=TOYS[name]), vocab=tiny.VOCAB)
    case = CASES[name]
    model = _load_model(case, tmp_path_factory.mktemp(name))
    return ModelCase(name=name, model=model, vocab=case.vocab)


@pytest.mark.parametrize(
    ("model_case", "policy"), HISTORIES, indirect=["model_case"], scope="module"
)
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


@pytest.mark.parametrize("model_case", make_runs(()), indirect=True)
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


# the largest difference of a log probability with a slab and keys and values of 16 bits, which
# docs/memory.md states: 3e-3 was measured (gemma3_text-stretched)
NEAR_16_BITS = 1e-2


@pytest.mark.parametrize(
    "model_case",
    [
        pytest.param(name, marks=() if name == "llama-plain" else pytest.mark.exhaustive)
        for name in CASES
    ],
    indirect=True,
)
def test_a_slab_differs_little_with_keys_and_values_of_16_bits(
    model_case: ModelCase, ties: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small difference can round a key the other way. The differences exceeded the 1e-4 that
    docs/memory.md promised."""
    monkeypatch.setattr(model_case.model, "kv_dtype", mx.bfloat16)
    history = random_history(model_case.model, model_case.vocab, random.Random(model_case.name))
    slab, rows = (
        run_schedule(
            make_loop(
                model_case.model,
                running=PARALLEL,
                chunk=CHUNK,
                policy="radix",
                vocab=model_case.vocab,
                slab_policy=SlabPolicy(layout=layout, min_rows=1, join_padding=1e9),
            ),
            [request.scheduled for request in history],
        )
        for layout in ("slab", "rows")
    )
    for name, outcome in rows.items():
        ties.append(assert_same(slab[name], outcome, NEAR_16_BITS))


@pytest.mark.parametrize(
    ("model_case", "policy", "kv"),
    make_runs(("radix", mx.bfloat16), ("multi_user", mx.float16)),
    indirect=["model_case"],
    scope="module",
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


def test_a_case_of_each_kind_of_cache_is_listed() -> None:
    groups = group_by_cache(list(CASES.values()))
    assert groups.keys() == KINDS.keys()
    for kind, group in groups.items():
        assert KINDS[kind] in {case.id for case in group}


def test_make_test_runs_a_history_for_every_kind_of_cache() -> None:
    """The run of a kind is not marked."""
    chosen = [run for run in HISTORIES if not run.marks and run.values[0] in CASES]
    assert sorted(run.values[0] for run in chosen) == sorted(KINDS.values())
    # and for each policy
    assert {run.values[1] for run in HISTORIES if not run.marks} == set(POLICIES)


def test_every_class_of_layer_caches_is_in_a_kind() -> None:
    """Otherwise no architecture's tests have a model with that cache."""
    modules = [importlib.import_module(f"models.{file.stem}") for file in MODELS.glob("*.py")]
    classes = {
        value.__name__
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and hasattr(value, "estimate_nbytes") and _is_concrete(value)
    }
    assert classes == set(re.findall(r"\w+Cache\b", " ".join(KINDS)))


def _is_concrete(kind: type) -> bool:
    is_protocol = getattr(kind, "_is_protocol", False)
    return not (is_protocol or inspect.isabstract(kind) or kind.__name__.endswith("Mixin"))


def _load_model(case: Case, folder: Path) -> Model:
    parity.save_reference(case, folder)
    model: Any = parity.load_model(folder)
    apply_cpu_layout(model)
    return model
