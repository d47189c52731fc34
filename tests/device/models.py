"""Models with the depth of published ones and small layers, whose graphs are counted.

Knows: configs, random weights. Must not know: what is counted.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from models import architectures
from models.base import Model

VOCAB = 4096

# Qwen3-0.6B has 28 layers.
DENSE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 28,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}

EXPERTS: Mapping[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

GPT_OSS: Mapping[str, Any] = {
    **DENSE,
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tie_word_embeddings": False,
}

# One block in four has full attention.
DELTA: Mapping[str, Any] = {
    **DENSE,
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def build_model(config: Mapping[str, Any], *, bits: int | None = 4) -> Model:
    """Random weights in bfloat16, quantized to `bits`."""
    architecture: Any = architectures._find_architecture(config)
    shapes: Any = tree_flatten(architectures._build_architecture(architecture, config).parameters())
    weights = {
        name: (0.05 * mx.random.normal(array.shape)).astype(mx.bfloat16) for name, array in shapes
    }
    model: Any = architectures.build(config, weights, bits=bits)
    mx.eval(model.parameters())
    return model
