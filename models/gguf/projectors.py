"""Converts the metadata of a projector file (`mmproj-….gguf`), which contains the vision tower of a
GGUF model, to the config as on the Hugging Face hub, and its tensor names to those on the hub.

Knows: llama.cpp's keys and names for vision towers (gguf-py, constants.py and tensor_mapping.py),
what its converters omit. Must not know: MLX, the values of weights, pixels.

llama.cpp calls the whole file, with the tower, a projector. Together with the config of the text
model, it describes the same model as on the hub, so that each tower is implemented once. If a file
has no key for a value, the value of all published models of the family is used.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.gguf.metadata import Metadata
from models.gguf.reader import GGUFError, GGUFFile, UnsupportedError

Config = dict[str, Any]

ARCHITECTURE = "clip"

_MAX_BLOCKS = 4096

_BLOCK = re.compile(r"v\.blk\.(\d+)\.(.+)")
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_DEEPSTACK_NAMES: Mapping[str, str] = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}

# audio towers, and a copy of an embedding of the text model
_UNUSED = ("a.", "mm.a.", "v.token_embd.img_break")

_SIGLIP_BLOCK: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_OTHERS: Mapping[str, str] = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
_SIGLIP_PARENT = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."

# several names of one parameter are its parts, in this order: rows, or the frames of a patch
_QWEN_PATCH: Mapping[str, str] = {
    "v.patch_embd": "patch_embed.proj",
    "v.patch_embd.weight.1": "patch_embed.proj.weight",
}
_QWEN_BLOCK: Mapping[str, str] = {
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
}

_QWEN2_OTHERS: Mapping[str, str] = {
    **{name: f"visual.{target}" for name, target in _QWEN_PATCH.items()},
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}

# the limits of the area of an image in published models of Qwen2-VL and Qwen2.5-VL, in pixels
_QWEN2_LIMITS: Mapping[str, int] = {"min_pixels": 3136, "max_pixels": 12845056}

_PIXTRAL_BLOCK: Mapping[str, str] = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}

# module in the file -> linear layer on the hub, which may limit the values of its input and output
_GEMMA4_LINEARS: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_GEMMA4_BLOCK: Mapping[str, str] = {
    **{f"{name}.weight": f"{layer}.linear.weight" for name, layer in _GEMMA4_LINEARS.items()},
    **{
        f"{name}.{limit}": f"{layer}.{limit}"
        for name, layer in _GEMMA4_LINEARS.items()
        for limit in _LIMITS
    },
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ln1": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}

_LLAMAS = ("llama", "mistral", "ministral3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The parts of a config that describe a tower. vision: `vision_config`. outer: keys next to it.
    processor: the settings of preprocessor_config.json besides the values of pixels."""

    vision: Config
    outer: Config = field(default_factory=dict[str, Any])
    processor: Config = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """A type of projector in llama.cpp.

    text_types: the model type of the text model, as `architectures.read_config` returns it, and
        that of the whole model on the hub.
    describe: reads the config.
    block_names: the names of tensors of a block without `v.blk.N.` and the part (`.weight`), and
        their module on the hub. Entries with a part are complete names of parameters. block_parent:
        precedes them; "{}" is the number of the block. other_names: of other tensors.
    image_token: the image token, if llama.cpp's converter omits it from the vocabulary.
    has_deepstack: whether the text model may also get the output of some blocks (DeepStack).
    swaps_mlps: whether early files have the two layers of an MLP under each other's names.
    rotates_pairs: see `models.gguf.architectures.Architecture`.
    channels_last: parameters whose values have the channels of a pixel last on the hub, but first
        in the file.
    """

    text_types: Mapping[str, str]
    describe: Callable[[Metadata], Described]
    block_names: Mapping[str, str]
    block_parent: str
    other_names: Mapping[str, str]
    image_token: str | None = None
    has_deepstack: bool = False
    swaps_mlps: bool = False
    rotates_pairs: bool = False
    channels_last: Sequence[str] = ()


def find_projector(metadata: Metadata) -> Projector:
    """Raises GGUFError for a file that is not a projector for images, and UnsupportedError for an
    unsupported type."""
    path = metadata.file.path
    if metadata.architecture != ARCHITECTURE:
        raise GGUFError(f"{path} is a {metadata.architecture} and not a projector for images")
    if not metadata.flag("has_vision_encoder", False):
        raise UnsupportedError(f"{path} has no vision tower")
    kind = _read_type(metadata)
    if kind not in _PROJECTORS:
        raise UnsupportedError(
            f"{path}: projectors of the type {kind[:80]!r} are not supported; supported types: "
            f"{', '.join(sorted(_PROJECTORS))}"
        )
    return _PROJECTORS[kind]


def _read_type(metadata: Metadata) -> str:
    """Files with several towers have one type for each."""
    return metadata.text("projector_type", "") or metadata.text("vision.projector_type", "")


def fits(file: GGUFFile, text: Mapping[str, Any]) -> bool:
    """Returns whether the rows of the tower are inputs of a text model. text: its config. Raises
    the errors of `read_config`."""
    metadata = Metadata(file)
    is_known = text["model_type"] in find_projector(metadata).text_types
    return is_known and metadata.integer("vision.projection_dim") == text["hidden_size"]


def read_config(file: GGUFFile, text: Mapping[str, Any]) -> tuple[Config, Config]:
    """Returns the config of the whole model as on the hub, and the settings of its image processor.
    text: the config of a text model that `fits`. Raises GGUFError for an unsupported type, and for
    a missing or invalid key, with its name."""
    metadata = Metadata(file)
    projector = find_projector(metadata)
    described = projector.describe(metadata)
    text = dict(text)
    kind = projector.text_types[text["model_type"]]
    if kind.startswith("gemma4") and not text.get("hidden_size_per_layer_input"):
        # no key has it; models with per-layer embeddings are the small ones, which do not
        text["use_bidirectional_attention"] = "vision"
    if kind == "pixtral" and described.outer.get("spatial_merge_size", 1) > 1:
        kind = "mistral3"
    config = {
        "model_type": kind,
        "text_config": text,
        "vision_config": described.vision,
        **described.outer,
    }
    values = {name: metadata.numbers(f"vision.{name}", 3) for name in ("image_mean", "image_std")}
    return config, {**values, **described.processor}


def group_tensors(file: GGUFFile) -> dict[str, list[str]]:
    """Returns the names of the tensors of each parameter of the vision modules on the hub: usually
    one, otherwise its parts. Raises GGUFError for a tensor that the family does not have."""
    metadata = Metadata(file)
    projector = find_projector(metadata)
    levels = _list_deepstack(metadata) if projector.has_deepstack else ()
    swaps = projector.swaps_mlps and _has_swapped_mlps(metadata)
    found: dict[str, list[tuple[int, str]]] = {}
    for name in file.tensors:
        if name.startswith(_UNUSED):
            continue
        order, target = _rename(_swap_mlp(name) if swaps else name, projector, levels)
        if target is None:
            raise GGUFError(
                f"{file.path}: projectors of the type {_read_type(metadata)} have no tensor {name}"
            )
        found.setdefault(target, []).append((order, name))
    return {target: [name for _, name in sorted(parts)] for target, parts in found.items()}


def _rename(name: str, projector: Projector, levels: Sequence[int]) -> tuple[int, str | None]:
    """Returns the order among the parts of a parameter, and the parameter."""
    if (match := _DEEPSTACK.fullmatch(name)) and int(match[1]) in levels:
        module = f"visual.deepstack_merger_list.{levels.index(int(match[1]))}"
        return 0, f"{module}.{_DEEPSTACK_NAMES[match[2]]}.{match[3]}"
    block = _BLOCK.fullmatch(name)
    names = projector.other_names if block is None else projector.block_names
    parent = "" if block is None else projector.block_parent.format(int(block[1]))
    rest = name if block is None else block[2]
    module, _, part = rest.rpartition(".")
    for order, (own, target) in enumerate(names.items()):
        if rest == own:
            return order, parent + target
        if module == own:
            return order, f"{parent}{target}.{part}"
    return 0, None


def _has_swapped_mlps(metadata: Metadata) -> bool:
    """Returns whether the two layers of each MLP have each other's names, as in early files. Their
    widths show it."""
    down = metadata.file.tensors.get("v.blk.0.ffn_down.weight")
    width = metadata.integer("vision.embedding_length")
    return down is not None and down.shape[-1] == width != down.shape[0]


def _swap_mlp(name: str) -> str:
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return ".".join(other.get(part, part) for part in name.split("."))


def _list_deepstack(metadata: Metadata) -> Sequence[int]:
    """Returns the blocks whose output the text model also gets."""
    matches = map(_DEEPSTACK.fullmatch, metadata.file.tensors)
    return sorted({int(match[1]) for match in matches if match})


def _positive(metadata: Metadata, name: str, default: int | None = None) -> int:
    value = metadata.integer(name, default)
    if value < 1:
        raise GGUFError(
            f"{metadata.file.path}: the key {ARCHITECTURE}.{name} is {value}, but must be 1 or more"
        )
    return value


def _shape(metadata: Metadata, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """Returns the shape of a tensor, from which a size follows."""
    tensor = metadata.file.tensors.get(name)
    if tensor is None:
        raise GGUFError(f"{metadata.file.path} lacks the tensor {name}")
    if len(tensor.shape) != dimensions:
        raise GGUFError(
            f"{metadata.file.path}: the tensor {name} has {len(tensor.shape)} dimensions instead "
            f"of {dimensions}"
        )
    return tensor.shape


def _count_blocks(metadata: Metadata) -> int:
    count = metadata.integer("vision.block_count")
    if not 0 < count <= _MAX_BLOCKS:  # lists with an entry per block are made
        raise GGUFError(f"{metadata.file.path}: the vision tower has {count} blocks")
    return count


def _describe_encoder(metadata: Metadata) -> Config:
    """The keys that SigLIP, Pixtral and Gemma 4 have in common."""
    return {
        "hidden_size": _positive(metadata, "vision.embedding_length"),
        "intermediate_size": _positive(metadata, "vision.feed_forward_length"),
        "num_hidden_layers": _count_blocks(metadata),
        "num_attention_heads": _count_heads(metadata),
        "patch_size": _positive(metadata, "vision.patch_size"),
    }


def _count_heads(metadata: Metadata) -> int:
    width = metadata.integer("vision.embedding_length")
    heads = _positive(metadata, "vision.attention.head_count")
    if width % heads:
        raise GGUFError(
            f"{metadata.file.path}: {width} values cannot be divided among {heads} heads"
        )
    return heads


def _describe_siglip(metadata: Metadata) -> Config:
    return {
        **_describe_encoder(metadata),
        "image_size": _positive(metadata, "vision.image_size"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
    }


def _describe_gemma3(metadata: Metadata) -> Described:
    vision = _describe_siglip(metadata)
    side = vision["image_size"] // vision["patch_size"]
    merge = _positive(metadata, "vision.projector.scale_factor", 4)
    return Described(vision=vision, outer={"mm_tokens_per_image": (side // merge) ** 2})


def _describe_idefics3(metadata: Metadata) -> Described:
    """The converter replaces a missing epsilon with 1e-5, but the default on the hub is 1e-6."""
    vision = {**_describe_siglip(metadata), "layer_norm_eps": 1e-6}
    processor: Config = {"max_image_size": {"longest_edge": vision["image_size"]}}
    if metadata.has("vision.preproc_image_size"):
        longest = _positive(metadata, "vision.preproc_image_size")
        processor["size"] = {"longest_edge": longest}
    merge = _positive(metadata, "vision.projector.scale_factor")
    return Described(vision=vision, outer={"scale_factor": merge}, processor=processor)


def _describe_lfm2(metadata: Metadata) -> Described:
    """The file contains the size of the position table, not the image size."""
    vision = {
        **_describe_siglip(metadata),
        "num_patches": _shape(metadata, "v.position_embd.weight")[0],
    }
    outer = {
        "downsample_factor": _positive(metadata, "vision.projector.scale_factor", 2),
        "projector_hidden_size": _shape(metadata, "mm.1.weight")[0],
        "projector_bias": metadata.has_tensor("mm.1.bias"),
        "projector_use_layernorm": metadata.has_tensor("mm.input_norm.weight"),
    }
    return Described(vision=vision, outer=outer)


def _describe_pixtral(metadata: Metadata) -> Described:
    size = _positive(metadata, "vision.image_size")
    vision = {
        **_describe_encoder(metadata),
        "model_type": "pixtral",
        "image_size": size,
        "hidden_act": _read_activation(metadata),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
    }
    outer = {
        "spatial_merge_size": _positive(metadata, "vision.spatial_merge_size", 1),
        "multimodal_projector_bias": metadata.has_tensor("mm.1.bias"),
    }
    # the longest edge of an image is the tower's in all published models
    return Described(vision=vision, outer=outer, processor={"size": {"longest_edge": size}})


def _read_activation(metadata: Metadata) -> str:
    silu, gelu = metadata.flag("use_silu", False), metadata.flag("use_gelu", False)
    if silu == gelu:
        raise GGUFError(f"{metadata.file.path} has neither or both of clip.use_silu, clip.use_gelu")
    return "silu" if silu else "gelu"


def _describe_qwen(metadata: Metadata) -> Config:
    """The keys that all of Qwen's towers have in common."""
    return {
        "depth": _count_blocks(metadata),
        "num_heads": _count_heads(metadata),
        "patch_size": _positive(metadata, "vision.patch_size"),
        "spatial_merge_size": _positive(metadata, "vision.spatial_merge_size", 2),
    }


def _describe_qwen_sizes(metadata: Metadata) -> Config:
    return {
        "hidden_size": _positive(metadata, "vision.embedding_length"),
        "intermediate_size": _positive(metadata, "vision.feed_forward_length"),
        "out_hidden_size": _positive(metadata, "vision.projection_dim"),
    }


def _describe_qwen2(metadata: Metadata) -> Described:
    """The converter writes a different size, or 0, as the width of the MLPs."""
    width = _positive(metadata, "vision.embedding_length")
    rows, columns = _shape(metadata, "v.blk.0.ffn_up.weight")
    vision = {
        **_describe_qwen(metadata),
        "embed_dim": width,
        "hidden_size": _positive(metadata, "vision.projection_dim"),
        "mlp_ratio": rows * columns / width**2,
    }
    return Described(vision=vision, processor=_read_limits(metadata, _QWEN2_LIMITS))


def _describe_qwen2_5(metadata: Metadata) -> Described:
    """Every n-th block attends to the whole image."""
    vision = {**_describe_qwen(metadata), **_describe_qwen_sizes(metadata)}
    every = metadata.integer("vision.n_wa_pattern")
    vision |= {
        "window_size": _positive(metadata, "vision.window_size", 112),
        "fullatt_block_indexes": [
            block for block in range(vision["depth"]) if not every or (block + 1) % every == 0
        ],
    }
    return Described(vision=vision, processor=_read_limits(metadata, _QWEN2_LIMITS))


def _describe_qwen3(metadata: Metadata) -> Described:
    vision = {
        **_describe_qwen(metadata),
        **_describe_qwen_sizes(metadata),
        "num_position_embeddings": _shape(metadata, "v.position_embd.weight")[0],
        "deepstack_visual_indexes": _list_deepstack(metadata),
    }
    return Described(vision=vision, processor=_read_limits(metadata, {}))


def _read_limits(metadata: Metadata, usual: Mapping[str, int]) -> Config:
    """Returns the limits of the area of an image in pixels. usual: those of published models, if
    they are not the defaults of the processor."""
    keys = {"min_pixels": "vision.image_min_pixels", "max_pixels": "vision.image_max_pixels"}
    given = {name: _positive(metadata, key) for name, key in keys.items() if metadata.has(key)}
    return {**usual, **given}


def _describe_gemma4(metadata: Metadata) -> Described:
    head_dim = _shape(metadata, "v.blk.0.attn_q_norm.weight", 1)[0]
    vision = {
        **_describe_encoder(metadata),
        "head_dim": head_dim,
        "num_key_value_heads": _shape(metadata, "v.blk.0.attn_k.weight")[0] // head_dim,
        "pooling_kernel_size": _positive(metadata, "vision.projector.scale_factor", 3),
        "position_embedding_size": _shape(metadata, "v.position_embd.weight", 3)[1],
        "use_clipped_linears": metadata.has_tensor("v.blk.0.attn_q.input_max"),
        "standardize": metadata.has_tensor("v.std_bias"),
    }
    return Described(vision=vision)


def _describe_gemma4_unified(metadata: Metadata) -> Described:
    """This family has no encoder: a table of positions and three norms."""
    _, positions, width = _shape(metadata, "v.position_embd.weight", 3)
    vision = {
        "patch_size": _positive(metadata, "vision.patch_size"),
        "pooling_kernel_size": _positive(metadata, "vision.projector.scale_factor", 3),
        "mm_embed_dim": width,
        "mm_posemb_size": positions,
    }
    return Described(vision=vision)


_PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector(
        text_types={"gemma3_text": "gemma3"},
        describe=_describe_gemma3,
        block_names=_SIGLIP_BLOCK,
        block_parent=_SIGLIP_PARENT + "encoder.layers.{}.",
        other_names={
            **{name: _SIGLIP_PARENT + target for name, target in _SIGLIP_OTHERS.items()},
            "mm.soft_emb_norm": _PROJECTOR + "mm_soft_emb_norm",
            "mm.input_projection.weight": _PROJECTOR + "mm_input_projection_weight",
        },
        image_token="<image_soft_token>",
        swaps_mlps=True,
    ),
    "idefics3": Projector(
        text_types=dict.fromkeys(_LLAMAS, "idefics3"),
        describe=_describe_idefics3,
        block_names=_SIGLIP_BLOCK,
        block_parent="vision_model.encoder.layers.{}.",
        other_names={
            **{name: f"vision_model.{target}" for name, target in _SIGLIP_OTHERS.items()},
            "mm.model.fc": "connector.modality_projection.proj",
        },
        swaps_mlps=True,
    ),
    "lfm2": Projector(
        text_types={"lfm2": "lfm2_vl", "lfm2_moe": "lfm2_vl"},
        describe=_describe_lfm2,
        block_names=_SIGLIP_BLOCK,
        block_parent=_SIGLIP_PARENT + "encoder.layers.{}.",
        other_names={
            **{name: _SIGLIP_PARENT + target for name, target in _SIGLIP_OTHERS.items()},
            "mm.input_norm": _PROJECTOR + "layer_norm",
            "mm.1": _PROJECTOR + "linear_1",
            "mm.2": _PROJECTOR + "linear_2",
        },
        channels_last=(_SIGLIP_PARENT + "embeddings.patch_embedding.weight",),
    ),
    "pixtral": Projector(
        text_types=dict.fromkeys(_LLAMAS, "pixtral"),
        describe=_describe_pixtral,
        block_names=_PIXTRAL_BLOCK,
        block_parent="vision_tower.transformer.layers.{}.",
        other_names={
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": _PROJECTOR + "norm",
            "mm.patch_merger": _PROJECTOR + "patch_merger.merging_layer",
            "mm.1": _PROJECTOR + "linear_1",
            "mm.2": _PROJECTOR + "linear_2",
        },
        rotates_pairs=True,
    ),
    "qwen2vl_merger": Projector(
        text_types={"qwen2_5_vl_text": "qwen2_vl"},
        describe=_describe_qwen2,
        block_names={**_QWEN_BLOCK, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        block_parent="visual.blocks.{}.",
        other_names=_QWEN2_OTHERS,
        swaps_mlps=True,
    ),
    "qwen2.5vl_merger": Projector(
        text_types={"qwen2_5_vl_text": "qwen2_5_vl"},
        describe=_describe_qwen2_5,
        block_names={
            **_QWEN_BLOCK,
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        block_parent="visual.blocks.{}.",
        other_names=_QWEN2_OTHERS,
        swaps_mlps=True,
    ),
    "qwen3vl_merger": Projector(
        text_types={
            "qwen3_vl_text": "qwen3_vl",
            "qwen3_vl_moe_text": "qwen3_vl_moe",
            "qwen3_5": "qwen3_5",
            "qwen3_5_moe": "qwen3_5_moe",
        },
        describe=_describe_qwen3,
        has_deepstack=True,
        block_names={**_QWEN_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        block_parent="visual.blocks.{}.",
        other_names={
            **{name: f"visual.{target}" for name, target in _QWEN_PATCH.items()},
            "v.position_embd": "visual.pos_embed",
            "v.post_ln": "visual.merger.norm",
            "mm.0": "visual.merger.linear_fc1",
            "mm.2": "visual.merger.linear_fc2",
        },
    ),
    "gemma4v": Projector(
        text_types={"gemma4_text": "gemma4"},
        describe=_describe_gemma4,
        block_names=_GEMMA4_BLOCK,
        block_parent="vision_tower.encoder.layers.{}.",
        other_names={
            "v.patch_embd": "vision_tower.patch_embedder.input_proj",
            "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
            "v.std_bias": "vision_tower.std_bias",
            "v.std_scale": "vision_tower.std_scale",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        channels_last=("vision_tower.patch_embedder.input_proj.weight",),
    ),
    "gemma4uv": Projector(
        text_types={"gemma4_text": "gemma4_unified"},
        describe=_describe_gemma4_unified,
        block_names={},
        block_parent="",
        other_names={
            "v.patch_embd": "vision_embedder.patch_dense",
            "v.patch_norm.1": "vision_embedder.patch_ln1",
            "v.patch_norm.2": "vision_embedder.patch_ln2",
            "v.patch_norm.3": "vision_embedder.pos_norm",
            "v.position_embd.weight": "vision_embedder.pos_embedding",
            "mm.input_projection": "embed_vision.embedding_projection",
        },
        channels_last=(
            "vision_embedder.patch_dense.weight",
            "vision_embedder.patch_ln1.weight",
            "vision_embedder.patch_ln1.bias",
        ),
    ),
}
