"""Model types that are other names of an architecture.

Knows: the names. Must not know: MLX. `mlxrunner list` runs this file alone, because an import of
this package imports MLX.
"""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "gemma3_text": "gemma3",
    "lfm2-vl": "lfm2",
    "lfm2_vl": "lfm2",
    "ministral": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_text": "qwen3",
}
