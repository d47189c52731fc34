"""Encoders: their hidden states and scores match transformers, and an input has the same bits alone
and packed with others.

The references are in encoder_reference.json, which encoder_reference.py writes.
"""

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import architectures
from models.base import ModelError
from models.checkpoint_config import is_encoder
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from models.encoder import Encoder, attend_inputs, split_inputs
from tests.models import encoder_reference
from tests.models.encoder_reference import draw_inputs, draw_tensor

REFERENCE: Any = json.loads(encoder_reference.FILE.read_text())
NEAR = 2e-5


def build(name: str, **changes: Any) -> Encoder:
    case = REFERENCE[name]
    weights = {
        tensor: mx.array(draw_tensor(tensor, shape)) for tensor, shape in case["tensors"].items()
    }
    model = architectures.build({**case["config"], **changes}, weights)
    assert isinstance(model, Encoder)
    return model


def encode(model: Encoder, numbers: Sequence[int]) -> list[mx.array]:
    """The hidden states of some of the inputs, packed in this order."""
    tokens, segments = draw_inputs()
    lengths = [len(tokens[i]) for i in numbers]
    hidden = model.encode(
        mx.array([token for i in numbers for token in tokens[i]]),
        lengths,
        mx.array([segment for i in numbers for segment in segments[i]]),
    )
    return split_inputs(hidden, lengths)


@pytest.mark.parametrize("layout", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("name", REFERENCE)
def test_the_outputs_are_those_of_transformers(name: str, layout: bool):
    model = build(name)
    if layout:
        apply_cpu_layout(model)
    hidden = encode(model, range(len(encoder_reference.LENGTHS)))
    lengths = [len(part) for part in hidden]
    if model.num_scores:
        outputs = np.array(model.score(mx.concatenate(hidden), lengths))
    else:
        outputs = np.array([np.array(part).mean(axis=0) for part in hidden])
    np.testing.assert_allclose(outputs, np.array(REFERENCE[name]["outputs"]), atol=NEAR)


@pytest.mark.parametrize("name", REFERENCE)
def test_an_input_has_the_same_bits_alone_and_packed(name: str):
    model = build(name)
    apply_cpu_layout(model)
    numbers = range(len(encoder_reference.LENGTHS))
    alone = [encode(model, [i])[0] for i in numbers]
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [2, 2, 1]):
        for i, part in zip(order, encode(model, order), strict=True):
            assert mx.array_equal(part, alone[i]), (order, i)
    assert is_batch_invariant(model) or not apply_has_kernels()


def apply_has_kernels() -> bool:
    from models import kernels

    return kernels.ops() is not None


@given(data=st.data())
def test_a_window_limits_the_distance_between_tokens(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    window = data.draw(st.integers(1, 200))
    total = sum(lengths)
    mx.random.seed(1)
    queries, keys, values = (mx.random.normal((1, 2, total, 8)) for _ in range(3))
    found = attend_inputs(queries, keys, values, lengths, scale=0.3, window=window)
    start = 0
    for length, part in zip(lengths, split_inputs(found, lengths, axis=2), strict=True):
        here = slice(start, start + length)
        scores = 0.3 * queries[:, :, here] @ keys[:, :, here].swapaxes(-1, -2)
        distance = mx.abs(mx.arange(length)[:, None] - mx.arange(length)[None])
        scores = mx.where(distance <= window, scores, -mx.inf)
        expected = mx.softmax(scores, axis=-1) @ values[:, :, here]
        assert mx.allclose(part, expected, atol=1e-5)
        start += length


def test_only_models_that_attend_in_both_directions_are_encoders():
    gemma = REFERENCE["embedding-gemma"]["config"]
    assert is_encoder(gemma)
    assert not is_encoder({**gemma, "use_bidirectional_attention": False})
    assert is_encoder({"model_type": "xlm-roberta"})
    assert not is_encoder({"model_type": "llama"})
    assert not is_encoder({})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "swish2"}, "hidden_act"),
        ("bert-reranker", {"id2label": None, "num_labels": 0}, "number of labels"),
        ("bert-reranker", {"id2label": None, "num_labels": 2}, "classifier"),
        ("xlm-roberta", {"pad_token_id": 63}, "pad_token_id"),
        ("nomic-bert", {"qkv_proj_bias": True}, "qkv_proj_bias"),
        ("nomic-bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert-reranker", {"classifier_pooling": "max"}, "classifier_pooling"),
    ],
)
def test_an_unsupported_variant_is_rejected_by_name(
    name: str, changes: dict[str, Any], message: str
):
    with pytest.raises(ModelError, match=message):
        build(name, **changes)


def test_the_context_of_a_roberta_does_not_count_the_rows_before_the_first_position():
    assert architectures.read_info(REFERENCE["xlm-roberta"]["config"]).context_length == 62


def test_original_keys_of_nomic_select_the_trained_context():
    config = {
        "model_type": "nomic_bert",
        "n_embd": 32,
        "n_head": 2,
        "n_inner": 48,
        "n_layer": 3,
        "n_positions": 8192,
        "max_trained_positions": 2048,
        "activation_function": "swiglu",
        "vocab_size": 60,
    }
    assert architectures.read_info(config).context_length == 2048
