"""A folder with a small random Qwen3-VL: a byte tokenizer with the marks of images, a text model of
five layers, and a vision tower with DeepStack."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken

from tests import tiny
from tests.models.test_llama import draw_weights as draw_text
from tests.models.vision.test_towers import REFERENCE
from tests.models.vision.test_towers import draw_weights as draw_tower

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    f"{{% for p in m.content %}}{{% if p.type == 'image' %}}{START}{PAD}{END}"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_TOWER: dict[str, Any] = REFERENCE["qwen3_vl"]["config"]

_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "vocab_size": tiny.VOCAB + 3,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "tie_word_embeddings": True,
    "eos_token_id": tiny.END,
}

# the side in pixels of the square that becomes an image row
SIDE: int = _TOWER["vision_config"]["patch_size"] * _TOWER["vision_config"]["spatial_merge_size"]


def write(folder: Path) -> Path:
    tiny.write(folder)
    config = {
        **_TOWER,
        "text_config": _TEXT,
        "tie_word_embeddings": True,
        "eos_token_id": tiny.END,
        "image_token_id": tiny.VOCAB + 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark) for mark in (START, PAD, END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    processor = {
        "patch_size": _TOWER["vision_config"]["patch_size"],
        "merge_size": _TOWER["vision_config"]["spatial_merge_size"],
        "temporal_patch_size": _TOWER["vision_config"]["temporal_patch_size"],
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 64 * SIDE * SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    text = draw_text({**_TEXT, "model_type": "qwen3"})
    weights = {
        f"model.language_{name}": array for name, array in text.items() if name != "lm_head.weight"
    }
    tower = draw_tower("qwen3_vl")
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **tower})
    return folder
