"""Batched decoding: each row gets the result that it would get alone."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from models.base import Model
from models.kv import LayerCache
from models.recurrent import RecurrentCache
from tests.engine import hybrid
from tests.engine.harness import tiny_model

NEAR = 1e-5

MODELS: dict[str, Any] = {
    "llama": tiny_model,
    "hybrid": hybrid.Model,
    "windowed": lambda: hybrid.Model(kinds="wk"),
}

Prompts = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


def prefill(model: Model, prompts: Sequence[Sequence[int]]) -> list[list[LayerCache]]:
    kvs = [model.make_kv() for _ in prompts]
    for kv, prompt in zip(kvs, prompts, strict=True):
        mx.eval(model(mx.array([prompt]), kv))
    return kvs


def make_batch(kvs: Sequence[Sequence[LayerCache]], offsets: list[int]) -> list[object]:
    layers = zip(*kvs, strict=True)
    return [layer[0].make_batch(layer, mx.array(offsets)) for layer in layers]


@examples(max_examples=30, deadline=None)
@given(prompts=Prompts, steps=st.integers(1, 8))
def test_batched_decoding_equals_decoding_alone(
    model: Model, prompts: list[list[int]], steps: int
) -> None:
    """Rows of any lengths, past their windows: each row has its own positions, masks and states."""
    batched, alone = prefill(model, prompts), prefill(model, prompts)
    for step in range(steps):
        tokens = mx.array([[(7 * step + row) % 256] for row in range(len(prompts))])
        offsets = [len(prompt) + step for prompt in prompts]
        side_by_side = model(tokens, make_batch(batched, offsets))
        one_by_one = [model(tokens[row : row + 1], kv) for row, kv in enumerate(alone)]
        np.testing.assert_allclose(
            np.array(side_by_side), np.array(mx.concatenate(one_by_one)), atol=NEAR
        )
    assert [kv[0].offset for kv in batched] == [kv[0].offset for kv in alone]


def test_a_row_keeps_its_caches_when_it_leaves_the_batch(model: Model) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    batched, alone = prefill(model, prompts), prefill(model, prompts)
    for step, rows in enumerate([(0, 1, 2), (0, 2), (2,), (1, 2)]):
        tokens = mx.array([[10 + step + row] for row in rows])
        offsets = [batched[row][0].offset for row in rows]
        got = model(tokens, make_batch([batched[row] for row in rows], offsets))
        for i, row in enumerate(rows):
            want = model(tokens[i : i + 1], alone[row])
            np.testing.assert_allclose(np.array(got[i : i + 1]), np.array(want), atol=NEAR)


def test_a_join_or_leave_copies_no_buffers_of_other_rows() -> None:
    """Steps with changing rows do not increase the memory in use."""
    model = tiny_model()
    kvs = prefill(model, [[1, 2, 3], [4, 5], [6]])
    before = mx.get_active_memory()
    for rows in [(0, 1, 2), (0, 2), (0, 1, 2), (1,)]:
        offsets = [kvs[row][0].offset for row in rows]
        out = model(mx.array([[1]] * len(rows)), make_batch([kvs[row] for row in rows], offsets))
        mx.eval(out, [layer.state() for kv in kvs for layer in kv])
        del out
    assert mx.get_active_memory() <= before + 4096


def test_recurrent_rows_start_without_a_state() -> None:
    rows = [RecurrentCache(1), RecurrentCache(1)]
    assert rows[0].make_batch(rows, mx.array([0, 0]))[0] is None
