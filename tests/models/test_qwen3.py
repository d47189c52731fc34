"""The Qwen3 architecture, alone and as the text part of Qwen3-VL."""

from tests.models.architectures import Case
from tests.models.test_llama import TINY

QWEN3 = {**TINY, "model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

CASES = [
    Case(name="plain", config={**QWEN3, "use_sliding_window": False, "max_window_layers": 2}),
    Case(
        name="long",
        config={
            **{key: value for key, value in QWEN3.items() if key != "rope_theta"},
            "rope_parameters": {**YARN, "rope_theta": 500000.0},
        },
        quantized=(),
    ),
    Case(
        name="multimodal",
        config={
            "model_type": "qwen3_vl",
            "text_config": {
                **QWEN3,
                "model_type": "qwen3_vl_text",
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_interleaved": True,
                    "mrope_section": [6, 5, 5],
                },
            },
            "vision_config": {"hidden_size": 8},
        },
    ),
]
