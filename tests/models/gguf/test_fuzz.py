"""Mutated GGUF files give a valid model or an error of one line."""

from pathlib import Path

import pytest

from tests.models.gguf.fuzz import fuzz


def test_mutated_files_give_a_model_or_an_error(tmp_path: Path) -> None:
    outcomes = fuzz(2_000, 0, tmp_path)
    assert outcomes.total() == 2_000
    assert outcomes["valid"] > 50
    assert outcomes["GGUFError"] > 500


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_mutated_files_give_a_model_or_an_error(tmp_path: Path, seed: int) -> None:
    assert fuzz(50_000, seed, tmp_path).total() == 50_000
