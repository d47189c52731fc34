"""Parameter counts and formats from the headers of weights."""

from dataclasses import replace
from pathlib import Path

import pytest

from app import store
from app.core.model_files import ModelFiles
from app.store.tensor_summary import summarize_tensors
from tests.store.shards import tensor_entry, write


@pytest.fixture
def files(tiny_model: Path) -> ModelFiles:
    return store.find(str(tiny_model))


def test_a_packed_weight_without_its_scales_is_counted_with_the_configured_bits(
    files: ModelFiles, tmp_path: Path
) -> None:
    """Another shard may hold the scales. Sixteen words of 32 bits hold 128 numbers of 4 bits."""
    shard = write(tmp_path / "one", {"a.weight": tensor_entry("U32", [2, 8], 0, 64)}, 64)
    config = {**files.config, "quantization": {"bits": 4, "group_size": 64}}
    found = summarize_tensors(replace(files, shards=(shard,), config=config))
    assert (found.parameters, found.quantization) == (128, "int4")


def test_a_packed_weight_has_a_group_for_each_scale(files: ModelFiles, tmp_path: Path) -> None:
    header = {
        "a.weight": tensor_entry("U32", [2, 8], 0, 64),
        "a.scales": tensor_entry("F32", [2, 1], 64, 72),
        "b.weight": tensor_entry("F32", [4], 72, 88),
    }
    shard = write(tmp_path / "one", header, 88)
    found = summarize_tensors(replace(files, shards=(shard,)))
    assert (found.parameters, found.quantization) == (132, "int4")
