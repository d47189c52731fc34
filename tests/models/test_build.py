"""From config and tensors to a model, or to one clear sentence."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils

import models
from models.base import ModelError
from tests import tiny
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY, logits

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


def test_what_config_json_says_of_the_packing_cannot_make_anybody_misread_it() -> None:
    config, weights = quantised({"group_size": GROUP, "bits": 4}, lm_head=8)
    config["quantization"] = {"group_size": 64, "bits": 8, "mode": "mxfp8", "lm_head": False}
    plain = models.build(CONFIG, restored(weights, {"lm_head": 8}))
    found = models.build(config, weights)
    np.testing.assert_allclose(logits(found, IDS), logits(plain, IDS), atol=1e-3)


def test_a_quantisation_that_is_not_mlx_is_refused() -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ModelError, match="weights quantised with 'gptq' are not supported"):
        models.build(config, tiny.weights(CONFIG))
    with pytest.raises(ModelError, match="'gptq'"):
        models.read_info(config)


def mixed(path: str, layer: nn.Module) -> bool | dict[str, Any]:
    """Like the recipes of mlx-lm, but with more kinds than any of them."""
    if "v_proj" in path:
        return {"group_size": 64, "bits": 8, "mode": "affine"}
    if "down_proj" in path:
        return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    if "up_proj" in path:
        return {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    return "k_proj" not in path and hasattr(layer, "to_quantized")


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_each_layer_may_be_packed_in_its_own_way_as_mlx_lm_writes_it(
    tmp_path: Path, prefix: str
) -> None:
    case = Case(name="mixed", config={**TINY, "intermediate_size": 128})
    reference = parity.saved(case, tmp_path)
    reference, config = utils.quantize_model(
        reference, dict(case.config), 64, 4, mode="affine", quant_predicate=mixed
    )
    assert {type(value) for value in config["quantization"].values()} == {int, str, dict}
    flat: Any = tree_flatten(reference.parameters())
    if prefix:
        told = config.pop("quantization")
        named = {
            f"{prefix}{key}" if isinstance(value, dict | bool) else key: value
            for key, value in told.items()
        }
        config = {"model_type": "sees", "quantization": named, "text_config": config}
    ours = models.build(config, {f"{prefix}{name}": array for name, array in flat})
    found = parity.differences(reference, ours, case)
    assert max(found.values()) < parity.TOLERANCE, found


@pytest.mark.parametrize("kinds", [(4, 4), (4, 8)], ids=["int4", "int4 with int8"])
def test_a_checkpoint_of_ollamas_store_is_that_of_mlx_under_other_names(
    kinds: tuple[int, int],
) -> None:
    config, weights = quantised({"group_size": GROUP, "bits": kinds[0]}, lm_head=kinds[1])
    stored = {
        name.replace(".scales", ".weight.scale").replace(".biases", ".weight.bias"): array
        for name, array in weights.items()
    }
    # as it stands in the store: nothing is said of the packing but by the tensors
    found = models.build(CONFIG, stored)
    wanted = models.build(config, weights)
    assert np.array_equal(logits(found, IDS), logits(wanted, IDS))


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_weights_are_brought_to_few_bits(bits: int) -> None:
    weights = tiny.weights(CONFIG)
    model: Any = models.build(CONFIG, dict(weights), bits=bits)
    assert {m.bits for m in model.modules() if "scales" in m} == {bits}
    assert not any(type(m) in (nn.Linear, nn.Embedding) for m in model.modules())
    packed = {name: mx.quantize(a, 64, bits) for name, a in weights.items() if a.ndim == 2}
    plain = {
        name: mx.dequantize(*packed[name], 64, bits) if name in packed else array
        for name, array in weights.items()
    }
    np.testing.assert_allclose(
        logits(model, IDS), logits(models.build(CONFIG, plain), IDS), atol=1e-3
    )


def test_weights_that_are_quantised_are_not_quantised_again() -> None:
    config, weights = quantised({"group_size": GROUP, "bits": 8})
    with pytest.raises(ModelError, match="already quantised; only unquantised weights can be"):
        models.build(config, weights, bits=4)


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
    with pytest.raises(ModelError, match="hidden_act 'relu6'"):
        models.build({**tiny.CONFIG, "hidden_act": "relu6"}, tiny.weights())


def test_missing_extra_and_misshapen_tensors_are_named_together() -> None:
    weights = tiny.weights()
    del weights["model.norm.weight"]
    weights["model.layers.9.mlp.gate_proj.weight"] = mx.zeros((1,))
    weights["lm_head.weight"] = mx.zeros((3, 16))
    with pytest.raises(ModelError) as caught:
        models.build(tiny.CONFIG, weights)
    message = str(caught.value)
    assert "lacks tensors: model.norm.weight" in message
    assert "has unexpected tensors: model.layers.9.mlp.gate_proj.weight" in message
    assert "lm_head.weight ([3, 16], expected [258, 16])" in message


def test_a_long_list_of_tensors_is_cut() -> None:
    with pytest.raises(ModelError, match=r"and 16 more$"):
        models.build(tiny.CONFIG, {})


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("model.norm.weight", mx.zeros((16,), mx.int32), "(int32, expected floating point)"),
        ("lm_head.weight", mx.zeros((258, 16), mx.uint8), "(uint8, expected floating point)"),
        ("lm_head.weight", mx.zeros((258, 16), mx.bool_), "(bool, expected floating point)"),
        ("lm_head.weight", mx.zeros((258, 16), mx.complex64), "(complex64, expected floating"),
    ],
)
def test_a_tensor_of_a_wrong_type_is_named(name: str, array: mx.array, told: str) -> None:
    with pytest.raises(models.TensorError) as caught:
        models.build(tiny.CONFIG, {**tiny.weights(), name: array})
    assert f"the checkpoint has wrongly typed tensors: {name} {told}" in str(caught.value)
    assert caught.value.tensors == (name,)
