"""The comparison of the host's work with mlx-lm's: one turn of each library, and its table."""

import pytest

from benchmarks import graph
from benchmarks.graph import HostWork, format_rows
from tests.device import models

pytestmark = pytest.mark.exhaustive  # a tool of developers


@pytest.mark.parametrize("rows", [2, 4])
def test_a_turn_of_both_libraries_is_measured(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows share slabs."""
    monkeypatch.setattr(graph, "TURNS", 1)
    found = graph._measure({**models.DENSE, "num_hidden_layers": 3}, rows)
    assert list(found) == ["ours", "mlx-lm"]
    for [turn] in found.values():
        assert turn.build > 0
        assert turn.eval > 0
        assert 60 < turn.launches < turn.nodes < 200


def test_the_ratio_is_the_median_of_the_turns() -> None:
    ours = [HostWork(build=n, eval=n, nodes=9, launches=5) for n in (2.0, 3.0, 8.0)]
    theirs = [HostWork(build=n, eval=n, nodes=8, launches=4) for n in (2.0, 2.0, 2.0)]
    first, second = format_rows("dense", 8, {"ours": ours, "mlx-lm": theirs}, 1.7)
    assert first == "| dense | 8 | ours | 9 | 5 | 3.00 | 3.00 | 1.50 | ≤ 1.7 |"
    assert second == "| dense | 8 | mlx-lm | 8 | 4 | 2.00 | 2.00 |  |  |"
    [alone] = format_rows("dense", 1, {"ours": ours}, 1.2)
    assert alone.endswith("| 3.00 | 3.00 |  |  |")
