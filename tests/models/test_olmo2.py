"""The OLMo 2 architecture: norms after each half, queries and keys normalized across heads."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from models import olmo2
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY

# queries, keys, hidden states and the MLP all have different widths
OLMO2 = {
    **TINY,
    "model_type": "olmo2",
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 32,
    "rope_theta": 500000.0,
}

CASES = [
    Case(name="plain", config=OLMO2, quantized=("affine-4", "mxfp4")),
    Case(name="tied", config={**OLMO2, "tie_word_embeddings": True, "attention_bias": True}),
    # a key of mlx-lm, which conversions can have
    Case(
        name="mlp-bias",
        config={**OLMO2, "mlp_bias": True},
        quantized=(),
        transformers=False,
        why="Its OLMo 2 does not read the key.",
    ),
]


def test_a_missing_epsilon_has_the_default_of_transformers() -> None:
    """mlx-lm's class requires the key, so all cases have it."""
    silent = {key: value for key, value in OLMO2.items() if key != "rms_norm_eps"}
    assert olmo2.Config.from_dict(silent).rms_norm_eps == 1e-5


def test_positions_can_be_removed_from_the_middle(tmp_path: Path) -> None:
    """The model has one layer, so the cache of a position depends only on its id and position."""
    config = {**OLMO2, "vocab_size": 256, "num_hidden_layers": 1}
    parity.save_reference(Case(name="shallow", config=config), tmp_path)
    model = parity.load_model(tmp_path)
    kv, remaining = model.make_kv(), IDS[:2] + IDS[5:]
    mx.eval(model(mx.array([IDS]), kv))
    assert model.shift(kv, 2, 5)
    shifted = model.logits(model(mx.array([[1]]), kv))
    fresh = model.logits(model(mx.array([[*remaining, 1]]), model.make_kv()))
    np.testing.assert_allclose(np.array(shifted[:, -1]), np.array(fresh[:, -1]), atol=1e-4)
