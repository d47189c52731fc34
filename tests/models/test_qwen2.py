"""The Qwen2 architecture, alone and as the text part of Qwen2-VL."""

import numpy as np
import pytest

import models
from models.base import ModelError
from models.kv import KVCache
from models.rotating_kv import RotatingKVCache
from tests.models import reference
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY, drawn, logits

QWEN2 = {**TINY, "model_type": "qwen2", "rope_theta": 1000000.0}
# what published Qwen2s say, and do not use
UNUSED = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}

CASES = [
    Case(name="plain", config={**QWEN2, **UNUSED}),
    Case(name="tied", config={**QWEN2, "tie_word_embeddings": True}, quantised=("affine-4",)),
    # as published: the text's keys stand beside the picture's
    Case(
        name="multimodal",
        config={**QWEN2, **MROPE, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 8}},
        transformers=False,
        why="It reads this spelling and writes the nested one, which is the next case.",
    ),
    # as transformers writes it now
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
def test_layers_above_max_window_layers_have_the_window_where_one_is_used(
    chunks: list[int],
) -> None:
    """mlx-lm's class has no windows; transformers', which checkpoints are written for, has."""
    config = {**QWEN2, **UNUSED, "use_sliding_window": True, "vocab_size": 256}
    weights = drawn(config)
    exact = {name: np.array(array).astype(np.float64) for name, array in weights.items()}
    listed = {**config, "layer_types": ["full_attention", "sliding_attention"]}
    wanted = reference.llama(listed, exact, IDS)
    for each in (config, listed):
        got = logits(models.build(each, weights), IDS, chunks)
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    model = models.build(config, weights)
    assert [type(layer) for layer in model.make_kv()] == [KVCache, RotatingKVCache]


def test_a_window_that_has_no_length_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding_window is None"):
        models.build({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, {})
