"""Folders with small random models of the families that process images: a byte tokenizer with the
marks of images, the vision tower of tests/models/vision/reference.py, and a text model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken

from models import architectures
from models.checkpoint_config import get_text_config
from tests import tiny
from tests.models.vision.test_towers import REFERENCE
from tests.models.vision.test_towers import draw_weights as draw_tower

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    f"{{% for p in m.content %}}{{% if p.type == 'image' %}}{START}{PAD}{END}"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# the side in pixels of the square that becomes an image row, of the Qwen-VL families with patches
# of 16 pixels
SIDE = 32

# the width of the text models
HIDDEN = 32

_TEXT: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1 << 15,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": tiny.END,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """tower: the case of the reference. text: keys of the text model's config. processor:
    preprocessor_config.json. marks: the special tokens of images."""

    tower: str
    text: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict[str, Any])
    marks: Sequence[str] = (START, PAD, END)


def _limit_area(side: int) -> Mapping[str, Any]:
    """The settings of a Qwen-VL processor. side: in pixels, of an image row."""
    area = {"shortest_edge": side**2, "longest_edge": 64 * side**2}
    return {"patch_size": side // 2, "merge_size": 2, "temporal_patch_size": 2, "size": area}


FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family(
        tower="qwen2_vl",
        text={
            "model_type": "qwen2_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        processor=_limit_area(28),
    ),
    "qwen2_5_vl": Family(
        tower="qwen2_5_vl",
        text={
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        processor=_limit_area(28),
    ),
    "qwen3_vl": Family(
        tower="qwen3_vl",
        text={
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        processor={**_limit_area(SIDE), "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ),
    "qwen3_5": Family(
        tower="qwen3_5",
        text={
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
        processor=_limit_area(SIDE),
    ),
    "gemma3": Family(
        tower="gemma3",
        text={
            "model_type": "gemma3_text",
            "layer_types": _SLIDING,
            "query_pre_attn_scalar": 16,
            "sliding_window": 64,
            "tie_word_embeddings": True,
        },
        marks=("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    ),
    "gemma4": Family(
        tower="gemma4",
        text={
            "model_type": "gemma4_text",
            "layer_types": _SLIDING,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 64,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": "vision",
        },
        processor={"max_soft_tokens": 8},
        marks=("<|image>", "<|image|>", "<image|>"),
    ),
    "mistral3": Family(
        tower="mistral3",
        text={"model_type": "mistral", "rope_theta": 10000.0},
        processor={"size": {"longest_edge": 140}},
        marks=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "pixtral": Family(
        tower="pixtral",
        text={"model_type": "mistral", "rope_theta": 10000.0},
        processor={"size": {"longest_edge": 80}},
        marks=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "smolvlm": Family(
        tower="smolvlm",
        text={"model_type": "llama"},
        processor={"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
        marks=("<image>", "<fake_token_around_image>", "<global-img>"),
    ),
    "lfm2_vl": Family(
        tower="lfm2_vl",
        text={
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "conv_bias": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "norm_eps": 1e-5,
        },
        processor={
            "tile_size": 64,
            "min_image_tokens": 1,
            "max_image_tokens": 4,
            "max_tiles": 4,
        },
        marks=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    ),
}


def write(folder: Path, family: str = "qwen3_vl", *, template: str = CHAT_TEMPLATE) -> Path:
    """Writes a model of a family. template: its chat template."""
    kind = FAMILIES[family]
    tiny.write(folder)
    config = {
        **REFERENCE[kind.tower]["config"],
        "text_config": {**_TEXT, **kind.text, "vocab_size": tiny.VOCAB + len(kind.marks)},
        "tie_word_embeddings": kind.text.get("tie_word_embeddings", False),
        "eos_token_id": tiny.END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark) for mark in kind.marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "preprocessor_config.json").write_text(json.dumps(kind.processor))
    weights = {**_draw_text(config), **draw_tower(kind.tower)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _draw_text(config: Mapping[str, Any]) -> dict[str, mx.array]:
    """The tensors of the text model, large enough to affect the logits."""
    text = get_text_config(config)
    architecture = architectures._find_architecture(text, config)
    model = architecture.Model(architecture.Config.from_dict(text))
    flat: Any = tree_flatten(model.parameters())
    rng = np.random.default_rng(3)
    weights: dict[str, mx.array] = {}
    for name, array in flat:
        noise = rng.standard_normal(array.shape)
        if array.ndim > 1:
            values = noise / np.sqrt(array.shape[-1])
        else:
            values = 0.1 * noise + name.endswith("norm.weight")
        weights[f"language_model.{name}"] = mx.array(values.astype(np.float32))
    return weights
