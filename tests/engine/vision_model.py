"""A folder with a random Qwen3-VL: a text model of five layers, and a tower with DeepStack."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import tiny
from tests.models.test_llama import draw_weights as draw_text
from tests.models.vision.test_towers import REFERENCE, draw_weights

_REFERENCE: dict[str, Any] = REFERENCE["qwen3_vl"]["config"]

# the side in pixels of the square that becomes an image row
SIDE: int = (
    _REFERENCE["vision_config"]["patch_size"] * _REFERENCE["vision_config"]["spatial_merge_size"]
)

_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "tie_word_embeddings": True,
    "eos_token_id": tiny.END,
}


def write(folder: Path) -> Path:
    tiny.write(folder)
    config = {
        **_REFERENCE,
        "text_config": _TEXT,
        "tie_word_embeddings": True,
        "eos_token_id": tiny.END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    text = draw_text({**_TEXT, "model_type": "qwen3"})
    weights = {
        f"model.language_{name}": array for name, array in text.items() if name != "lm_head.weight"
    }
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **draw_weights("qwen3_vl")})
    return folder
