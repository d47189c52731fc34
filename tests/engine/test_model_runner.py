"""The last layer computes only the positions whose hidden states are needed."""

from typing import Any

import mlx.core as mx
import pytest

from models.base import Model, select_last
from models.cpu_layout import is_batch_invariant
from tests.engine.harness import job, make_loop, run, run_one, tiny_model, token_bits
from tests.models.kernel_switch import use_kernels

CHUNK = 8
PROMPT = list(range(1, 21))
NONE = frozenset[int]()
needs_kernels = pytest.mark.skipif(not is_batch_invariant(tiny_model()), reason="no kernels")


def record_last_mlp(model: Model) -> list[tuple[int, ...]]:
    """The numbers of rows and positions of the inputs of the MLP of the last layer."""
    block: Any = model
    block = block.model.layers[-1]
    compute, seen = block.mlp_residual, list[tuple[int, ...]]()

    def record(x: mx.array) -> mx.array:
        seen.append(x.shape[:2])
        return compute(x)

    object.__setattr__(block, "mlp_residual", record)
    return seen


@needs_kernels
def test_the_last_mlp_computes_one_position_of_a_prompt() -> None:
    model = tiny_model()
    loop = make_loop(model, chunk=CHUNK)
    seen = record_last_mlp(model)
    run_one(loop, job("a", PROMPT, max_tokens=3, stop_token_ids=NONE))
    assert set(seen) == {(1, 1)}


@needs_kernels
def test_the_last_mlp_computes_one_position_of_each_packed_prompt() -> None:
    model = tiny_model()
    loop = make_loop(model, running=3, chunk=32, policy="radix")
    seen = record_last_mlp(model)
    run(
        loop, *(job(f"{n}", [n, *PROMPT[:4]], max_tokens=1, stop_token_ids=NONE) for n in (1, 2, 3))
    )
    assert seen == [(3, 1)]


@needs_kernels
def test_scored_prompts_need_all_positions_and_have_the_same_bits() -> None:
    model = tiny_model()
    plain = job("a", PROMPT, max_tokens=5, stop_token_ids=NONE)
    expected = token_bits(run_one(make_loop(model, chunk=CHUNK), plain))
    loop = make_loop(model, chunk=CHUNK)
    seen = record_last_mlp(model)
    scored = job("a", PROMPT, max_tokens=5, stop_token_ids=NONE, prompt_logprobs=0)
    assert token_bits(run_one(loop, scored)) == expected
    assert [length for _, length in seen][:3] == [8, 8, 4]


def test_models_whose_operations_round_differently_compute_all_positions() -> None:
    with use_kernels(enabled=False):
        model = tiny_model()
        loop = make_loop(model, chunk=CHUNK)
        seen = record_last_mlp(model)
        run_one(loop, job("a", PROMPT, max_tokens=1, stop_token_ids=NONE))
    assert [length for _, length in seen] == [8, 8, 4]


@needs_kernels
def test_selected_positions_have_the_same_bits() -> None:
    model = tiny_model()
    tokens = mx.array([PROMPT])
    whole = model(tokens, model.make_kv())
    assert mx.array_equal(model(tokens, model.make_kv(), select_last), select_last(whole))
