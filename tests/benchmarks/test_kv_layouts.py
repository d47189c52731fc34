"""`make bench ARGS=layouts` runs, and all layouts agree."""

from pathlib import Path

import pytest

from benchmarks import kv_layouts, random_model
from benchmarks.kv_layouts import LAYOUTS, Batch, batches, decide
from tests.models.kernel_switch import BOTH, use_kernels

pytestmark = pytest.mark.exhaustive  # a tool of developers


@pytest.mark.parametrize("enabled", BOTH)
def test_the_bench_measures_every_layout_and_names_one(
    enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts that disagree fail inside the report."""
    monkeypatch.setattr(kv_layouts, "STEPS", 2)
    monkeypatch.setattr(kv_layouts, "ROUNDS", 1)
    monkeypatch.setattr(kv_layouts, "batches", lambda: batches(rows=3, lengths=(5, 30)))
    folder = random_model.write(tmp_path, "15M")
    with use_kernels(enabled=enabled):
        text = kv_layouts.report(folder)
    rows = [
        line for line in text.splitlines() if line.startswith(tuple(f"| {n} " for n in LAYOUTS))
    ]
    assert len(rows) == 3 * len(LAYOUTS)
    device = "kernels" if enabled else "cpu"
    assert sum(line.startswith(f"| {device} | 3 |") for line in text.splitlines()) == 3


def test_another_layout_is_chosen_only_if_it_is_clearly_faster() -> None:
    assert decide({"per sequence": 10.0, "padded, scatter": 9.8, "paged": 12.0}) == "per sequence"
    assert decide({"per sequence": 10.0, "padded, scatter": 5.0}).startswith("padded, scatter")


def test_padding_is_the_share_of_positions_that_a_padded_batch_adds() -> None:
    assert Batch(name="", lengths=[100, 100]).padding == 1
    assert Batch(name="", lengths=[1000, 100, 100]).padding == 2.5
