"""The Llama architecture against float64 numpy and against published models."""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import architectures
from models.base import Model
from tests import tiny
from tests.models import parity, reference
from tests.models.architectures import Case

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

MLX_ONLY: dict[str, Any] = {"transformers": False, "why": "Its Llama does not read the key."}

CASES = [
    Case(name="plain", config=TINY, quantized=tuple(parity.KINDS)),
    Case(
        name="tied",
        config={**TINY, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    Case(
        name="long",
        config={
            **TINY,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # keys of mlx-lm, which conversions can have
    Case(name="traditional", config={**TINY, "rope_traditional": True}, quantized=(), **MLX_ONLY),
    Case(
        name="windowed",
        config={
            **TINY,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        quantized=(),
        **MLX_ONLY,
    ),
    Case(
        name="multimodal",
        config={
            "model_type": "llava",
            "text_config": TINY,
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 8},
        },
    ),
]

IDS = [5, 250, 17, 17, 99, 3, 180, 42, 7]


def logits(model: Model, ids: list[int], chunks: list[int] | None = None) -> Any:
    """Logits [L, V], evaluated in chunks of the given lengths."""
    kv, start, parts = model.make_kv(), 0, []
    for length in chunks or [len(ids)]:
        parts.append(model.logits(model(mx.array([ids[start : start + length]]), kv)))
        start += length
    return np.array(mx.concatenate(parts, axis=1)[0])


def draw_weights(config: dict[str, Any], seed: int = 3) -> dict[str, mx.array]:
    """Random weights for the architecture of `config`, large enough to affect the logits."""
    rng = np.random.default_rng(seed)
    architecture = importlib.import_module(f"models.{config['model_type']}")
    flat: Any = tree_flatten(architecture.Model(architecture.Config.from_dict(config)).parameters())
    weights: dict[str, mx.array] = {}
    for name, array in flat:
        noise = rng.standard_normal(array.shape)
        if array.ndim > 1:
            values = noise / np.sqrt(array.shape[-1])
        else:
            values = 0.1 * noise + name.endswith("norm.weight")
        weights[name] = mx.array(values.astype(np.float32))
    return weights


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_agree_with_the_formulas(kv_heads: int) -> None:
    config = {**tiny.CONFIG, "num_key_value_heads": kv_heads}
    weights = tiny.weights(config, seed=3)
    exact = {name: np.array(array).astype(np.float64) for name, array in weights.items()}
    expected = reference.llama(config, exact, IDS)
    got = logits(architectures.build(config, weights), IDS)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 5], [8, 1], [1, 7, 1]])
def test_a_sequence_can_be_evaluated_in_any_chunks(chunks: list[int]) -> None:
    model = architectures.build(tiny.CONFIG, tiny.weights())
    np.testing.assert_allclose(logits(model, IDS, chunks), logits(model, IDS), atol=1e-4)


def test_a_tied_model_uses_its_embeddings_as_its_head() -> None:
    config = {**tiny.CONFIG, "tie_word_embeddings": True}
    weights = tiny.weights(config)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = mx.zeros((2, 2))  # some checkpoints have one nevertheless
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((2,))
    untied = {**tiny.weights(config), "lm_head.weight": weights["model.embed_tokens.weight"]}
    np.testing.assert_array_equal(
        logits(architectures.build(config, weights), IDS),
        logits(architectures.build(tiny.CONFIG, untied), IDS),
    )


def test_biases_of_the_config_are_used() -> None:
    config = {**tiny.CONFIG, "attention_bias": True, "mlp_bias": True}
    weights = tiny.weights(config)
    plain = {name: array for name, array in weights.items() if not name.endswith(".bias")}
    biased = logits(architectures.build(config, weights), IDS)
    assert not np.allclose(biased, logits(architectures.build(tiny.CONFIG, plain), IDS))
    zeros = {n: mx.zeros_like(a) if n.endswith(".bias") else a for n, a in weights.items()}
    np.testing.assert_allclose(
        logits(architectures.build(config, zeros), IDS),
        logits(architectures.build(tiny.CONFIG, plain), IDS),
        atol=1e-5,
    )


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_the_activation_of_the_config_is_used(act: str) -> None:
    """Compare the MLP with the formulas, because mlx-lm's class supports only silu."""
    config = {**TINY, "hidden_act": act, "num_hidden_layers": 1}
    model: Any = architectures.build(config, draw_weights(config))
    mlp = model.model.layers[0].mlp
    x = np.random.default_rng(0).standard_normal((3, 64))
    gate, up, down = (
        np.array(getattr(mlp, f"{name}_proj").weight).astype(np.float64)
        for name in ("gate", "up", "down")
    )
    expected = (reference.ACTIVATIONS[act](x @ gate.T) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(np.array(mlp(mx.array(x.astype(np.float32)))), expected, atol=1e-4)


def test_both_spellings_of_the_rope_settings_give_the_same_model() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = {**TINY, "vocab_size": 256, "rope_theta": 500.0, "rope_scaling": scaling}
    newer = {key: value for key, value in config.items() if not key.startswith("rope_")}
    newer["rope_parameters"] = {**scaling, "rope_theta": 500.0}
    weights = draw_weights(config)
    got = logits(architectures.build(newer, weights), IDS)
    np.testing.assert_array_equal(got, logits(architectures.build(config, weights), IDS))
    plain = {**config, "rope_theta": 10000.0, "rope_scaling": None}
    assert not np.allclose(got, logits(architectures.build(plain, weights), IDS), atol=1e-2)


@pytest.mark.parametrize("name", ["stories260K", "babyllama-361"])
def test_prompt_logprobs_of_a_trained_model_agree_with_the_published_ones(
    shared: Path, name: str
) -> None:
    folder = shared / "models" / name
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    model = architectures.build(json.loads((folder / "config.json").read_text()), weights)
    rows = (folder / "anchors" / "prompt_logprobs.jsonl").read_text().splitlines()
    assert rows
    for row in map(json.loads, rows):
        ids = mx.array([row["ids"]])
        scores = model.logits(model(ids, model.make_kv()))
        logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        got = mx.take_along_axis(logprobs[0, :-1], ids[0, 1:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(np.array(got), row["prompt_logprobs"][1:], atol=1e-4)
