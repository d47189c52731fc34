"""Mixtral in the published layout and in that of mlx-lm."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY
from tests.models.test_qwen3_moe import IDS, fuse_experts, read_weights, split_experts

CONFIG = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

CASES = [
    Case(name="plain", config=CONFIG, quantized=("affine-4", "mxfp4")),
    Case(name="tied", config={**CONFIG, "tie_word_embeddings": True}, quantized=()),
]


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    parts = {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}
    found: dict[str, mx.array] = {}
    for name, array in split_experts(weights).items():
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        found[name] = array
    return found


def to_transformers_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The layout of newer versions of transformers."""
    return {
        name.replace(".block_sparse_moe.", ".mlp."): a for name, a in fuse_experts(weights).items()
    }


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (to_published_layout, None),
        (to_published_layout, "affine-4"),
        (to_transformers_layout, None),
    ],
)
def test_published_layouts_give_the_same_model(
    layout: Any, kind: str | None, tmp_path: Path
) -> None:
    parity.save_reference(CASES[0], tmp_path, kind=kind)
    theirs = architectures.build(CONFIG, layout(read_weights(tmp_path)))
    np.testing.assert_array_equal(
        parity.prefill(theirs, IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_another_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu' is not supported"):
        architectures.build({**CONFIG, "hidden_act": "gelu"}, {})
