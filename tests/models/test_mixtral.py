"""Mixtral, as its makers publish it and as mlx-lm converts it."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import models
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY
from tests.models.test_qwen3_moe import IDS, fused, one_by_one, read

CONFIG = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

CASES = [
    Case(name="plain", config=CONFIG, quantised=("affine-4", "mxfp4")),
    Case(name="tied", config={**CONFIG, "tie_word_embeddings": True}, quantised=()),
]


def published(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    parts = {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}
    found: dict[str, mx.array] = {}
    for name, array in one_by_one(weights).items():
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        found[name] = array
    return found


def newer(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """As newer versions of transformers save it."""
    return {name.replace(".block_sparse_moe.", ".mlp."): a for name, a in fused(weights).items()}


@pytest.mark.parametrize(
    ("layout", "kind"), [(published, None), (published, "affine-4"), (newer, None)]
)
def test_the_makers_layouts_hold_the_same_model(
    layout: Any, kind: str | None, tmp_path: Path
) -> None:
    parity.saved(CASES[0], tmp_path, kind=kind)
    theirs = models.build(CONFIG, layout(read(tmp_path)))
    np.testing.assert_array_equal(
        parity.our_prefilled(theirs, IDS, [9]),
        parity.our_prefilled(parity.opened(tmp_path), IDS, [9]),
    )


def test_another_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu' is not supported"):
        models.build({**CONFIG, "hidden_act": "gelu"}, {})
