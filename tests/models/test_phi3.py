"""The Phi-3 architecture: fused projections, longrope, partially rotated heads."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import architectures, phi3
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY, draw_weights, logits

PHI3 = {**TINY, "model_type": "phi3"}
LONG = {
    **PHI3,
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
    },
}
SHORT_OR_LONG = "It rotates by short_factor while a sequence is short; we and mlx-lm never do."
# Phi-4-mini rotates three quarters of each head
PARTIAL: dict[str, Any] = {
    **LONG,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "rope_scaling": {
        key: value if key == "type" else value[:6] for key, value in LONG["rope_scaling"].items()
    },
}

CASES = [
    Case(name="plain", config={**PHI3, "sliding_window": 2047}, quantized=("affine-4", "mxfp4")),
    Case(name="longrope", config=LONG, transformers=False, why=SHORT_OR_LONG),
    Case(name="partial", config=PARTIAL, transformers=False, why=SHORT_OR_LONG),
]


def test_a_sequence_beyond_the_original_context_is_rotated_as_in_transformers() -> None:
    """transformers uses the long factors in a prefill whose last position is beyond the original
    length; the magnitude increases with the ratio of the lengths."""
    rope = phi3.Config.from_dict(LONG).rope()
    inverse = 10000.0 ** (-np.arange(0, 16, 2) / 16) / np.array(LONG["rope_scaling"]["long_factor"])
    np.testing.assert_allclose(np.array(rope.periods), 1 / inverse, rtol=1e-6)
    assert rope.magnitude == pytest.approx(np.sqrt(1 + np.log(512 / 64) / np.log(64)))


def test_the_window_applies_to_all_layers() -> None:
    """As in Phi-3-mini-4k; models with longer contexts name a window that no sequence exceeds."""
    short = phi3.Model(phi3.Config.from_dict({**PHI3, "sliding_window": 5}))
    assert {type(layer) for layer in short.make_kv()} == {RotatingKVCache}
    long = phi3.Model(phi3.Config.from_dict({**PHI3, "sliding_window": 262144}))
    assert {type(layer) for layer in long.make_kv()} == {KVCache}


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5]])
def test_fused_projections_are_the_separate_ones_concatenated(chunks: list[int]) -> None:
    """Phi-3 with a window is Mistral with a window and concatenated matrices."""
    mistral = {**TINY, "model_type": "mistral", "sliding_window": 4, "vocab_size": 256}
    single = draw_weights(mistral)
    fused = dict(single)
    for layer in range(2):
        at = f"model.layers.{layer}"
        for into, parts in (
            (f"{at}.self_attn.qkv_proj", [f"{at}.self_attn.{n}_proj" for n in "qkv"]),
            (f"{at}.mlp.gate_up_proj", [f"{at}.mlp.{n}_proj" for n in ("gate", "up")]),
        ):
            fused[f"{into}.weight"] = mx.concatenate([fused.pop(f"{p}.weight") for p in parts])
    np.testing.assert_allclose(
        logits(architectures.build({**mistral, "model_type": "phi3"}, fused), IDS, chunks),
        logits(architectures.build(mistral, single), IDS),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("scaling", "complaint"),
    [
        ({"type": "longrope"}, "rope scaling 'longrope' lacks 'long_factor'"),
        ({"type": "su", "long_factor": [1.0]}, "long_factor has 1 numbers, but 8 are required"),
        # an early name of the same; no published model has it
        ({"type": "yarn", "long_factor": [1.0] * 8}, "rope scaling 'yarn' lacks 'factor'"),
    ],
)
def test_an_invalid_longrope_is_refused(scaling: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        architectures.build({**PHI3, "rope_scaling": scaling}, {})
