"""Checkpoints that transformers has just saved, with all their tensors, and larger images.

The environment of pytest lacks torch, so this runs only manually, in the environment of `make
parity`. All others compare with reference.json.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from models import architectures
from models.cpu_layout import apply_cpu_layout
from tests.models.vision.reference import CASES, draw_image, save_checkpoint
from tests.models.vision.test_towers import all_close, arrays


@pytest.mark.parametrize("name", CASES)
def test_a_saved_checkpoint_has_the_rows_of_transformers(name: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    case = CASES[name]
    theirs = save_checkpoint(case, tmp_path)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(weights, dict)
    config = json.loads((tmp_path / "config.json").read_text())
    model = architectures.build(config, weights)
    tower = architectures.get_tower(model)
    assert tower is not None
    apply_cpu_layout(tower)
    scale = 1 if tower.tile_size is not None or "gemma4" in name else 4
    for sizes in case.images:
        tiles = draw_image([(scale * height, scale * width) for height, width in sizes])
        with torch.no_grad():
            expected = case.compute(theirs, tiles)
        found = arrays(tower.encode([mx.array(tile) for tile in tiles]))
        all_close(found, [mx.array(rows.numpy()) for rows in expected])
