"""Writes the vision tower of a tiny model as a projector file, as llama.cpp's converter does, with
gguf-py's writer and names.

Each function follows the class of that family in llama.cpp (conversion/*.py). Nothing of
models/gguf is used, so that tests compare two implementations.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.gguf.converter import Config, Types, Weights, permute, write_tensors

Kind = gguf.VisionProjectorType

# model_type -> the type of the projector
KINDS: Mapping[str, str] = {
    "gemma3": Kind.GEMMA3,
    "gemma4": Kind.GEMMA4V,
    "gemma4_unified": "gemma4uv",  # unknown to this version of gguf-py
    "idefics3": Kind.IDEFICS3,
    "lfm2_vl": Kind.LFM2,
    "llava": Kind.PIXTRAL,
    "mistral3": Kind.PIXTRAL,
    "qwen2_vl": Kind.QWEN2VL,
    "qwen2_5_vl": Kind.QWEN25VL,
    "qwen3_5": Kind.QWEN3VL,
    "qwen3_vl": Kind.QWEN3VL,
    "smolvlm": Kind.IDEFICS3,
}

# the same for names of gemma4_unified
_UNIFIED_NAMES: Mapping[str, str] = {
    "vision_embedder.patch_dense": "v.patch_embd",
    "vision_embedder.patch_ln1": "v.patch_norm.1",
    "vision_embedder.patch_ln2": "v.patch_norm.2",
    "vision_embedder.pos_norm": "v.patch_norm.3",
    "vision_embedder.pos_embedding": "v.position_embd",
    "embed_vision.embedding_projection": "mm.input_projection",
}

_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
_SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def convert(
    config: Config,
    weights: Weights,
    path: Path,
    *,
    processor: Config = {},  # noqa: B006  # never changed
    quantize: Callable[[str], Types | None] = lambda name: None,
    change: Callable[[Weights], None] = lambda tensors: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """config: as on the hub. weights: of the vision modules, float32, with the names on the hub.
    processor: preprocessor_config.json. quantize: the type of a matrix, by its name in the file.
    change: changes the tensors of the file. extra: adds keys."""
    kind = KINDS[config["model_type"]]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    if kind.startswith("gemma4"):
        writer.add_clip_vision_projector_type(kind)
    else:
        writer.add_clip_projector_type(kind)
    _add_keys(writer, kind, config, processor)
    extra(writer)
    tensors: Weights = {}
    for name, array in weights.items():
        if ".head." in name:
            continue
        for target, part in _convert_tensor(kind, config, name.removeprefix("model."), array):
            assert target not in tensors
            tensors[target] = part
    if kind == Kind.PIXTRAL:
        tensors["v.token_embd.img_break"] = np.ones(32, np.float32)
    change(tensors)
    write_tensors(writer, tensors, quantize)
    return path


def _add_keys(writer: gguf.GGUFWriter, kind: str, config: Config, processor: Config) -> None:
    vision, text = config["vision_config"], config["text_config"]
    is_qwen = kind in (Kind.QWEN2VL, Kind.QWEN25VL, Kind.QWEN3VL)
    if kind == Kind.QWEN2VL:
        vision = {
            **vision,
            "hidden_size": vision["embed_dim"],
            "intermediate_size": vision["hidden_size"],
            "hidden_act": "",
        }
    writer.add_vision_projection_dim(text["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_image_mean(processor.get("image_mean", [0.5] * 3))
    writer.add_vision_image_std(processor.get("image_std", [0.5] * 3))
    if kind == "gemma4uv":
        writer.add_vision_image_size(224)
        writer.add_vision_embedding_length(vision["mm_embed_dim"])
        writer.add_vision_feed_forward_length(0)
        writer.add_vision_block_count(0)
        writer.add_vision_head_count(0)
        writer.add_vision_attention_layernorm_eps(1e-6)
        return
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth" if is_qwen else "num_hidden_layers"])
    writer.add_vision_head_count(vision["num_heads" if is_qwen else "num_attention_heads"])
    usual = {"gemma4v": 224, "lfm2": 256, Kind.QWEN2VL: 560, Kind.QWEN25VL: 560}.get(kind, 0)
    if kind == Kind.QWEN3VL:
        usual = int(vision["num_position_embeddings"] ** 0.5 * vision["patch_size"])
    writer.add_vision_image_size(usual or vision["image_size"])
    eps = text.get("rms_norm_eps", 1e-6) if is_qwen else vision.get("layer_norm_eps")
    usual_eps = {Kind.IDEFICS3: 1e-5, Kind.PIXTRAL: 1e-5}.get(kind, 1e-6)
    writer.add_vision_attention_layernorm_eps(eps or usual_eps)
    if kind == Kind.GEMMA3:
        side = int(config["mm_tokens_per_image"] ** 0.5)
        scale = vision["image_size"] // vision["patch_size"] // side
        if scale != 4:
            writer.add_vision_projector_scale_factor(scale)
    elif kind == Kind.IDEFICS3:
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        longest = processor.get("size", {}).get("longest_edge", vision["image_size"])
        writer.add_vision_preproc_image_size(longest)
    elif kind == Kind.LFM2:
        writer.add_vision_projector_scale_factor(config["downsample_factor"])
    elif kind == Kind.QWEN25VL:
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_vision_window_size(vision["window_size"])  # only if it is not the usual one
    elif kind == Kind.QWEN3VL:
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        levels = vision.get("deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([i in levels for i in range(vision["depth"])])
        for name, add in (
            ("min_pixels", writer.add_vision_min_pixels),
            ("max_pixels", writer.add_vision_max_pixels),
        ):
            if name in processor:
                add(processor[name])
    elif kind == Kind.PIXTRAL:
        writer.add_rope_freq_base(vision["rope_parameters"]["rope_theta"])
        if "spatial_merge_size" in config:
            writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    if kind == Kind.QWEN25VL or vision.get("hidden_act") == "silu":
        writer.add_vision_use_silu(True)
    elif kind not in (Kind.GEMMA4V, Kind.QWEN2VL):
        writer.add_vision_use_gelu(True)


def _convert_tensor(
    kind: str, config: Config, name: str, array: np.ndarray
) -> Sequence[tuple[str, np.ndarray]]:
    vision = config["vision_config"]
    if kind == "gemma4uv":
        return [_convert_unified(vision, name, array)]
    if name.endswith("patch_embed.proj.weight"):
        return [("v.patch_embd.weight", array[:, :, 0]), ("v.patch_embd.weight.1", array[:, :, 1])]
    if kind in (Kind.QWEN2VL, Kind.QWEN25VL) and ".qkv." in name:
        parts = zip("qkv", np.split(array, 3), strict=True)
        return [(_find(name.replace("qkv", letter)), part) for letter, part in parts]
    if kind == Kind.QWEN3VL and (found := _rename_merger(vision, name)) is not None:
        return [(found, array)]
    if kind == Kind.PIXTRAL and name.endswith(("q_proj.weight", "k_proj.weight")):
        array = permute(array, vision["num_attention_heads"])
    if "soft_emb_norm" in name:
        array = array + 1
    if kind == Kind.LFM2 and name.endswith("patch_embedding.weight"):
        array = array.reshape(-1, 16, 16, 3).transpose(0, 3, 1, 2)
    if kind == Kind.GEMMA4V:
        return [_convert_gemma4(name, array)]
    return [(_find(name), array)]


def _rename_merger(vision: Config, name: str) -> str | None:
    module, _, rest = name.removeprefix("visual.").partition(".")
    if module == "deepstack_merger_list":
        index, part, suffix = rest.split(".")
        level = vision["deepstack_visual_indexes"][int(index)]
        return f"v.deepstack.{level}.{part.removeprefix('linear_')}.{suffix}"
    if module == "merger":
        part, suffix = rest.split(".")
        return {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[
            part
        ] + f".{suffix}"
    return None


def _convert_gemma4(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if array.ndim == 0:
        array = array[None]
    if name.endswith("input_proj.weight"):
        array = array.reshape(len(array), 16, 16, 3).transpose(0, 3, 1, 2)
    name = name.replace("vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if not name.startswith("vision_model."):
        name = f"model.{name}"
    return _find(name), array


def _convert_unified(vision: Config, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if name.endswith("pos_embedding"):
        name, array = f"{name}.weight", array.transpose(1, 0, 2)
    elif "patch_ln1" in name or name.endswith("patch_dense.weight"):
        side = vision["patch_size"] * vision["pooling_kernel_size"]
        index = np.arange(3 * side**2)
        channel, pixel = index // side**2, index % side**2
        array = array[..., pixel * 3 + channel]
    module, _, part = name.rpartition(".")
    return f"{_UNIFIED_NAMES[module]}.{part}", array


def _find(name: str) -> str:
    """Returns gguf-py's name. It knows older names of the hub, with other prefixes."""
    name = name.replace("_weight", ".weight")
    options = (
        name,
        f"model.{name}",
        name.replace("vision_tower.", "vision_tower.vision_model."),
    )
    for option in options:
        if found := _NAMES.get_name(option, try_suffixes=_SUFFIXES):
            return found
    raise AssertionError(f"gguf-py does not know {name}")


def to_numpy(weights: Mapping[str, Any]) -> Weights:
    return {name: np.array(array) for name, array in weights.items()}
