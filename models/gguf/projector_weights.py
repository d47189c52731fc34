"""The tensors of a projector file (`mmproj-….gguf`) as the vision modules of a checkpoint on the
hub.

Knows: what llama.cpp's converters change in the tensors of vision towers, and how to undo it. Must
not know: the names in the file, modules.
"""

from math import isqrt

import mlx.core as mx

from models.base import ModelError
from models.gguf.layers import StoredBlocks
from models.gguf.metadata import Metadata
from models.gguf.projectors import Projector, find_projector, group_tensors
from models.gguf.reader import GGUFFile
from models.gguf.weights import (
    ROTATED,
    Arrays,
    UnreadTensors,
    split_rotated_pairs,
    to_floats,
    unpack,
)

# the limits of the values of a layer, which are numbers on the hub, but vectors in the file
_LIMITS = (".input_min", ".input_max", ".output_min", ".output_max")

# parameters that are never used as a packed matrix; those of one dimension are never packed
_UNPACKED = (
    ".mm_input_projection_weight",
    ".patch_embed.proj.weight",
    ".patch_embedding.weight",
    ".patch_conv.weight",
    ".position_embedding_table",
    ".pos_embedding",
)


def open_projector(file: GGUFFile, unread: UnreadTensors) -> Arrays:
    """Returns the tensors of the vision modules, with their names on the hub, and in MLX's packings
    if they are quantized. Adds the arrays whose content must be read, and the blocks of quantized
    weights, to `unread`. Raises GGUFError for a tensor that the family does not have, and
    ModelError for a shape that contradicts the metadata."""
    metadata = Metadata(file)
    projector = find_projector(metadata)
    weights: Arrays = {}
    for target, names in group_tensors(file).items():
        parts = [file.tensors[name] for name in names]
        raws = [unread.add(part) for part in parts]
        is_unpacked = target.endswith(_UNPACKED) or target in projector.channels_last
        kind = parts[0].type
        if is_unpacked or kind.is_plain or any(part.type != kind for part in parts):
            floats = [to_floats(raw, part.type) for raw, part in zip(raws, parts, strict=True)]
            weights[target] = _restore(target, _join(target, floats), projector, metadata)
            continue
        raw = _restore(target, _join(target, raws), projector, metadata)
        unpacked = unpack(target, raw, kind)
        weights |= unpacked
        unread.blocks.append(StoredBlocks(weight=unpacked[target], raw=raw, type_id=kind.id))
    return weights


def _join(target: str, parts: list[mx.array]) -> mx.array:
    """Joins the parts of a parameter: the two frames of a patch, or rows."""
    are_frames = target.endswith(".patch_embed.proj.weight")
    if are_frames and len(parts) == 1 and parts[0].ndim == 4 and parts[0].shape[1] == 2:
        # Ollama's converter joins the axis of the channels of a pixel with that of the rows
        rows, *others = parts[0].shape
        if rows % 3:
            raise ModelError(f"{target} has the shape {[rows, *others]}")
        return parts[0].reshape(rows // 3, 3, *others)
    if are_frames and len(parts) != 2:
        raise ModelError(f"the projector has {len(parts)} tensors v.patch_embd.weight, not 2")
    if len(parts) == 1:
        return parts[0]
    try:
        return mx.stack(parts, axis=2) if are_frames else mx.concatenate(parts)
    except ValueError as error:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise ModelError(f"the parts of {target} have the shapes {shapes}") from error


def _restore(target: str, array: mx.array, projector: Projector, metadata: Metadata) -> mx.array:
    """Undoes what the converter changed."""
    if target in projector.channels_last:
        return _move_channels_last(target, array)
    rotates = projector.rotates_pairs and metadata.flag("vision.rotates_pairs", True)
    if rotates and target.endswith(ROTATED):
        heads = metadata.integer("vision.attention.head_count")
        return split_rotated_pairs(target, array, heads)
    if target.endswith(".mm_soft_emb_norm.weight"):
        return array - 1
    if target.endswith(".pos_embedding"):
        return array.swapaxes(0, 1)
    if target.endswith(_LIMITS) and array.size == 1:
        return array.reshape(())
    return array


def _move_channels_last(target: str, array: mx.array) -> mx.array:
    """Reorders the values of square patches [..., 3, side, side], whose last three axes may be one,
    to [..., side * side * 3]."""
    outer = array.shape[:1] if array.ndim in (2, 4) else ()
    size = array.size // (outer[0] if outer else 1)
    side = isqrt(size // 3)
    if not side or 3 * side * side != size:
        raise ModelError(
            f"{target} has the shape {list(array.shape)}, which is not a shape of patches"
        )
    patches = array.reshape(*outer, 3, side, side)
    return mx.moveaxis(patches, -3, -1).reshape(*outer, size)
