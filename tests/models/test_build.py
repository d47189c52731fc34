"""From config and tensors to a model, or to one clear sentence."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import models
from models.base import ModelError
from tests import tiny
from tests.models.test_llama import IDS, logits

GROUP = 32
CONFIG = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 64}


def quantised(spec: dict[str, Any], **layers: Any) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """A config and MLX-quantised tensors; layers: path (with _ for .) -> own bits, or None."""
    weights = tiny.weights(CONFIG)
    packed: dict[str, mx.array] = {}
    config: dict[str, Any] = {**CONFIG, "quantization": dict(spec)}
    for name, array in weights.items():
        path = name.removesuffix(".weight")
        bits = layers.get(path.replace(".", "_"), spec["bits"])
        if array.ndim != 2 or bits is None:
            packed[name] = array
            if bits is None:
                config["quantization"][path] = False
            continue
        if bits != spec["bits"]:
            config["quantization"][path] = {"group_size": GROUP, "bits": bits}
        packed[name], packed[f"{path}.scales"], packed[f"{path}.biases"] = mx.quantize(
            array, GROUP, bits
        )
    return config, packed


def restored(weights: dict[str, mx.array], bits: dict[str, int]) -> dict[str, mx.array]:
    """The plain tensors that quantised ones stand for."""
    plain: dict[str, mx.array] = {}
    for name, array in weights.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        scales = weights.get(f"{path}.scales")
        plain[name] = (
            array
            if scales is None
            else mx.dequantize(array, scales, weights[f"{path}.biases"], GROUP, bits.get(path, 4))
        )
    return plain


def test_a_quantised_checkpoint_computes_what_its_restored_weights_compute() -> None:
    config, weights = quantised({"group_size": GROUP, "bits": 4})
    model = models.build(config, dict(weights))
    plain = models.build(CONFIG, restored(weights, {}))
    np.testing.assert_allclose(logits(model, IDS), logits(plain, IDS), atol=1e-3)
    assert isinstance(model, nn.Module)
    assert any(isinstance(m, nn.QuantizedLinear) for m in model.modules())


def test_quantised_embeddings_may_be_the_head_too() -> None:
    config, weights = quantised({"group_size": GROUP, "bits": 8})
    config["tie_word_embeddings"] = True
    tied = {name: array for name, array in weights.items() if not name.startswith("lm_head.")}
    untied = {**weights}
    for part in ("weight", "scales", "biases"):
        untied[f"lm_head.{part}"] = weights[f"model.embed_tokens.{part}"]
    np.testing.assert_allclose(
        logits(models.build(config, tied), IDS),
        logits(models.build({**config, "tie_word_embeddings": False}, untied), IDS),
        atol=1e-4,
    )


def test_single_layers_may_have_their_own_bits_or_none() -> None:
    head, first = "lm_head", "model.layers.0.mlp.gate_proj"
    config, weights = quantised(
        {"group_size": GROUP, "bits": 4},
        **{head: 8, first.replace(".", "_"): None},
    )
    model = models.build(config, dict(weights))
    plain = models.build(CONFIG, restored(weights, {head: 8}))
    np.testing.assert_allclose(logits(model, IDS), logits(plain, IDS), atol=1e-3)


def test_the_older_key_of_the_quantisation_is_read_too() -> None:
    config, weights = quantised({"group_size": GROUP, "bits": 4})
    config["quantization_config"] = config.pop("quantization")
    models.build(config, weights)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"quant_method": "gptq", "bits": 4}, "weights quantised with 'gptq' are not supported"),
        ({"group_size": 48, "bits": 4}, "the quantization in config.json cannot be used"),
    ],
)
def test_a_quantisation_that_is_not_mlx_is_refused(spec: dict[str, Any], complaint: str) -> None:
    weights = quantised({"group_size": GROUP, "bits": 4})[1]
    with pytest.raises(ModelError, match=complaint):
        models.build({**CONFIG, "quantization": spec}, weights)


@pytest.mark.parametrize(
    "kind", ["no_such_model", "kv", "base", "builtin", "../llama", "os.path", "", "Llama"]
)
def test_an_unknown_architecture_is_named(kind: str) -> None:
    with pytest.raises(ModelError, match="is not supported"):
        models.build({**tiny.CONFIG, "model_type": kind}, {})


def test_a_config_without_model_type_is_refused() -> None:
    with pytest.raises(ModelError, match="no model_type"):
        models.build({}, {})


def test_missing_config_keys_are_named() -> None:
    config = {k: v for k, v in tiny.CONFIG.items() if k not in {"hidden_size", "vocab_size"}}
    with pytest.raises(ModelError, match=r"config.json lacks hidden_size, vocab_size"):
        models.build(config, {})


def test_an_activation_that_llama_does_not_have_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'gelu'"):
        models.build({**tiny.CONFIG, "hidden_act": "gelu"}, tiny.weights())


def test_missing_extra_and_misshapen_tensors_are_named_together() -> None:
    weights = tiny.weights()
    del weights["model.norm.weight"]
    weights["model.layers.9.mlp.gate_proj.weight"] = mx.zeros((1,))
    weights["lm_head.weight"] = mx.zeros((3, 16))
    with pytest.raises(ModelError) as caught:
        models.build(tiny.CONFIG, weights)
    message = str(caught.value)
    assert "lacks tensors: model.norm.weight" in message
    assert "has unknown tensors: model.layers.9.mlp.gate_proj.weight" in message
    assert "lm_head.weight ([3, 16], expected [258, 16])" in message


def test_a_long_list_of_tensors_is_cut() -> None:
    with pytest.raises(ModelError, match=r"and 16 more$"):
        models.build(tiny.CONFIG, {})
