"""Computations that models do differently on a GPU, tested without one: MLX reports a GPU and uses
the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import gated_delta_metal, gpt_oss, layers, qwen3_next
from models.gated_delta_metal import gated_delta_on_metal
from models.gpu_layout import apply_gpu_layout
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.kernel_switch import use_kernels
from tests.models.test_gated_delta_metal import compute_by_chunks

ACTIVATIONS = {name: layers.ACTIVATIONS[name] for name in ("silu", "gelu_pytorch_tanh", "relu")}
TYPES = [mx.float32, mx.bfloat16, mx.float16]

# An array per argument, which has as many axes as in the model.
CHAINS: dict[str, tuple[Callable[..., mx.array], int]] = {
    **{
        f"{name} * up": (lambda gate, up, f=f: layers.apply_glu(f, gate, up), 2)
        for name, f in ACTIVATIONS.items()
    },
    "gpt-oss": (
        gpt_oss.Config.make_gating(
            gpt_oss.Config.from_dict(
                next(case.config for case in cases() if case.id == "gpt_oss-plain")
            )
        ),
        2,
    ),
    "silu in float32": (qwen3_next._silu_float32, 1),
    "sigmoid in float32": (qwen3_next._sigmoid_float32, 1),
    "output gates": (qwen3_next._apply_output_gates, 2),
}


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with use_kernels(enabled=False):
        yield


def report_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    patch.setattr(mx.metal, "is_available", lambda: True)


@pytest.mark.recorded
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_a_compiled_chain_computes_the_same(
    name: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain of single operations is the oracle."""
    chain, count = CHAINS[name]
    for shape in ((1, 1, 64), (3, 1, 64), (1, 7, 32)):
        arrays = [
            (3 * mx.random.normal(shape, key=mx.random.key(i))).astype(dtype) for i in range(count)
        ]
        with monkeypatch.context() as patch:
            report_gpu(patch)
            compiled = chain(*arrays)
        expected = chain(*arrays)
        assert compiled.dtype == expected.dtype
        np.testing.assert_allclose(
            np.array(compiled.astype(mx.float32)),
            np.array(expected.astype(mx.float32)),
            rtol={mx.float32: 1e-6, mx.bfloat16: 1e-2, mx.float16: 1e-3}[dtype],
            atol=1e-6,
        )


def test_a_chain_is_not_compiled_again_for_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def double(x: mx.array) -> mx.array:
        calls.append(x.shape)
        return x * 2

    chain = layers.compile_on_gpu(double)
    report_gpu(monkeypatch)
    for rows in (1, 2, 8, 1, 5):
        assert chain(mx.ones((rows, 1, 4))).shape == (rows, 1, 4)
    assert calls == [(1, 1, 4)]


def test_a_cpu_computes_the_single_operations() -> None:
    calls: list[int] = []

    def double(x: mx.array) -> mx.array:
        calls.append(1)
        return x * 2

    chain = layers.compile_on_gpu(double)
    for _ in range(3):
        chain(mx.ones((2,)))
    assert len(calls) == 3


DELTA_CASES = [case for case in cases() if case.id in ("qwen3_next-plain", "qwen3_5-tied")]


def load(case: Case, folder: Path) -> Any:
    parity.save_reference(case, folder)
    return parity.load_model(folder)


@pytest.mark.parametrize("case", DELTA_CASES, ids=lambda case: case.id)
def test_delta_layers_use_the_kernel_that_passed_its_test(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(case, tmp_path)
    prompt = parity.ids(case, 40)
    expected = parity.prefill(model, prompt, [40])
    monkeypatch.setattr(gated_delta_metal, "LANES", 1)  # the heads of tiny models are small
    monkeypatch.setattr(gated_delta_metal, "_kernel", lambda: compute_by_chunks)
    with monkeypatch.context() as patch:
        report_gpu(patch)
        assert apply_gpu_layout(model) == []
    assert {net.rule for net in delta_nets(model)} == {gated_delta_on_metal}
    found = parity.prefill(model, prompt, [30, 10])
    assert parity.max_difference(found, expected) < parity.tolerance(case)


def test_delta_layers_keep_plain_operations_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(DELTA_CASES[0], tmp_path)
    rules = {net.rule for net in delta_nets(model)}
    monkeypatch.setattr(gated_delta_metal, "LANES", 1)
    monkeypatch.setattr(gated_delta_metal, "_kernel", lambda: lambda **_: 1 / 0)
    report_gpu(monkeypatch)
    [reason] = apply_gpu_layout(model)
    assert "gated delta rule is not used, because it fails: division by zero" in reason
    assert {net.rule for net in delta_nets(model)} == rules


def test_other_models_and_devices_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(DELTA_CASES[0], tmp_path / "delta")
    assert apply_gpu_layout(model) == []
    assert gated_delta_on_metal not in {net.rule for net in delta_nets(model)}
    llama = load(next(case for case in cases() if case.id == "llama-plain"), tmp_path / "llama")
    report_gpu(monkeypatch)
    assert apply_gpu_layout(llama) == []


def delta_nets(model: nn.Module) -> list[qwen3_next.GatedDeltaNet]:
    modules: Any = model.named_modules()
    found = [module for _, module in modules if isinstance(module, qwen3_next.GatedDeltaNet)]
    assert found
    return found
