"""The vision tower in a file of Ollama's own converter, as a projector in llama.cpp's terms.

Knows: Ollama's keys and tensor names of towers (ollama/ollama, convert/ and llama/compat/), and
what its converter omits. Must not know: our configs, MLX, the values of tensors.

Ollama's converter writes text model and tower into one file. llama.cpp's writes the tower to a
second file. If the file has no key for a value, the value of all published models of the family is
used.
"""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from models.gguf import reader
from models.gguf.metadata import Metadata
from models.gguf.projectors import ARCHITECTURE, group_tensors
from models.gguf.reader import Array, GGUFError, GGUFFile, UnsupportedError, Value

_ARCHITECTURE_KEY = "general.architecture"
_TENSORS, _AUDIO = ("v.", "mm."), "mm.a."

# the values from which the numbers of the channels of a pixel are subtracted, and their divisors
_Normalization = tuple[Sequence[float], Sequence[float]]
_HALF: _Normalization = ((0.5,) * 3, (0.5,) * 3)
_CLIP: _Normalization = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
_NONE: _Normalization = ((0.0,) * 3, (1.0,) * 3)

_BLOCK = re.compile(r"(v\.blk\.\d+\.)(.+)")
_DEEPSTACK = re.compile(r"v\.deepstack_merger\.(\d+)\.(norm|linear_fc1|linear_fc2)")

# the interval of the blocks of a Qwen2.5-VL that attend to the whole image
_FULL_ATTENTION_INTERVAL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """How the towers of one of Ollama's architectures differ. type: the projector's. blocks: the
    modules of a block, and llama.cpp's names for them. others: the same for other modules, or for
    complete names of tensors. complete: returns keys without `clip.` that are not those of the
    tower in the file."""

    type: str
    blocks: Mapping[str, str] = field(default_factory=dict[str, str])
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    normalization: _Normalization = _HALF
    complete: Callable[[Metadata], Mapping[str, Value]] = lambda metadata: {}


def read_projector(path: Path) -> GGUFFile:
    """Reads the header of a projector, or of a model with a tower, as that of a projector. Raises
    the errors of `reader.read`, and those of `extract_projector`."""
    file = reader.read(path)
    return extract_projector(file) if has_tower(file) else file


def has_tower(file: GGUFFile) -> bool:
    """Returns whether the file contains, besides the text model, a vision tower of a known
    family."""
    name = _get_architecture(file)
    return f"{name}.vision.block_count" in file.metadata and name in _TOWERS


def extract_projector(file: GGUFFile) -> GGUFFile:
    """Returns the vision tower of a file that has one. Raises GGUFError for a tower with tensors
    that the family does not have, and for a missing or invalid key."""
    metadata = Metadata(file)
    tower = _TOWERS[metadata.architecture]
    mean, std = tower.normalization
    keys: dict[str, Value] = {
        "has_vision_encoder": True,
        "projector_type": tower.type,
        "vision.projection_dim": metadata.integer("embedding_length"),
        "vision.image_mean": _make_array(mean),
        "vision.image_std": _make_array(std),
    }
    own = f"{metadata.architecture}."
    keys |= {
        key.removeprefix(own): value
        for key, value in file.metadata.items()
        if key.startswith(f"{own}vision.") and not (isinstance(value, Array) and not value.count)
    }
    keys |= tower.complete(metadata)
    renamed = {
        name: _rename(name, tower, metadata)
        for name in file.tensors
        if name.startswith(_TENSORS) and not name.startswith(_AUDIO)
    }
    found = replace(
        file,
        metadata={
            _ARCHITECTURE_KEY: ARCHITECTURE,
            **{f"{ARCHITECTURE}.{key}": value for key, value in keys.items()},
        },
        tensors={
            new: replace(file.tensors[name], name=new)
            for name, new in renamed.items()
            if new is not None
        },
    )
    group_tensors(found)  # raises for a tensor that the family does not have
    return found


def _get_architecture(file: GGUFFile) -> str:
    name = file.metadata.get(_ARCHITECTURE_KEY)
    return name if isinstance(name, str) else ""


def _make_array(numbers: Sequence[float]) -> Array:
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    return Array(kind="f32", count=len(numbers), data=memoryview(data))


def _rename(name: str, tower: _Tower, metadata: Metadata) -> str | None:
    """Returns llama.cpp's name of a tensor, or None for one that repeats others."""
    if name in tower.others:
        return tower.others[name] or None
    module, _, part = name.rpartition(".")
    if block := _BLOCK.fullmatch(module):
        return f"{block[1]}{tower.blocks.get(block[2], block[2])}.{part}"
    if merger := _DEEPSTACK.fullmatch(module):
        levels = _list_levels(metadata)
        if int(merger[1]) >= len(levels):
            raise GGUFError(f"{metadata.file.path} does not have the level of the tensor {name}")
        level = levels[int(merger[1])]
        return f"v.deepstack.{level}.{merger[2].removeprefix('linear_')}.{part}"
    return f"{tower.others.get(module, module)}.{part}"


def _list_levels(metadata: Metadata) -> list[int]:
    """Returns the blocks of a Qwen3-VL whose output the text model also gets."""
    name = "vision.deepstack_visual_indexes"
    listed = metadata.file.metadata.get(f"{metadata.architecture}.{name}")
    return metadata.integers(name, listed.count) if isinstance(listed, Array) else []


def _count_rows(metadata: Metadata, name: str) -> int:
    tensor = metadata.file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise GGUFError(f"{metadata.file.path} lacks the matrix {name}")
    return tensor.shape[0]


def _complete_gemma3(metadata: Metadata) -> Mapping[str, Value]:
    """The number of patches on a side of the square that becomes one row."""
    rows = metadata.integer("mm.tokens_per_image", 256)
    patch = metadata.integer("vision.patch_size")
    side = metadata.integer("vision.image_size") // patch if patch else 0
    merge = next((n for n in range(1, side + 1) if (side // n) ** 2 == rows), None)
    if merge is None:
        raise UnsupportedError(f"{metadata.file.path}: {side} patches do not become {rows} rows")
    return {"vision.projector.scale_factor": merge}


def _complete_mistral3(metadata: Metadata) -> Mapping[str, Value]:
    return {
        "use_silu": True,
        "rope.freq_base": metadata.number("vision.rope.freq_base", 10_000.0),
        "vision.spatial_merge_size": metadata.integer("spatial_merge_size", 1),
        "vision.rotates_pairs": False,
    }


def _complete_qwen25vl(metadata: Metadata) -> Mapping[str, Value]:
    name = "vision.fullatt_block_indexes"
    listed = metadata.file.metadata.get(f"{metadata.architecture}.{name}")
    interval = _FULL_ATTENTION_INTERVAL
    if isinstance(listed, Array) and listed.count:
        blocks = metadata.integers(name, listed.count)
        interval = blocks[0] + 1
        if blocks != list(range(blocks[0], metadata.integer("vision.block_count"), interval)):
            raise UnsupportedError(f"{metadata.file.path}: {name} is {blocks[:9]}")
    return {
        "vision.n_wa_pattern": interval,
        "vision.feed_forward_length": _count_rows(metadata, "v.blk.0.ffn_up.weight"),
    }


def _complete_qwen3vl(metadata: Metadata) -> Mapping[str, Value]:
    edges = {"shortest_edge": "image_min_pixels", "longest_edge": "image_max_pixels"}
    limits = {
        f"vision.{key}": number
        for edge, key in edges.items()
        if (number := metadata.integer(f"vision.{edge}", 0))
    }
    rows = _count_rows(metadata, "v.blk.0.mlp.linear_fc1.weight")
    return {"vision.feed_forward_length": rows, **limits}


def _complete_gemma4(metadata: Metadata) -> Mapping[str, Value]:
    packed, limit = "v.clamp_data", "v.blk.0.attn_q.input_max"
    if metadata.has_tensor(packed) and not metadata.has_tensor(limit):
        raise UnsupportedError(f"{metadata.file.path} has value limits in {packed} only")
    return {}


_QWEN3_VL = _Tower(
    type="qwen3vl_merger",
    blocks={
        "norm1": "ln1",
        "norm2": "ln2",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    },
    others={
        "v.patch_embed": "v.patch_embd",
        "v.pos_embed": "v.position_embd",
        "v.merger.norm": "v.post_ln",
        "v.merger.linear_fc1": "mm.0",
        "v.merger.linear_fc2": "mm.2",
    },
    complete=_complete_qwen3vl,
)

_TOWERS: Mapping[str, _Tower] = {
    "gemma3": _Tower(
        type="gemma3",
        blocks={
            "layer_norm1": "ln1",
            "layer_norm2": "ln2",
            "attn_output": "attn_out",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
        others={
            "v.patch_embedding": "v.patch_embd",
            "v.position_embedding": "v.position_embd",
            "v.post_layernorm": "v.post_ln",
            "mm.mm_input_projection": "mm.input_projection",
            "mm.mm_soft_emb_norm": "mm.soft_emb_norm",
        },
        complete=_complete_gemma3,
    ),
    # only the normal names of the limits are used, not their copy in one tensor
    "gemma4": _Tower(
        type="gemma4v",
        others={"v.clamp_data": ""},
        normalization=_NONE,
        complete=_complete_gemma4,
    ),
    "mistral3": _Tower(
        type="pixtral",
        blocks={"attn_norm": "ln1", "ffn_norm": "ln2", "attn_output": "attn_out"},
        others={
            "v.patch_conv": "v.patch_embd",
            "v.encoder_norm": "v.pre_ln",
            "mm.norm": "mm.input_norm",
            "mm.linear_1": "mm.1",
            "mm.linear_2": "mm.2",
            "mm.patch_merger.merging_layer": "mm.patch_merger",
        },
        normalization=_CLIP,
        complete=_complete_mistral3,
    ),
    "qwen25vl": _Tower(
        type="qwen2.5vl_merger",
        others={
            "v.patch_embd_0": "v.patch_embd",
            "v.patch_embd_1.weight": "v.patch_embd.weight.1",
            "v.merger.ln_q": "v.post_ln",
            "v.merger.mlp.0": "mm.0",
            "v.merger.mlp.2": "mm.2",
        },
        normalization=_CLIP,
        complete=_complete_qwen25vl,
    ),
    **dict.fromkeys(("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), _QWEN3_VL),
}
