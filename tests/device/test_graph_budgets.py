"""Budgets of graph nodes, kernel launches and host waits, on the path that a GPU takes.

The graphs are built here with one stub per fused function of MLX (tests/device/gpu_stubs.py), and
counted before they are evaluated. Rows share slabs (`--kv-layout slab`). A budget is the current
figure, or the target where it is reached. A change that exceeds a budget makes every
step on a GPU slower; one that stays below it should lower the budget.
docs/gpu.md lists the figures and the targets.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from app.core.jobs import Ended, Job, Token
from app.engine.decode_slab import SlabPolicy
from app.engine.loop import Loop
from app.engine.prefix import radix_tree
from models import qwen3_next
from models.base import Model
from models.gated_delta_metal import gated_delta_on_metal
from models.recurrent import RecurrentCache
from tests.device import models
from tests.device.gpu_stubs import simulate_metal
from tests.device.graph_counts import (
    GraphCounts,
    count_graph,
    record_dispatched_graphs,
    record_waits,
)
from tests.engine import harness
from tests.models.kernel_switch import use_kernels

NO_STOP = frozenset[int]()
PROMPT = 6

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k and top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
}


@pytest.fixture(autouse=True)
def _metal() -> Iterator[None]:
    with use_kernels(enabled=False), simulate_metal():
        yield


@pytest.fixture(scope="module")
def dense() -> Model:
    with use_kernels(enabled=False):
        return models.build_model(models.DENSE)


def make_job(name: str, ids: list[int], **changes: Any) -> Job:
    fields = {"max_tokens": 400, "top_logprobs": None, "stop_token_ids": NO_STOP, **changes}
    return harness.job(name, ids, **fields)


def make_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def make_loop(model: Model, rows: int, *, chunk: int = 128) -> Loop:
    return harness.make_loop(
        model,
        running=rows,
        chunk=chunk,
        policy="radix",
        context=2048,
        vocab=models.VOCAB,
        slab_policy=SlabPolicy(layout="slab"),
    )


def decode(
    model: Model, rows: int, sampling: Mapping[str, Any], **changes: Any
) -> tuple[GraphCounts, list[str]]:
    """The graph of a decode step with sampling, and the waits of the step."""
    loop = make_loop(model, rows)
    for row in range(rows):
        loop.submit(make_job(str(row), make_prompt(PROMPT, row), **sampling, **changes))
    for _ in range(200):
        if sum(isinstance(update, Token) for update in loop.step().updates) < rows:
            continue
        with record_dispatched_graphs() as graphs, record_waits() as waits:
            loop.step()
        if len(graphs) == 1:
            return graphs[0], waits
    raise AssertionError("the sequences never decoded together")


# (rows, nodes, launches). The targets are 900, 1170 and 1170 nodes, counted with 49
# more nodes for the conversion of embeddings, which is one kernel on a GPU.
DECODE_BUDGETS = [(1, 836, 547), (8, 954, 549), (32, 954, 549)]


@pytest.mark.parametrize(("rows", "nodes", "launches"), DECODE_BUDGETS)
def test_a_decode_step_of_28_layers(dense: Model, rows: int, nodes: int, launches: int) -> None:
    graph, waits = decode(dense, rows, SAMPLINGS["greedy"])
    assert graph.nodes <= nodes, graph.by_name
    assert graph.launches <= launches, graph.by_name
    assert len(waits) <= 2, waits


# with four layers and the same numbers in test_slab_budgets.py
@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("name", "extra"), [("temperature", 11), ("top_k and top_p", 38), ("top_p", 40)]
)
def test_sampling_adds_nodes(dense: Model, rows: int, name: str, extra: int) -> None:
    """The target is 40 nodes."""
    greedy, _ = decode(dense, rows, SAMPLINGS["greedy"])
    sampled, waits = decode(dense, rows, SAMPLINGS[name])
    assert sampled.nodes - greedy.nodes <= extra, sampled.by_name
    assert len(waits) <= 2, waits


# of four layers
OTHER_BUDGETS = {
    "experts": (models.EXPERTS, 1, 244, 135),
    "experts, 8 rows": (models.EXPERTS, 8, 294, 161),
    "gpt-oss": (models.GPT_OSS, 1, 308, 159),
    "delta rule": (models.DELTA, 1, 191, 123),
    "delta rule, 8 rows": (models.DELTA, 8, 213, 130),
}


@pytest.mark.parametrize(
    ("config", "rows", "nodes", "launches"), OTHER_BUDGETS.values(), ids=OTHER_BUDGETS
)
def test_a_decode_step_of_other_models(
    config: Mapping[str, Any], rows: int, nodes: int, launches: int
) -> None:
    graph, waits = decode(models.build_model(config), rows, SAMPLINGS["greedy"])
    assert graph.nodes <= nodes, graph.by_name
    assert graph.launches <= launches, graph.by_name
    assert len(waits) <= 2, waits


def make_net() -> qwen3_next.GatedDeltaNet:
    config = qwen3_next.Config.from_dict({**models.DELTA, "num_hidden_layers": 1})
    net: Any = qwen3_next.FusedGatedDeltaNet(config)
    net.set_dtype(mx.bfloat16)
    mx.eval(net.parameters())
    return net


def count_delta_chunk(net: nn.Module, length: int) -> GraphCounts:
    """A chunk after other positions, with the projections of the layer."""
    call: Any = net
    kv, width = RecurrentCache(2), models.DELTA["hidden_size"]
    mx.eval(call(mx.zeros((1, 32, width), mx.bfloat16), kv), kv.state())
    x = mx.zeros((1, length, width), mx.bfloat16)
    mx.eval(x)
    return count_graph([call(x, kv), kv.state()])


@pytest.mark.parametrize("length", [17, 512, 2048])
def test_a_chunk_of_a_delta_layer(length: int) -> None:
    """It took 257 launches for 512 positions, and 689 for 2048."""
    net = make_net()
    net.rule = gated_delta_on_metal
    assert count_delta_chunk(net, length).launches <= 20


@pytest.mark.parametrize(("length", "launches"), [(512, 257), (2048, 689)])
def test_a_chunk_of_a_delta_layer_without_its_kernel(length: int, launches: int) -> None:
    """On CUDA, and after the kernel failed its test."""
    assert count_delta_chunk(make_net(), length).launches <= launches


def test_a_step_reads_log_probabilities_with_three_more_calls(dense: Model) -> None:
    """They wait for nothing, because the first call has waited for all arrays."""
    _, waits = decode(dense, 1, {}, top_logprobs=5)
    assert len(waits) <= 5, waits


@pytest.fixture(scope="module")
def shallow() -> Model:
    with use_kernels(enabled=False):
        return models.build_model({**models.DENSE, "num_hidden_layers": 6})


def run_steps(loop: Loop) -> list[tuple[list[Any], list[str]]]:
    """The updates and the waits of each step."""
    steps: list[tuple[list[Any], list[str]]] = []
    while not loop.idle:
        with record_waits() as waits:
            updates = loop.step().updates
        steps.append((list(updates), waits))
        assert len(steps) < 200
    return steps


# The prefix cache waits for the device in this function only.
PREFIX_WAITS = "models/kv.py", "evaluate_caches"


def waits_in(waits: list[str], place: tuple[str, str]) -> int:
    return sum(all(part in wait for part in place) for wait in waits)


def test_an_admission_waits_once_and_an_end_never(shallow: Model) -> None:
    """Ends of requests that share a prefix used to wait once per layer."""
    loop = make_loop(shallow, 4, chunk=64)
    head = make_prompt(200, 1)
    loop.submit(make_job("first", [*head, 1], max_tokens=4))
    steps = run_steps(loop)
    for name, length in (("second", 5), ("third", 9), ("fourth", 13)):
        loop.submit(make_job(name, [*head[:150], *make_prompt(9, length)], max_tokens=length))
    steps += run_steps(loop)
    ended = 0
    for updates, waits in steps:
        started = sum(type(update).__name__ == "Started" for update in updates)
        ended += sum(isinstance(update, Ended) for update in updates)
        assert waits_in(waits, PREFIX_WAITS) <= started, waits
        assert len(waits) <= 3 + started, waits  # tokens, validity, and the end of a chunk
    assert ended == 4


def test_an_end_waits_once_per_256_mb(shallow: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller bound, because these layers are small."""
    assert radix_tree.MAX_COPY_BYTES == 256 << 20
    bound = 40_000
    monkeypatch.setattr(radix_tree, "MAX_COPY_BYTES", bound)
    loop = make_loop(shallow, 2, chunk=64)
    head = make_prompt(100, 1)
    for name, length in (("long", 12), ("short", 4)):
        loop.submit(make_job(name, [*head, *make_prompt(60, length)], max_tokens=length))
    waited = [waits_in(waits, PREFIX_WAITS) for _, waits in run_steps(loop)]
    copied = _kv_bytes(shallow, 200)
    assert 0 < max(waited) <= math.ceil(copied / bound)


def _kv_bytes(model: Model, positions: int) -> int:
    """The bytes of `positions` positions in bfloat16."""
    layers = len(model.make_kv())
    config = models.DENSE
    return 2 * 2 * layers * config["num_key_value_heads"] * config["head_dim"] * positions


def test_the_stubs_count_like_one_kernel_each() -> None:
    """A control: without stubs, the same step has more nodes."""
    x, weight = mx.ones((1, 4, 8)), mx.ones((8,))
    mx.eval(x, weight)
    assert count_graph([mx.fast.rms_norm(x, weight, 1e-6)]).launches == 1
    pair = [x + 1, x * 2]
    assert count_graph([mx.concatenate(pair)]).launches == 4
    assert count_graph([x.reshape(4, 8).T]).launches == 0


def test_each_call_of_a_compiled_function_counts() -> None:
    """MLX exports them with one identity."""
    x = mx.ones((4,))
    mx.eval(x)
    assert count_graph([nn.silu(nn.silu(x))]).launches == 2


def test_a_wait_is_recorded_with_its_caller() -> None:
    with record_waits() as waits:
        mx.eval(mx.ones((2,)))
        mx.ones((2,)).tolist()
        assert mx.ones((1,)).item() == 1
        assert bool(mx.ones((1,)) > 0)
    assert waits == ["a test"] * 4
