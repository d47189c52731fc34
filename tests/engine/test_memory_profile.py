"""The memory of a sequence and of a step is estimated from one token."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from app.engine.memory_profile import (
    PROMPT_LOGPROBS_CHUNK,
    ActivationMemory,
    MemoryProfile,
    attention_shapes,
    longest_fitting,
    profile_memory,
)
from models import kernels
from models.attention_route import AttentionDevice, workspace_bytes
from models.base import Model
from models.checkpoint_config import num_query_heads
from models.kernels.in_place_attention import score_buffer_bytes
from models.kv import STEP
from tests.engine import hybrid
from tests.engine.harness import tiny_model
from tests.models.kernel_switch import use_kernels

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
CHUNK = 8


def measure(model: Model, budget: int = 1 << 30) -> MemoryProfile:
    return profile_memory(
        model, budget=budget, weights=1000, chunk=CHUNK, max_batch_size=4, heads=2, context=1024
    )


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("length", [1, 100, 300])
def test_a_sequence_takes_no_more_than_the_estimate(kind: str, length: int) -> None:
    model = MODELS[kind]()
    estimate = measure(model).kv_footprint(length)
    kv = model.make_kv()
    for layer in kv:
        layer.reserve(length)
    for start in range(0, length, CHUNK):
        chunk = mx.zeros((1, min(CHUNK, length - start)), mx.int32)
        mx.eval(model(chunk, kv))
        assert sum(layer.nbytes for layer in kv) <= estimate


def make_profile(
    footprint: Callable[[int], int], budget: int, longest: int = 10_000
) -> MemoryProfile:
    return MemoryProfile(
        budget=budget, weights=0, working=0, max_length=longest, kv_footprint=footprint
    )


def test_the_longest_sequence_that_fits_is_found() -> None:
    footprint = measure(tiny_model()).kv_footprint
    for steps in (1, 2, 3):
        tight = make_profile(footprint, footprint(steps * STEP))
        assert tight.max_context(10_000) == steps * STEP
        assert tight.max_context(100) == 100
    assert make_profile(footprint, footprint(1) - 1).max_context(100) == 0


def test_no_sequence_outgrows_the_working_space() -> None:
    footprint = measure(tiny_model()).kv_footprint
    assert make_profile(footprint, 1 << 40, longest=700).max_context(10_000) == 700
    assert make_profile(footprint, 1 << 40, longest=700).max_context(100) == 100


def test_the_kv_budget_excludes_weights_and_working_space() -> None:
    small = measure(tiny_model())
    assert small.kv_budget == small.budget - 1000 - small.working
    assert small.working > 0
    assert measure(tiny_model(), budget=500).kv_budget == 0


@pytest.mark.parametrize(
    ("kinds", "positions"),
    [("k", 4096), ("kwr", 4096), ("w", STEP + CHUNK), ("r", 0), ("wr", STEP + CHUNK)],
)
def test_scores_cover_the_positions_that_a_query_sees(kinds: str, positions: int) -> None:
    """A window and the chunk after it, rounded up to a step. A state has no scores."""
    with use_kernels(enabled=False):
        working = _activation_memory(kinds)

        def scores(positions: int) -> int:
            return max(
                workspace_bytes(AttentionDevice.CPU, shape, length=CHUNK, total=positions)
                for shapes in working.attention
                for shape in shapes
            )

        assert working(4096) == (scores(positions) if positions else 0)
        assert working(100) == (scores(100) if positions else 0)
        if positions:
            assert scores(positions) >= 2 * 4 * hybrid.HEADS * CHUNK * positions


def test_in_place_attention_holds_scores_of_few_queries_per_thread() -> None:
    if (ops := kernels.ops()) is None:
        pytest.skip("the CPU kernels were not built")
    for kinds, seen in (("k", 4096), ("w", STEP + CHUNK)):
        rows = ops.max_rows_per_task(seen)
        scores = 4 * rows * (seen + rows + 16)
        assert _activation_memory(kinds)(4096) == ops.num_threads() * scores
    assert score_buffer_bytes(_CacheWithoutKV(), 3, 4096) is None


class _CacheWithoutKV:
    """A cache without keys and values."""

    supports_in_place = False


def _activation_memory(kinds: str) -> ActivationMemory:
    model = hybrid.Model(kinds=kinds)
    layers = model.make_kv()
    mx.eval(model(mx.array([[0, 0]]), layers))
    return ActivationMemory(
        bytes_per_token=0,
        chunk=CHUNK,
        max_batch_size=0,
        vocab=0,
        heads=3,
        layers=layers,
        attention=attention_shapes(layers),
    )


def test_a_step_holds_the_activations_of_a_chunk_and_the_logits() -> None:
    working = ActivationMemory(
        bytes_per_token=10,
        chunk=CHUNK,
        max_batch_size=2,
        vocab=7,
        heads=3,
        layers=[],
        attention=[],
    )
    assert working(4096) == 10 * CHUNK + 16 * (2 + PROMPT_LOGPROBS_CHUNK) * 7


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_attention_heads": 12, "n_head": 3}, 12),
        ({"n_heads": 6}, 6),
        ({"n_head": 5}, 5),
        ({"num_query_heads": [12, 20, 16]}, 20),
        ({"num_attention_heads": None, "num_heads": 4}, 4),
        ({}, 64),
    ],
)
def test_query_heads_are_read_under_each_config_name(config: dict[str, Any], heads: int) -> None:
    assert num_query_heads(config) == heads


@pytest.mark.parametrize("maximum", [1, 255, 256, 257, 1000, 12345])
def test_the_longest_fitting_length_is_exact_to_a_step(maximum: int) -> None:
    for limit in (0, 1, 255, 256, 700, 12345, 99999):
        found = longest_fitting(lambda length, limit=limit: length <= limit, maximum)
        assert found == (maximum if maximum <= limit else limit // STEP * STEP)
