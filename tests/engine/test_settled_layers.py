"""The end of a request and an admission do not wait for the device layer by layer.

Each wait on Metal is a commit and a round trip, the first one also waits for the decode step in
flight, and then the queue is empty: 5 to 15 ms for all streams, per ended request of a 48-layer
model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from app.core.jobs import GetPrefixSnapshot
from app.engine.loop import Loop
from app.engine.prefix import radix_tree
from models import architectures
from models.cpu_layout import apply_cpu_layout
from tests import tiny
from tests.engine import hybrid
from tests.engine.harness import assert_same, job, make_loop, run_one, submit

LAYERS = 12
HEAD = [7] * 300


def deep_model() -> Any:
    config = {**tiny.CONFIG, "num_hidden_layers": LAYERS}
    model: Any = architectures.build(config, tiny.weights(config))
    apply_cpu_layout(model)
    return model


@contextmanager
def count_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the arrays of each blocking evaluation."""
    waits = list[int]()
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        waits.append(sum(len(group) for group in arrays[0]) if isinstance(arrays[0], list) else 1)
        evaluate(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", counted)
        yield waits


def start(loop: Loop, name: str, ids: list[int], max_tokens: int) -> None:
    submit(loop, job(name, ids, max_tokens=max_tokens, stop_token_ids=frozenset[int]()))
    while loop.stats().waiting:
        loop.step()


def requests_with_a_shared_head(model: Any) -> Loop:
    """Two running requests whose prompts share a head, so that the first one to end stores only a
    part of its caches."""
    loop = make_loop(model, running=3, policy="radix", chunk=512, context=1024)
    start(loop, "a", [*HEAD, 1], 400)
    start(loop, "b", [*HEAD, 2], 400)
    for _ in range(4):
        loop.step()
    return loop


def test_the_end_of_a_request_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited once for each layer."""
    loop = requests_with_a_shared_head(deep_model())
    nodes = loop.call(GetPrefixSnapshot()).total_nodes
    with count_waits(monkeypatch) as waits:
        loop.cancel("b")
        assert waits == []
        loop.step()
    assert loop.call(GetPrefixSnapshot()).total_nodes == nodes
    loop.check()


def end_of_second(loop: Loop) -> int:
    """Ends the second request, and returns the number of bytes that are stored."""
    before = loop.stats().ledger.prefix
    loop.cancel("b")
    return loop.stats().ledger.prefix - before


def test_large_layers_are_settled_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for each group but the last, so that only one group is in memory twice."""
    layer_bytes = end_of_second(requests_with_a_shared_head(deep_model())) // LAYERS
    assert layer_bytes > 0
    loop = requests_with_a_shared_head(deep_model())
    monkeypatch.setattr(radix_tree, "MAX_COPY_BYTES", 3 * layer_bytes)
    with count_waits(monkeypatch) as waits:
        end_of_second(loop)
    assert waits == [2 * 3] * (LAYERS // 3 - 1)


@pytest.mark.parametrize("make_model", [deep_model, hybrid.Model])
def test_an_admission_waits_once(monkeypatch: pytest.MonkeyPatch, make_model: Any) -> None:
    loop = requests_with_a_shared_head(make_model())
    loop.submit(job("c", [*HEAD, 3], max_tokens=4))
    with count_waits(monkeypatch) as waits:
        loop._admit()  # pyright: ignore[reportPrivateUsage]  # a part of a step
    assert loop.stats().running == 3
    assert len(waits) == 1


def test_settled_layers_have_the_same_content() -> None:
    """The stored part is read only by later requests, after it was settled without a wait."""
    loop = requests_with_a_shared_head(deep_model())
    for _ in range(20):
        loop.step()
    loop.cancel("b")
    loop.step()
    loop.cancel("a")
    while not loop.idle:
        loop.step()
    ids = [*HEAD, 2]
    again = run_one(loop, job("again", [*ids, 5], max_tokens=8))
    assert again.cached >= len(ids)
    fresh = run_one(make_loop(deep_model(), context=1024), job("again", [*ids, 5], max_tokens=8))
    assert_same(again, fresh)
