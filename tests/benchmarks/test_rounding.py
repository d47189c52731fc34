"""The rounding differences of logits are within the bounds given in docs/configuration.md and
docs/benchmarks.md."""

from pathlib import Path
from typing import cast

import mlx.nn as nn
import pytest

from benchmarks.rounding import iter_models, measure_differences
from models.cpu_layout import apply_cpu_layout
from tests.models.kernel_switch import BOTH, use_kernels

# by the names of `iter_models`: the bound without kernels, and whether kernels give equal bits
BOUNDS = {
    "built-in": (1e-4, True),
    "tiny llama-plain": (1e-4, True),
    "tiny glm4_moe_lite-plain": (1e-4, False),
    # a delta rule, which normalizes keys to length one however short they are
    "tiny qwen3_next-plain": (1e-3, False),
    "tiny qwen3_5-seeing": (1e-3, False),
}


@pytest.mark.exhaustive
@pytest.mark.no_cover
@pytest.mark.parametrize("with_kernels", BOTH)
@pytest.mark.parametrize("name", BOUNDS)
def test_cached_and_batched_logits_are_within_the_documented_bounds(
    name: str, with_kernels: bool, tmp_path: Path
) -> None:
    [(opened, vocab)] = [found[1:] for found in iter_models(tmp_path) if found[0] == name]
    bound, equal = BOUNDS[name]
    with use_kernels(enabled=with_kernels):
        model = opened()
        apply_cpu_layout(cast(nn.Module, model))
        largest, cached, batched = measure_differences(model, vocab, seed=0)
    assert largest > 1
    if with_kernels:
        assert batched == 0
    if with_kernels and equal:
        assert cached == 0
    assert max(cached, batched) < bound
