"""On a GPU, the chains of the draw are compiled. They draw the tokens of the single operations.

MLX reports a GPU here, and computes on the CPU. Its compiler for the CPU needs a C++ compiler.
"""

import inspect
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.core.sampling_params import SamplingParams
from app.engine.sampling import draw
from app.engine.sampling.draw import Draw, select_method
from models.layers import compile_on_gpu
from tests.models.kernel_switch import use_kernels

VOCAB = 3000
KNOBS: dict[str, dict[str, Any]] = {
    "all": {"temperature": 0.9},
    "min_p": {"temperature": 1.3, "min_p": 0.02},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_k, top_p, min_p": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "narrow top_p": {"temperature": 2.0, "top_p": 0.3},
}

# The chains, and examples of the types and shapes of their arguments: a batch b, a row n, the
# candidates m.
CHAINS: dict[str, str] = {
    "_scale": "bn b1 b1",
    "_scale_top_k": "bn b1 b1 n: b1",
    "_keep_nucleus": "bn bn bn b1 b1",
    "_block_indices": "bm1: : n:",
    "_mass_above": "b1n bm1 b1n",
    "_inside_or_inf": "bm1 bm1 b11 b11",
    "_size_if_outside": "bm1 b11 b11 :",
    "_mask_outside": "bn b1 bn",
    "_mask_below": "bn b1 bn",
    "_add_noise": "bn n: b1: b1:",
}


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("MLX compiles chains for a CPU with the C++ compiler, which is missing")
    with use_kernels(enabled=False):
        yield


def draw_tokens(knobs: dict[str, Any], rows: int, turns: int) -> list[list[int]]:
    sampling = SamplingParams(**knobs)
    one = Draw(
        select_method(sampling, VOCAB),
        [sampling] * rows,
        seeds=[13 * row for row in range(rows)],
        num_drawn=list(range(rows)),
    )
    rng = np.random.default_rng(rows)
    found: list[list[int]] = []
    for turn in range(turns):
        logits = mx.array(3 * rng.standard_normal((rows, VOCAB)).astype(np.float32))
        found.append(np.array(one(logits, turn)).tolist())
    return found


@pytest.mark.recorded
@pytest.mark.parametrize("name", KNOBS)
def test_compiled_chains_draw_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {rows: draw_tokens(KNOBS[name], rows, turns=40) for rows in (1, 2, 8)}
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for rows, tokens in expected.items():
        assert draw_tokens(KNOBS[name], rows, turns=40) == tokens


@pytest.mark.recorded
@pytest.mark.parametrize("most", [1, 3, 7, 15])
def test_the_tokens_do_not_depend_on_the_candidates_per_pass(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = draw_tokens(KNOBS["narrow top_p"], 8, turns=40)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    # one candidate more would not fit
    monkeypatch.setattr(draw, "MAX_PASS_BYTES", 4 * 8 * VOCAB * (2 * most + 1) - 1)
    assert draw._count_tests(8 * VOCAB) == most
    assert draw_tokens(KNOBS["narrow top_p"], 8, turns=40) == expected


def test_all_chains_are_listed() -> None:
    """Each function of the module that `compile_on_gpu` made."""
    names = {name for name, value in vars(draw).items() if _is_compiled(value)}
    assert names == set(CHAINS)


def _is_compiled(value: Any) -> bool:
    return inspect.isfunction(value) and value.__qualname__ == "compile_on_gpu.<locals>.call"


@pytest.mark.recorded
@pytest.mark.parametrize("name", CHAINS)
def test_another_batch_is_not_compiled_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    chain: Callable[..., mx.array] = inspect.getclosurevars(vars(draw)[name]).nonlocals["function"]
    traced: list[str] = []

    def traced_chain(*arrays: mx.array) -> mx.array:
        traced.append(name)
        return chain(*arrays)

    compiled = compile_on_gpu(traced_chain)
    for batch, width in ((1, 64), (8, 64), (3, 100), (32, 1000)):
        sizes = {"b": batch, "n": width, "m": width // 8, "1": 1}
        arguments = [
            mx.ones(
                [sizes[axis] for axis in shape.removesuffix(":")],
                mx.uint32 if shape.endswith(":") else mx.float32,
            )
            for shape in CHAINS[name].split()
        ]
        result = compiled(*arguments)
        mx.eval(result)
        if "b" in CHAINS[name]:
            assert result.shape[0] == batch
    assert traced == [name]
