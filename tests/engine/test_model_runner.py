"""Prompt chunks: positions that the last layer computes, and caches that are written in place."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import Model, select_last
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from models.kv import LayerCache
from tests import tiny
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


@needs_kernels
def test_chunks_and_decode_steps_write_to_the_cache_in_place() -> None:
    """An evaluation references its outputs until it has ended. If keys and values were outputs, the
    next step would copy them. A buffer is also copied if MLX's thread has no core, so on a busy
    machine some are."""
    config = {**tiny.CONFIG, "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4}
    model: Any = architectures.build(config, tiny.weights(config))
    apply_cpu_layout(model)
    copied: list[int] = []
    for n in range(9):
        loop = make_loop(model, chunk=128, context=1024)
        loop.submit(job("a", [n + 1] * 400, max_tokens=8, stop_token_ids=NONE))
        loop.step()
        [sequence] = loop._scheduler.running
        before = find_buffers(sequence.kv)
        while sequence.num_output_tokens < 4:
            loop.step()
        after = find_buffers(sequence.kv)
        copied.append(sum(a != b for a, b in zip(before, after, strict=True)))
    assert copied.count(0) >= 2, copied


def find_buffers(layers: Sequence[LayerCache]) -> list[int]:
    mx.synchronize()
    arrays = [array for layer in layers for array in layer.state()]
    return [np.array(array, copy=False).ctypes.data for array in arrays]
