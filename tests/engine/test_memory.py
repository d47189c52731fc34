"""What a sequence takes is foretold from one token, and the budget comes from the device."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.engine import memory
from app.engine.memory import Memory, device_budget, measured
from models.base import Model
from models.kv import STEP
from tests.engine import hybrid
from tests.engine.driving import tiny_model

MODELS: dict[str, Any] = {"llama": tiny_model, "hybrid": hybrid.Model}
CHUNK = 8


def measure(model: Model, budget: int = 1 << 30) -> Memory:
    return measured(model, budget=budget, weights=1000, chunk=CHUNK, rows=4, heads=2, context=1024)


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("length", [1, 100, 300])
def test_a_sequence_takes_no_more_than_was_foretold(kind: str, length: int) -> None:
    model = MODELS[kind]()
    foretold = measure(model).footprint(length)
    kv = model.make_kv()
    for layer in kv:
        layer.reserve(length)
    for start in range(0, length, CHUNK):
        chunk = mx.zeros((1, min(CHUNK, length - start)), mx.int32)
        mx.eval(model(chunk, kv))
        assert sum(layer.nbytes for layer in kv) <= foretold


def test_the_longest_sequence_that_fits_is_found() -> None:
    model = tiny_model()
    footprint = measure(model).footprint
    for steps in (1, 2, 3):
        tight = Memory(budget=footprint(steps * STEP), weights=0, working=0, footprint=footprint)
        assert tight.positions(10_000) == steps * STEP
        assert tight.positions(100) == 100
    nothing = Memory(budget=footprint(1) - 1, weights=0, working=0, footprint=footprint)
    assert nothing.positions(100) == 0


def test_weights_and_working_space_come_first() -> None:
    small = measure(tiny_model())
    assert small.kv_budget == small.budget - 1000 - small.working
    assert small.working > 0
    assert measure(tiny_model(), budget=500).kv_budget == 0


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUPS", (limit, tmp_path / "absent"))
    return limit


def test_a_container_is_held_to_its_limit(cgroup: Path) -> None:
    cgroup.write_text("max\n")
    machine = device_budget()
    cgroup.write_text("1000000000\n")
    assert device_budget() == 700_000_000 < machine


def test_a_gpu_is_held_to_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 10**9})
    assert device_budget() == 900_000_000
