"""Converts pixels to the numbers that a vision tower reads, and cuts them into patches.

Knows: the keys of preprocessor_config.json for the values of pixels. Must not know: resizing,
towers, codecs.

The numbers have the bits of Hugging Face transformers, whose processors compute with numpy: a byte
is multiplied by 1/255 in float64 and rounded to float32, then the mean is subtracted and the
difference divided by the standard deviation in float32. A channel has only 256 values, so they are
looked up.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

from models.base import ModelError

# the height and the width of a tile in pixels
Size = tuple[int, int]

# the mean and the standard deviation of red, green and blue
Normalization = tuple[Sequence[float], Sequence[float]]

HALF: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP: Normalization = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
NOT_NORMALIZED: Normalization = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

_RESCALE = 1 / 255


class PixelTable:
    """The float32 number of each byte of each channel."""

    def __init__(self, processor: Mapping[str, Any], default: Normalization) -> None:
        """processor: preprocessor_config.json. default: for missing keys. Raises ModelError for
        invalid values."""
        mean, std = _read_normalization(processor, default)
        scale = _read_number(processor.get("rescale_factor"), _RESCALE, "rescale_factor")
        if processor.get("do_rescale") is False:
            scale = 1.0
        self._values = mx.array(
            [
                _to_float32(_to_float32(byte * scale) - _to_float32(m)) / _to_float32(s)
                for byte in range(256)
                for m, s in zip(mean, std, strict=True)
            ]
        )

    def __call__(self, pixels: mx.array) -> mx.array:
        """Converts pixels [..., 3] uint8 to float32."""
        index = pixels.astype(mx.int32) * 3 + mx.arange(3)
        return self._values[index]


def make_patches(
    table: PixelTable, tile: mx.array, patch: int, merge: int, *, channels_last: bool = False
) -> mx.array:
    """Returns the patches [P, 3 * patch²] of a tile [height, width, 3] in block order. The values
    of a patch are ordered by channel, row and column, or by row, column and channel."""
    rows, cols = tile.shape[0] // patch, tile.shape[1] // patch
    blocks = tile.reshape(rows // merge, merge, patch, cols // merge, merge, patch, 3)
    ordered = blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * cols, patch, patch, 3)
    values = table(ordered) if channels_last else table(ordered).transpose(0, 3, 1, 2)
    return values.reshape(rows * cols, 3 * patch * patch)


def flatten_patch_weight(name: str, weight: mx.array, patch: int) -> mx.array:
    """Converts the weight of a convolution over patches to a matrix [out, 3 * patch²] for
    `make_patches`.

    weight: [out, 3, patch, patch] or [out, 3, frames, patch, patch] as in Hugging Face's
    checkpoints, the same with the channels last as in MLX's, or already a matrix. An image is a
    video of equal frames, so their weights are added. Raises ModelError for another shape.
    """
    if weight.ndim == 2:
        return weight
    shape = weight.shape
    if weight.ndim in (4, 5) and shape[1] == 3 and shape[-2:] == (patch, patch):
        channels_first = weight
    elif weight.ndim in (4, 5) and shape[-1] == 3 and shape[-3:-1] == (patch, patch):
        channels_first = mx.moveaxis(weight, -1, 1)
    else:
        raise ModelError(
            f"the checkpoint has wrongly shaped tensors: {name} ({list(shape)}, expected a "
            f"convolution over 3 channels of {patch} x {patch} patches)"
        )
    channels_first = channels_first.astype(mx.float32)
    if channels_first.ndim == 5:
        channels_first = channels_first.sum(axis=2)
    return channels_first.reshape(shape[0], -1)


def _read_normalization(processor: Mapping[str, Any], default: Normalization) -> Normalization:
    if processor.get("do_normalize") is False:
        return NOT_NORMALIZED
    mean = _read_channels(processor.get("image_mean"), default[0], "image_mean")
    std = _read_channels(processor.get("image_std"), default[1], "image_std")
    if not all(std):
        raise ModelError("preprocessor_config.json: image_std contains 0")
    return mean, std


def _read_channels(value: Any, default: Sequence[float], key: str) -> Sequence[float]:
    if value is None:
        return default
    if not isinstance(value, list | tuple) or len(cast(Sequence[Any], value)) != 3:
        raise ModelError(f"preprocessor_config.json: {key} must be a list of three numbers")
    return [_read_number(each, 0.0, key) for each in cast(Sequence[Any], value)]


def _read_number(value: Any, default: float, key: str) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ModelError(f"preprocessor_config.json: {key} must be a number")
    return float(value)


def _to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]
