"""The values of pixels have the bits of transformers' processors, and patches the layout of
convolutions."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models.base import ModelError
from models.vision.pixels import (
    CLIP,
    HALF,
    NOT_NORMALIZED,
    Normalization,
    PixelTable,
    flatten_patch_weight,
    make_patches,
)
from tests.models.vision.reference import make_qwen_patches, normalize

BYTES = np.stack([np.arange(256, dtype=np.uint8)] * 3, axis=-1)
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("norm", [HALF, CLIP, NOT_NORMALIZED, IMAGENET])
def test_each_byte_has_the_bits_of_numpy(norm: Normalization):
    found = np.array(PixelTable({}, norm)(mx.array(BYTES)))
    np.testing.assert_array_equal(found, normalize(BYTES, *norm))


@pytest.mark.parametrize(
    ("processor", "norm"),
    [
        ({"image_mean": list(CLIP[0]), "image_std": list(CLIP[1])}, CLIP),
        ({"image_mean": None, "rescale_factor": 0.00392156862745098}, HALF),
        ({"do_normalize": False, "image_mean": [1, 1, 1]}, NOT_NORMALIZED),
    ],
)
def test_the_processor_config_selects_mean_and_deviation(
    processor: dict[str, Any], norm: Normalization
):
    found = np.array(PixelTable(processor, HALF)(mx.array(BYTES)))
    np.testing.assert_array_equal(found, normalize(BYTES, *norm))


def test_without_rescaling_bytes_are_normalized():
    found = np.array(PixelTable({"do_rescale": False}, ((1, 2, 3), (2, 2, 2)))(mx.array(BYTES)))
    np.testing.assert_array_equal(found, (BYTES - np.array([1.0, 2, 3])) / 2)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"image_mean": [0.5, 0.5]}, "image_mean must be a list of three numbers"),
        ({"image_std": ["a", 1, 1]}, "image_std must be a number"),
        ({"image_std": [1, 0, 1]}, "image_std contains 0"),
        ({"rescale_factor": True}, "rescale_factor must be a number"),
        ({"image_mean": [float("nan"), 0, 0]}, "image_mean must be a number"),
    ],
)
def test_invalid_values_are_named(processor: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {message}"):
        PixelTable(processor, HALF)


def test_patches_are_in_block_order_with_their_channels_first():
    tile = np.random.default_rng(0).integers(0, 256, (24, 16, 3), dtype=np.uint8)
    found = make_patches(PixelTable({}, HALF), mx.array(tile), 4, 2)
    patches, _ = make_qwen_patches(normalize(tile, *HALF), 4, 2)
    theirs = patches.reshape(-1, 3, 2, 16)[:, :, 0].reshape(-1, 48)
    np.testing.assert_array_equal(np.array(found), theirs)


@pytest.mark.parametrize("patch", [2, 3, 16])
@pytest.mark.parametrize("frames", [None, 2, 3])
def test_a_patch_weight_is_accepted_in_both_layouts(patch: int, frames: int | None):
    """Sizes may coincide: a patch of three pixels, three frames."""
    shape = (5, 3, *([frames] if frames else []), patch, patch)
    weight = mx.random.normal(shape)
    expected = (weight if frames is None else weight.sum(axis=2)).reshape(5, -1)
    if patch != 3:
        last = mx.moveaxis(weight, 1, -1)
        assert mx.array_equal(flatten_patch_weight("w", last, patch), expected)
    assert mx.array_equal(flatten_patch_weight("w", weight, patch), expected)
    assert mx.array_equal(flatten_patch_weight("w", expected, patch), expected)


def test_another_patch_weight_is_rejected_by_name():
    with pytest.raises(ModelError, match=r"proj \(\[5, 3, 4, 5\], expected"):
        flatten_patch_weight("proj", mx.zeros((5, 3, 4, 5)), 4)
