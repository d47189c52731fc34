"""Each tower computes the rows of transformers. They have the same bits alone and between steps of
other images, and its memory is bounded.

The references are in reference.json, which reference.py writes.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import kernels
from models.cpu_layout import apply_cpu_layout
from models.multimodal import get_vision_weights
from models.vision import tower
from models.vision.build import build_tower
from models.vision.tower import ImageFeatures, VisionTower
from tests.models.kernel_switch import BOTH, use_kernels
from tests.models.vision import reference
from tests.models.vision.reference import CASES, Sizes, draw_image, draw_tensor

pytestmark = pytest.mark.recorded

REFERENCE: Any = json.loads(reference.FILE.read_text())

# the largest difference of rows whose values are at most 14, and in proportion to larger ones
NEAR = 2e-5


def draw_weights(name: str) -> dict[str, mx.array]:
    shapes = REFERENCE[name]["tensors"]
    return {tensor: mx.array(draw_tensor(tensor, shape)) for tensor, shape in shapes.items()}


def build(name: str) -> VisionTower:
    built = build_tower(REFERENCE[name]["config"], get_vision_weights(draw_weights(name)))
    assert built is not None
    model, weights = built
    model.load_weights(list(weights.items()))
    apply_cpu_layout(model)
    return model


def tiles(sizes: Sizes) -> list[mx.array]:
    return [mx.array(tile) for tile in draw_image(sizes)]


def arrays(features: ImageFeatures) -> list[mx.array]:
    return [features.rows, *features.deepstack]


def same_bits(a: ImageFeatures, b: ImageFeatures) -> bool:
    pairs = zip(arrays(a), arrays(b), strict=True)
    return all(mx.array_equal(ours, theirs) for ours, theirs in pairs)


def all_close(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> None:
    for rows, expected in zip(ours, theirs, strict=True):
        values = np.array(expected)
        limit = NEAR * max(1, np.abs(values).max() / 14)
        np.testing.assert_allclose(np.array(rows), values, rtol=0, atol=limit)


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=BOTH)
def model(request: pytest.FixtureRequest, name: str) -> Iterator[VisionTower]:
    with use_kernels(enabled=request.param):
        yield build(name)


def test_the_rows_are_those_of_transformers(model: VisionTower, name: str):
    outputs = REFERENCE[name]["outputs"]
    for sizes, expected in zip(CASES[name].images, outputs, strict=True):
        found = arrays(model.encode(tiles(sizes)))
        assert len(found) == len(expected)
        theirs = [
            mx.array(reference.decode(text, rows.shape[1]))
            for rows, text in zip(found, expected, strict=True)
        ]
        assert min(np.ptp(rows) for rows in theirs) > 1, "equal rows prove nothing"
        all_close(found, theirs)


def test_the_rows_are_counted_before_they_are_computed(model: VisionTower, name: str):
    for sizes in CASES[name].images:
        found = arrays(model.encode(tiles(sizes)))
        assert {len(rows) for rows in found} == {model.count_rows(sizes)}
        assert sum(rows.shape[1] for rows in found) == model.feature_size


def test_steps_of_several_images_in_turns_do_not_change_the_bits(model: VisionTower, name: str):
    images = [tiles(sizes) for sizes in CASES[name].images]
    alone = [model.encode(image) for image in images]
    encodings = [model.begin(image) for image in images]
    while waiting := [each for each in encodings if each.num_done < each.num_steps]:
        for encoding in waiting:
            encoding.run_step()
    for encoding, expected in zip(encodings, alone, strict=True):
        assert same_bits(encoding.finish(), expected)


def test_a_tile_in_several_chunks_has_the_same_rows(
    model: VisionTower, name: str, monkeypatch: pytest.MonkeyPatch
):
    image = tiles(CASES[name].images[0])
    whole = model.begin(image)
    while whole.num_done < whole.num_steps:
        whole.run_step()
    monkeypatch.setattr(tower, "_chunk_length", lambda: 2 * model.merge_size**2)
    parts = model.begin(image)
    assert parts.num_steps > whole.num_steps
    for _ in range(parts.num_steps):
        parts.run_step()
    if kernels.ops() is not None:
        assert same_bits(parts.finish(), whole.finish())
    all_close(arrays(parts.finish()), arrays(whole.finish()))


def test_features_are_available_after_the_last_step_only(model: VisionTower, name: str):
    encoding = model.begin(tiles(CASES[name].images[0]))
    for left in range(encoding.num_steps, 0, -1):
        with pytest.raises(ValueError, match=f"{left} steps are left"):
            encoding.finish()
        encoding.run_step()
    assert encoding.finish().rows.size


@pytest.mark.parametrize("factor", [1, 3])
def test_the_memory_is_at_most_the_estimate(model: VisionTower, name: str, factor: int):
    if model.tile_size is not None:
        factor = 1
    sizes = [(factor * height, factor * width) for height, width in CASES[name].images[0]]
    image = tiles(sizes)
    mx.eval(image, model.parameters())
    model.encode(image)  # caches of constants
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    features = model.encode(image)
    used = mx.get_peak_memory() - before
    assert features.rows.size
    estimate = model.estimate_bytes(sizes)
    assert used <= estimate
    # without the kernels, scores are counted as for layers that overlap
    assert estimate < 4 * used or kernels.ops() is None


def test_a_tile_that_is_not_made_of_whole_squares_is_rejected(model: VisionTower):
    side = model.tile_size or model.patch_size * model.merge_size
    for height, width in ((side + 1, side), (side, side - 1), (0, side)):
        with pytest.raises(ValueError, match=rf"a tile of {width} x {height} .* {side} x {side}"):
            model.begin([mx.zeros((height, width, 3), mx.uint8)])


def test_on_a_gpu_a_tower_computes_in_the_type_of_its_weights(name: str):
    """Here on the CPU without the kernels and without their layout."""
    built = build_tower(REFERENCE[name]["config"], get_vision_weights(draw_weights(name)))
    assert built is not None
    model, weights = built
    exact = build(name)
    model.load_weights([(key, array.astype(mx.bfloat16)) for key, array in weights.items()])
    with use_kernels(enabled=False):
        image = tiles(CASES[name].images[0])
        found, expected = model.encode(image), exact.encode(image)
    for rows, theirs in zip(arrays(found), arrays(expected), strict=True):
        assert rows.dtype == mx.bfloat16
        limit = 0.1 * np.abs(np.array(theirs)).max()
        np.testing.assert_allclose(rows.astype(mx.float32), theirs, rtol=0, atol=limit)
