"""Writes the vision tower of a tiny model into the file of its text model, as Ollama's own
converter does.

Each function follows the file of that family in ollama/ollama (convert/convert_*.go). Nothing of
models/gguf is used, so that tests compare two implementations.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.gguf.converter import Config, Types, Weights, write_tensors

# model_type -> Ollama's architecture
ARCHITECTURES: Mapping[str, str] = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "mistral3": "mistral3",
    "qwen2_5_vl": "qwen25vl",
    "qwen3_5": "qwen35",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
}

_QWEN3 = {
    "model.visual": "v",
    "patch_embed.proj": "patch_embed",
    "blocks": "blk",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "deepstack_merger_list": "deepstack_merger",
}
# the first text that matches at a position is replaced
_REPLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "vision_tower.vision_model.embeddings": "v",
        "vision_tower.vision_model": "v",
        "encoder.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "input_projection_weight": "input_projection.weight",
        "multi_modal_projector": "mm",
    },
    "gemma4": {
        ".linear.weight": ".weight",
        "model.vision_tower.encoder.layers": "v.blk",
        "model.vision_tower.patch_embedder.input_proj": "v.patch_embd",
        "model.vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
        "model.vision_tower.std_bias": "v.std_bias",
        "model.vision_tower.std_scale": "v.std_scale",
        "model.embed_vision.embedding_projection": "mm.input_projection",
        "input_layernorm": "ln1",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_proj": "attn_k",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ffn_gate",
        "mlp.down_proj": "ffn_down",
        "mlp.up_proj": "ffn_up",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
    "mistral3": {
        "transformer.layers": "blk",
        "vision_tower": "v",
        "ln_pre": "encoder_norm",
        "attention.q_proj": "attn_q",
        "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v",
        "attention.o_proj": "attn_output",
        "attention_norm": "attn_norm",
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.down_proj": "ffn_down",
        "feed_forward.up_proj": "ffn_up",
        "multi_modal_projector": "mm",
    },
    "qwen25vl": {
        "mlp.down_proj": "ffn_down",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "visual": "v",
        "blocks": "blk",
        "attn.proj": "attn_out",
        "norm1": "ln1",
        "norm2": "ln2",
    },
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3,
    "qwen35": _QWEN3,
}

_LINEARS = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
_LIMITS = ("input_min", "input_max", "output_min", "output_max")


def write_tower(
    path: Path,
    config: Config,
    weights: Weights,
    *,
    text: Path | None = None,
    processor: Config = {},  # noqa: B006  # never changed
    quantize: Callable[[str], Types | None] = lambda name: None,
    change: Callable[[Weights], None] = lambda tensors: None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """config: as on the hub. weights: of the vision modules, float32, with the names on the hub.
    text: the text model in a file of llama.cpp, which becomes a part of the file. processor:
    preprocessor_config.json. quantize: the type of a matrix, by its name in the file. change:
    changes the tensors of the tower. extra: adds keys."""
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    if text is None:
        writer.add_uint32(f"{arch}.embedding_length", config["text_config"]["hidden_size"])
    else:
        _copy_text(writer, arch, text)
    _add_keys(writer, arch, config, processor)
    extra(writer)
    tensors: Weights = {}
    for name, array in weights.items():
        if ".head." not in name:
            tensors |= _convert_tensor(arch, name, array)
    if arch == "gemma4" and "v.blk.0.attn_q.input_max" in tensors:
        tensors["v.clamp_data"] = _pack_limits(tensors, config["vision_config"])
    change(tensors)
    write_tensors(writer, tensors, quantize)
    return path


def _copy_text(writer: gguf.GGUFWriter, arch: str, path: Path) -> None:
    """Copies the text model, with the name of the architecture."""
    source = gguf.GGUFReader(path)
    original = source.fields["general.architecture"].contents()
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        own = field.name.removeprefix(f"{original}.")
        if own == "rope.dimension_sections" and arch != "qwen35":
            own = "rope.mrope_section"
        key = field.name if field.name == own else f"{arch}.{own}"
        kind = field.types[0]
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
    for stored in source.tensors:
        writer.add_tensor(stored.name, stored.data, raw_dtype=stored.tensor_type)


def _add_keys(writer: gguf.GGUFWriter, arch: str, config: Config, processor: Config) -> None:
    vision: dict[str, Any] = config["vision_config"]
    is_qwen = arch.startswith("qwen")

    def add(name: str, number: int) -> None:
        writer.add_uint32(f"{arch}.{name}", number)

    add("vision.block_count", vision["depth" if is_qwen else "num_hidden_layers"])
    add("vision.embedding_length", vision["hidden_size"])
    add("vision.attention.head_count", vision["num_heads" if is_qwen else "num_attention_heads"])
    add("vision.patch_size", vision["patch_size"])
    add("vision.num_channels", 3)
    eps = vision.get("layer_norm_eps", 1e-6)
    if arch != "mistral3":
        writer.add_float32(f"{arch}.vision.attention.layer_norm_epsilon", eps)
    if not is_qwen:
        add("vision.feed_forward_length", vision["intermediate_size"])
    if arch in ("gemma3", "mistral3"):
        add("vision.image_size", vision["image_size"])
    if arch == "gemma3":
        add("mm.tokens_per_image", config["mm_tokens_per_image"])
    elif arch == "gemma4":
        add("vision.projector.scale_factor", vision["pooling_kernel_size"])
    elif arch == "mistral3":
        theta = vision["rope_parameters"]["rope_theta"]
        writer.add_float32(f"{arch}.vision.rope.freq_base", theta)
        add("spatial_merge_size", config["spatial_merge_size"])
    if not is_qwen:
        return
    add("vision.spatial_merge_size", vision["spatial_merge_size"])
    writer.add_float32(f"{arch}.vision.rope.freq_base", 1e4)
    add("vision.temporal_patch_size", vision["temporal_patch_size"])
    if arch == "qwen25vl":
        add("vision.window_size", vision["window_size"])
        blocks = vision["fullatt_block_indexes"]
        writer.add_array(f"{arch}.vision.fullatt_block_indexes", blocks)
        return
    levels = vision.get("deepstack_visual_indexes", [])
    if levels:
        writer.add_array(f"{arch}.vision.deepstack_visual_indexes", levels)
    add("vision.shortest_edge", processor.get("min_pixels", 0))
    add("vision.longest_edge", processor.get("max_pixels", 0))
    for name in ("image_mean", "image_std"):
        if name in processor:
            writer.add_array(f"{arch}.vision.{name}", processor[name])


def _convert_tensor(arch: str, name: str, array: np.ndarray) -> Weights:
    if arch == "gemma3":  # as in the checkpoints of that time
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    pairs = _REPLACEMENTS[arch]
    name = re.sub("|".join(map(re.escape, pairs)), lambda match: pairs[match[0]], name)
    if arch == "qwen25vl" and "patch_embed.proj" in name:
        old = "patch_embed.proj"
        return {name.replace(old, f"patch_embd_{i}"): array[:, :, i] for i in range(2)}
    if arch.startswith("qwen") and (match := re.search(r"attn[._]qkv", name)):
        parts = zip("qkv", np.split(array, 3), strict=True)
        return {name.replace(match[0], f"attn_{letter}"): part for letter, part in parts}
    if name == "v.patch_embed.weight":
        return {name: array.reshape(-1, *array.shape[2:])}
    if arch == "gemma3" and name.startswith("mm.") and name.endswith("_norm.weight"):
        return {name: array + 1}
    if arch == "gemma4" and name == "v.patch_embd.weight":
        return {name: array.reshape(len(array), 16, 16, 3).transpose(0, 3, 1, 2)}
    return {name: array[None] if array.ndim == 0 else array}


def _pack_limits(tensors: Weights, vision: Config) -> np.ndarray:
    """The limits of all linear layers, and then those of the projector, which has none."""
    numbers = [
        tensors[f"v.blk.{block}.{linear}.{limit}"].item()
        for block in range(vision["num_hidden_layers"])
        for linear in _LINEARS
        for limit in _LIMITS
    ]
    return np.array([*numbers, 0, 0, 0, 0], np.float32)
