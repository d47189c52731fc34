"""MiniMax M2: norms over all heads, partial rotation, and a router with sigmoid scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY
from tests.models.test_mixtral import to_published_layout, to_transformers_layout
from tests.models.test_qwen3_moe import IDS, read_weights

CONFIG = {
    **TINY,
    "model_type": "minimax_m2",
    "head_dim": 32,
    "rotary_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "attn_type_list": [1, 1],
}

CASES = [
    # mlx-lm quantizes the router to 8 bits
    Case(name="plain", config=CONFIG, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(
        name="tied",
        config={
            **CONFIG,
            "rotary_dim": 32,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
        quantized=(),
    ),
]


@pytest.mark.parametrize("layout", [to_published_layout, to_transformers_layout])
def test_published_layouts_give_the_same_model(layout: Any, tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    theirs = architectures.build(CONFIG, layout(read_weights(tmp_path)))
    np.testing.assert_array_equal(
        parity.prefill(theirs, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_partial_rotary_factor_is_the_newer_form_of_rotary_dim(tmp_path: Path) -> None:
    parity.save_reference(CASES[0], tmp_path)
    config = {key: value for key, value in CONFIG.items() if key != "rotary_dim"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    other = architectures.build({**config, "rope_parameters": rope}, read_weights(tmp_path))
    np.testing.assert_array_equal(
        parity.prefill(other, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("use_qk_norm", False),
        ("qk_norm_type", "per_head"),
        ("use_routing_bias", False),
        ("shared_intermediate_size", 64),
    ],
)
def test_unsupported_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} {value!r} is not supported"):
        architectures.build({**CONFIG, key: value}, {})


def test_layers_with_linear_attention_are_refused() -> None:
    with pytest.raises(ModelError, match="attn_type_list has layers with linear attention"):
        architectures.build({**CONFIG, "attn_type_list": [0, 1]}, {})
