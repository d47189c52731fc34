"""The OLMo 2 architecture: norms behind, queries and keys normalised across heads."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from models import olmo2
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY

# queries, keys, hidden states and the MLP all have widths of their own
OLMO2 = {
    **TINY,
    "model_type": "olmo2",
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 32,
    "rope_theta": 500000.0,
}

CASES = [
    Case(name="plain", config=OLMO2, quantised=("affine-4", "mxfp4")),
    Case(name="tied", config={**OLMO2, "tie_word_embeddings": True, "attention_bias": True}),
    # mlx-lm's own key, which conversions may have
    Case(
        name="mlp-bias",
        config={**OLMO2, "mlp_bias": True},
        quantised=(),
        transformers=False,
        why="Its OLMo 2 does not read the key.",
    ),
]


def test_an_epsilon_that_is_left_out_is_that_of_transformers() -> None:
    """mlx-lm's class insists on the key, so no case can leave it out."""
    silent = {key: value for key, value in OLMO2.items() if key != "rms_norm_eps"}
    assert olmo2.Config.from_dict(silent).rms_norm_eps == 1e-5


def test_positions_can_be_forgotten_in_the_middle(tmp_path: Path) -> None:
    """Of one layer alone: it knows of each position its own id and where it stands, no more."""
    config = {**OLMO2, "vocab_size": 256, "num_hidden_layers": 1}
    parity.saved(Case(name="shallow", config=config), tmp_path)
    model = parity.opened(tmp_path)
    kv, kept = model.make_kv(), IDS[:2] + IDS[5:]
    mx.eval(model(mx.array([IDS]), kv))
    assert model.shift(kv, 2, 5)
    shifted = model.logits(model(mx.array([[1]]), kv))
    fresh = model.logits(model(mx.array([[*kept, 1]]), model.make_kv()))
    np.testing.assert_allclose(np.array(shifted[:, -1]), np.array(fresh[:, -1]), atol=1e-4)
