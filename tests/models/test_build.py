"""`architectures.build`: a model from config and tensors, or a one-line error."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils

from models import architectures
from models.base import ModelError
from tests import tiny
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import IDS, TINY, logits

GROUP = 32
CONFIG = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 64}


def make_quantized(
    spec: dict[str, Any], **layers: Any
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """A config and MLX-quantized tensors. layers: path (with _ for .) -> bits of that layer, or
    None for no quantization."""
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


def dequantize(weights: dict[str, mx.array], bits: dict[str, int]) -> dict[str, mx.array]:
    """Dequantized tensors."""
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


def test_a_quantized_checkpoint_equals_its_dequantized_weights() -> None:
    config, weights = make_quantized({"group_size": GROUP, "bits": 4})
    model = architectures.build(config, dict(weights))
    plain = architectures.build(CONFIG, dequantize(weights, {}))
    np.testing.assert_allclose(logits(model, IDS), logits(plain, IDS), atol=1e-3)
    assert isinstance(model, nn.Module)
    assert any(isinstance(m, nn.QuantizedLinear) for m in model.modules())


def test_quantized_embeddings_can_be_tied_to_the_head() -> None:
    config, weights = make_quantized({"group_size": GROUP, "bits": 8})
    config["tie_word_embeddings"] = True
    tied = {name: array for name, array in weights.items() if not name.startswith("lm_head.")}
    untied = {**weights}
    for part in ("weight", "scales", "biases"):
        untied[f"lm_head.{part}"] = weights[f"model.embed_tokens.{part}"]
    np.testing.assert_allclose(
        logits(architectures.build(config, tied), IDS),
        logits(architectures.build({**config, "tie_word_embeddings": False}, untied), IDS),
        atol=1e-4,
    )


def test_single_layers_can_have_other_bits_or_be_unquantized() -> None:
    head, first = "lm_head", "model.layers.0.mlp.gate_proj"
    config, weights = make_quantized(
        {"group_size": GROUP, "bits": 4},
        **{head: 8, first.replace(".", "_"): None},
    )
    model = architectures.build(config, dict(weights))
    plain = architectures.build(CONFIG, dequantize(weights, {head: 8}))
    np.testing.assert_allclose(logits(model, IDS), logits(plain, IDS), atol=1e-3)


def test_the_older_quantization_key_is_read() -> None:
    config, weights = make_quantized({"group_size": GROUP, "bits": 4})
    config["quantization_config"] = config.pop("quantization")
    architectures.build(config, weights)


def test_the_packing_is_inferred_from_the_tensors_and_not_from_config_json() -> None:
    config, weights = make_quantized({"group_size": GROUP, "bits": 4}, lm_head=8)
    config["quantization"] = {"group_size": 64, "bits": 8, "mode": "mxfp8", "lm_head": False}
    plain = architectures.build(CONFIG, dequantize(weights, {"lm_head": 8}))
    found = architectures.build(config, weights)
    np.testing.assert_allclose(logits(found, IDS), logits(plain, IDS), atol=1e-3)


def test_other_quantization_methods_are_refused() -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ModelError, match="weights quantized with 'bitsandbytes' are not supported"):
        architectures.build(config, tiny.weights(CONFIG))
    with pytest.raises(ModelError, match="'bitsandbytes'"):
        architectures.read_info(config)


def choose_packing(path: str, layer: nn.Module) -> bool | dict[str, Any]:
    """Like mlx-lm's recipes, but with more formats."""
    if "v_proj" in path:
        return {"group_size": 64, "bits": 8, "mode": "affine"}
    if "down_proj" in path:
        return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    if "up_proj" in path:
        return {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    return "k_proj" not in path and hasattr(layer, "to_quantized")


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_mixed_quantization_is_read_as_mlx_lm_writes_it(tmp_path: Path, prefix: str) -> None:
    case = Case(name="mixed", config={**TINY, "intermediate_size": 128})
    reference = parity.save_reference(case, tmp_path)
    reference, config = utils.quantize_model(
        reference, dict(case.config), 64, 4, mode="affine", quant_predicate=choose_packing
    )
    assert {type(value) for value in config["quantization"].values()} == {int, str, dict}
    flat: Any = tree_flatten(reference.parameters())
    if prefix:
        quantization = config.pop("quantization")
        named = {
            f"{prefix}{key}" if isinstance(value, dict | bool) else key: value
            for key, value in quantization.items()
        }
        config = {"model_type": "sees", "quantization": named, "text_config": config}
    ours = architectures.build(config, {f"{prefix}{name}": array for name, array in flat})
    found = parity.find_differences(reference, ours, case)
    assert max(found.values()) < parity.TOLERANCE, found


@pytest.mark.parametrize("kinds", [(4, 4), (4, 8)], ids=["int4", "int4 with int8"])
def test_an_ollama_checkpoint_is_an_mlx_checkpoint_with_other_names(
    kinds: tuple[int, int],
) -> None:
    config, weights = make_quantized({"group_size": GROUP, "bits": kinds[0]}, lm_head=kinds[1])
    stored = {
        name.replace(".scales", ".weight.scale").replace(".biases", ".weight.bias"): array
        for name, array in weights.items()
    }
    # as in the store: only the tensors describe the packing
    found = architectures.build(CONFIG, stored)
    expected = architectures.build(config, weights)
    assert np.array_equal(logits(found, IDS), logits(expected, IDS))


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_weights_are_quantized_on_load(bits: int) -> None:
    weights = tiny.weights(CONFIG)
    model: Any = architectures.build(CONFIG, dict(weights), bits=bits)
    assert {m.bits for m in model.modules() if "scales" in m} == {bits}
    assert not any(type(m) in (nn.Linear, nn.Embedding) for m in model.modules())
    packed = {name: mx.quantize(a, 64, bits) for name, a in weights.items() if a.ndim == 2}
    plain = {
        name: mx.dequantize(*packed[name], 64, bits) if name in packed else array
        for name, array in weights.items()
    }
    np.testing.assert_allclose(
        logits(model, IDS), logits(architectures.build(CONFIG, plain), IDS), atol=1e-3
    )


def test_quantized_weights_are_not_quantized_again() -> None:
    config, weights = make_quantized({"group_size": GROUP, "bits": 8})
    with pytest.raises(ModelError, match="already quantized and cannot be quantized again"):
        architectures.build(config, weights, bits=4)


@pytest.mark.parametrize(
    "kind", ["no_such_model", "kv", "base", "builtin", "../llama", "os.path", "", "Llama"]
)
def test_the_error_for_an_unknown_architecture_names_it(kind: str) -> None:
    with pytest.raises(ModelError, match="is not supported"):
        architectures.build({**tiny.CONFIG, "model_type": kind}, {})


def test_a_config_without_model_type_is_refused() -> None:
    with pytest.raises(ModelError, match="no model_type"):
        architectures.build({}, {})


def test_the_error_names_missing_config_keys() -> None:
    config = {k: v for k, v in tiny.CONFIG.items() if k not in {"hidden_size", "vocab_size"}}
    with pytest.raises(ModelError, match=r"config.json lacks hidden_size, vocab_size"):
        architectures.build(config, {})


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_act 'relu6'"):
        architectures.build({**tiny.CONFIG, "hidden_act": "relu6"}, tiny.weights())


def test_one_error_names_all_missing_extra_and_misshapen_tensors() -> None:
    weights = tiny.weights()
    del weights["model.norm.weight"]
    weights["model.layers.9.mlp.gate_proj.weight"] = mx.zeros((1,))
    weights["lm_head.weight"] = mx.zeros((3, 16))
    with pytest.raises(ModelError) as caught:
        architectures.build(tiny.CONFIG, weights)
    message = str(caught.value)
    assert "lacks tensors: model.norm.weight" in message
    assert "has unexpected tensors: model.layers.9.mlp.gate_proj.weight" in message
    assert "lm_head.weight ([3, 16], expected [258, 16])" in message


def test_the_error_truncates_a_long_list_of_tensors() -> None:
    with pytest.raises(ModelError, match=r"and 16 more$"):
        architectures.build(tiny.CONFIG, {})


@pytest.mark.parametrize(
    ("name", "array", "error"),
    [
        ("model.norm.weight", mx.zeros((16,), mx.int32), "(int32, expected floating point)"),
        ("lm_head.weight", mx.zeros((258, 16), mx.uint8), "(uint8, expected floating point)"),
        ("lm_head.weight", mx.zeros((258, 16), mx.bool_), "(bool, expected floating point)"),
        ("lm_head.weight", mx.zeros((258, 16), mx.complex64), "(complex64, expected floating"),
    ],
)
def test_the_error_names_a_tensor_of_the_wrong_type(name: str, array: mx.array, error: str) -> None:
    with pytest.raises(architectures.TensorError) as caught:
        architectures.build(tiny.CONFIG, {**tiny.weights(), name: array})
    assert f"the checkpoint has wrongly typed tensors: {name} {error}" in str(caught.value)
    assert caught.value.tensors == (name,)
