"""Budgets of graph nodes and kernel launches on a GPU: decode steps with several rows, sampling.

tests/device/test_graph_budgets.py explains how they are counted.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from app.core.jobs import Token
from app.engine.decode_slab import SlabPolicy
from app.engine.loop import Loop
from models.base import Model
from tests.device import models
from tests.device.gpu_stubs import simulate_metal
from tests.device.graph_counts import GraphCounts, record_dispatched_graphs, record_waits
from tests.engine import harness
from tests.models.kernel_switch import use_kernels

LAYERS = 4

# The nodes that sampling adds to a greedy step. The target is 40.
SAMPLINGS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "temperature": ({"temperature": 1.0}, 11),
    "top_k and top_p": ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, 38),
    "top_p": ({"temperature": 1.0, "top_p": 0.95}, 40),
}


@pytest.fixture(autouse=True)
def _metal() -> Iterator[None]:
    with use_kernels(enabled=False), simulate_metal():
        yield


@pytest.fixture(scope="module")
def small() -> Model:
    with use_kernels(enabled=False):
        return models.build_model({**models.DENSE, "num_hidden_layers": LAYERS})


def start(model: Model, lengths: list[int], layout: Any = "slab", **sampling: Any) -> Loop:
    """A loop whose sequences all decode. They end at different steps."""
    loop = harness.make_loop(
        model,
        running=len(lengths),
        chunk=128,
        policy="radix",
        context=2048,
        vocab=models.VOCAB,
        slab_policy=SlabPolicy(layout=layout),
    )
    for row, length in enumerate(lengths):
        prompt = [(7 * row + position) % 1000 for position in range(length)]
        fields = {"max_tokens": 200 + 20 * row, "top_logprobs": None, **sampling}
        loop.submit(harness.job(str(row), prompt, stop_token_ids=frozenset(), **fields))
    while sum(isinstance(update, Token) for update in loop.step().updates) < len(lengths):
        pass
    for _ in range(3):
        loop.step()
    return loop


def count(loop: Loop) -> GraphCounts:
    with record_dispatched_graphs() as graphs, record_waits() as waits:
        loop.step()
    assert len(waits) <= 2, waits
    [graph] = graphs
    return graph


@pytest.mark.exhaustive
def test_eight_rows_of_28_layers_have_few_more_nodes_than_one() -> None:
    """The target is 1.3 times as many."""
    model = models.build_model(models.DENSE)
    alone, together = (count(start(model, list(range(64, 64 + rows)))) for rows in (1, 8))
    assert together.nodes <= 1.15 * alone.nodes, together.by_name
    assert together.launches <= alone.launches + 2, together.by_name


@pytest.mark.parametrize(
    "rows",
    [
        3,
        pytest.param(8, marks=pytest.mark.exhaustive),
        pytest.param(32, marks=pytest.mark.exhaustive),
    ],
)
def test_a_layer_has_four_more_nodes_for_any_number_of_rows(small: Model, rows: int) -> None:
    """They reshape the buffers, and launch nothing."""
    alone = count(start(small, [64]))
    graph = count(start(small, list(range(64, 64 + rows))))
    assert graph.nodes <= alone.nodes + 4 * LAYERS + 6, graph.by_name
    assert graph.launches <= alone.launches + 2, graph.by_name
    separate = count(start(small, list(range(64, 64 + rows)), layout="rows"))
    assert separate.nodes > graph.nodes + 6 * LAYERS, "what a slab saves"


def test_free_slots_between_the_rows_cost_little(small: Model) -> None:
    alone = count(start(small, [64]))
    loop = start(small, [64] * 8)
    assert loop.slab is not None
    loop.cancel(next(s.job.id for s, slot in loop.slab.slots.items() if slot == 2))
    for _ in range(3):
        loop.step()
    assert sorted(s for s in loop.slab.slots.values() if s is not None) == [0, 1, 3, 4, 5, 6, 7]
    graph = count(loop)
    assert graph.nodes <= alone.nodes + 8 * LAYERS + 8, graph.by_name


@pytest.mark.exhaustive
def test_a_much_longer_row_does_not_separate_the_others(small: Model) -> None:
    """It needs two additional writes and one attention operation per layer."""
    similar = count(start(small, list(range(64, 72))))
    skewed = count(start(small, [600, *range(64, 71)]))
    assert similar.nodes < skewed.nodes <= similar.nodes + 14 * LAYERS, skewed.by_name


def test_recurrent_states_are_not_concatenated() -> None:
    """A layer of a delta net has as many nodes and launches for eight rows as for one."""
    model = models.build_model(models.DELTA)
    alone, together = (count(start(model, [64] * rows)) for rows in (1, 8))
    assert together.by_name["Concatenate"] <= alone.by_name["Concatenate"]
    assert together.nodes <= 1.16 * alone.nodes, together.by_name


@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_sampling_adds_few_nodes(small: Model, rows: int) -> None:
    """The number does not depend on the rows."""
    greedy = count(start(small, [64] * rows))
    for sampling, most in SAMPLINGS.values():
        assert count(start(small, [64] * rows, **sampling)).nodes - greedy.nodes <= most
