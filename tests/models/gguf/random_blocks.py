"""Random rows of GGUF's blocks, with weights of usual sizes."""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from models.gguf.blocks import dequantize
from models.gguf.ggml_types import GGML_TYPES
from models.gguf.layers import StoredBlocks

# the types with blocks: the places of the float16 numbers in a block
SCALES: Mapping[int, tuple[int, ...]] = {
    2: (0,),
    3: (0, 2),
    6: (0,),
    7: (0, 2),
    8: (0,),
    10: (80, 82),
    11: (108,),
    12: (0, 2),
    13: (0, 2),
    14: (208,),
    20: (0,),
    23: (0,),
    39: (),
}

NAMES = [GGML_TYPES[id].name for id in SCALES]
IDS = {GGML_TYPES[id].name: id for id in SCALES}


def make_blocks(type_id: int, *shape: int, seed: int = 0) -> mx.array:
    """Blocks of a matrix, or of a stack of matrices, [..., columns]: uint8 [..., bytes]."""
    kind, draw = GGML_TYPES[type_id], np.random.default_rng(seed)
    *outer, columns = shape
    size = (*outer, columns // kind.elements, kind.nbytes)
    raw = draw.integers(0, 256, size, dtype=np.uint8)
    for place in SCALES[type_id]:
        scales = (0.01 * draw.standard_normal((*size[:-1], 1))).astype(np.float16)
        raw[..., place : place + 2] = scales.view(np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = draw.integers(118, 126, size[:-1])
    return mx.array(raw.reshape(*outer, -1))


def store_blocks(type_id: int, *shape: int, seed: int = 0) -> StoredBlocks:
    """The same blocks with their dequantized weight."""
    raw = make_blocks(type_id, *shape, seed=seed)
    return StoredBlocks(weight=dequantize(raw, type_id), raw=raw, type_id=type_id)
