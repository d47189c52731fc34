"""The Qwen2 architecture, alone and as the text part of Qwen2-VL."""

import numpy as np
import pytest

from models import architectures
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models import reference
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY, draw_weights, logits

QWEN2 = {**TINY, "model_type": "qwen2", "rope_theta": 1000000.0}
# keys of published Qwen2 configs that have no effect
UNUSED = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}

CASES = [
    Case(name="plain", config={**QWEN2, **UNUSED}),
    Case(name="tied", config={**QWEN2, "tie_word_embeddings": True}, quantized=("affine-4",)),
    # as published: text keys on the top level
    Case(
        name="multimodal",
        config={**QWEN2, **MROPE, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 8}},
        transformers=False,
        why="It reads this spelling and writes the nested one, which is the next case.",
    ),
    # as current transformers writes it
    Case(
        name="nested",
        config={
            "model_type": "qwen2_vl",
            "text_config": {**QWEN2, **MROPE, "model_type": "qwen2_vl_text"},
            "vision_config": {"hidden_size": 8},
        },
    ),
]


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5]])
def test_layers_above_max_window_layers_have_the_window_if_it_is_enabled(
    chunks: list[int],
) -> None:
    """mlx-lm's class has no windows; that of transformers, which the checkpoints follow, has."""
    config = {**QWEN2, **UNUSED, "use_sliding_window": True, "vocab_size": 256}
    weights = draw_weights(config)
    exact = {name: np.array(array).astype(np.float64) for name, array in weights.items()}
    listed = {**config, "layer_types": ["full_attention", "sliding_attention"]}
    expected = reference.llama(listed, exact, IDS)
    for each in (config, listed):
        got = logits(architectures.build(each, weights), IDS, chunks)
        np.testing.assert_allclose(got, expected, atol=1e-4)
    model = architectures.build(config, weights)
    assert [type(layer) for layer in model.make_kv()] == [KVCache, RotatingKVCache]


def test_an_enabled_window_without_a_length_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding_window is None"):
        architectures.build({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, {})
