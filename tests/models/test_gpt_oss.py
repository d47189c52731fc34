"""gpt-oss in the published layout, in that of mlx-lm, and dequantized."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from models import architectures, gpt_oss
from models.base import ModelError
from tests.models import parity
from tests.models.architectures import Case
from tests.models.test_llama import TINY

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}

# all widths differ, so a transposed matrix is detected
CONFIG = {
    **TINY,
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "rope_theta": 150000.0,
    "rope_scaling": YARN,
}

CASES = [
    Case(name="plain", config=CONFIG, quantized=("affine-8", "mxfp4", "mxfp8", "nvfp4")),
    Case(
        name="layer-types",
        config={
            **CONFIG,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 7,
            "rope_scaling": None,
            "num_experts_per_tok": 1,
        },
        quantized=("affine-4",),
    ),
]

IDS = [5, 50, 17, 17, 99, 3, 80, 42, 7]

# four bits with a sign, two of exponent and one of mantissa (OCP Microscaling Formats 1.0, 2023)
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])


def blocks(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random mxfp4 weights [..., in] in the published layout: blocks [..., in / 32, 16] of bytes,
    the first number in the lower half; scales [..., in / 32], which are powers of two; and the
    dequantized weights."""
    *rows, width = shape
    codes = rng.integers(0, 16, (*rows, width // 32, 16, 2))
    scales = rng.integers(122, 126, (*rows, width // 32))
    values = E2M1[codes].reshape(*rows, width // 32, 32) * 2.0 ** (scales[..., None] - 127)
    packed = (codes[..., 0] | codes[..., 1] << 4).astype(np.uint8)
    return packed, scales.astype(np.uint8), values.reshape(shape).astype(np.float32)


def make_checkpoints(config: Mapping[str, Any]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """A random checkpoint in the published layout, and dequantized as transformers saves it:
    [E, in, out], gate and up interleaved."""
    rng = np.random.default_rng(0)
    experts, hidden, inner = (
        config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    common: dict[str, mx.array] = {}
    model = gpt_oss.Model(gpt_oss.Config.from_dict(config))
    flat: Any = tree_flatten(model.parameters())
    for name, array in flat:
        if ".experts." not in name:
            noise = rng.standard_normal(array.shape) / np.sqrt(array.shape[-1])
            common[name] = mx.array(noise.astype(np.float32))
    packed, plain = dict(common), dict(common)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.mlp.experts"
        for name, rows, width in (
            ("gate_up_proj", 2 * inner, hidden),
            ("down_proj", hidden, inner),
        ):
            own = blocks(rng, experts, rows, width)
            bias = mx.array(rng.standard_normal((experts, rows)).astype(np.float32))
            packed[f"{path}.{name}_blocks"] = mx.array(own[0])
            packed[f"{path}.{name}_scales"] = mx.array(own[1])
            plain[f"{path}.{name}"] = mx.array(own[2].swapaxes(1, 2))
            packed[f"{path}.{name}_bias"] = plain[f"{path}.{name}_bias"] = bias
    return packed, plain


MAKERS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def test_published_blocks_equal_the_dequantized_weights() -> None:
    packed, plain = make_checkpoints(CONFIG)
    ours = architectures.build({**CONFIG, "quantization_config": MAKERS}, packed)
    exact = architectures.build(CONFIG, plain)
    np.testing.assert_allclose(
        parity.prefill(ours, IDS, [9]), parity.prefill(exact, IDS, [9]), atol=1e-4
    )


def test_a_published_checkpoint_agrees_with_the_reference(
    tmp_path: Path,
) -> None:
    packed, _ = make_checkpoints(CONFIG)
    config = {**CONFIG, "quantization_config": MAKERS}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), packed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference, _ = load_model(tmp_path)
    ours = architectures.build(config, packed)
    np.testing.assert_allclose(
        parity.prefill(ours, IDS, [9]), parity.prefill_reference(reference, IDS), atol=1e-4
    )


def test_the_converted_layout_equals_the_published_one(tmp_path: Path) -> None:
    """The tensors that mlx-lm saves, joined as in the published layout, give the same model."""
    parity.save_reference(CASES[0], tmp_path, kind="mxfp4")
    weights: Any = mx.load(str(tmp_path / "model.safetensors"))
    joined: dict[str, mx.array] = {}
    for name, array in weights.items():
        if ".experts.up_proj" in name:
            continue
        own = name
        if ".experts.gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            array = mx.stack([array, up], axis=2).reshape(array.shape[0], -1, *array.shape[2:])
            own = name.replace("gate_proj", "gate_up_proj")
        if ".experts." in name:
            path, kind = own.rsplit(".", 1)
            own = f"{path}_{'blocks' if kind == 'weight' else kind}"
            if kind == "weight":
                array = array.view(mx.uint8).reshape(*array.shape[:2], -1, 16)
        joined[own] = array
    config = {**CONFIG, "quantization_config": MAKERS}
    np.testing.assert_array_equal(
        parity.prefill(architectures.build(config, joined), IDS, [9]),
        parity.prefill(parity.load_model(tmp_path), IDS, [9]),
    )


def test_the_gate_is_clamped_above_and_the_linear_part_on_both_sides() -> None:
    config = gpt_oss.Config.from_dict({**CONFIG, "swiglu_limit": 3.0, "swiglu_alpha": 1.5})
    gate, up = (mx.array(a) for a in np.meshgrid(np.linspace(-9, 9, 37), np.linspace(-9, 9, 37)))
    below, within = np.minimum(np.array(gate), 3), np.clip(np.array(up), -3, 3)
    expected = (within + 1) * below / (1 + np.exp(-1.5 * below))
    np.testing.assert_allclose(
        np.array(config.make_gating()(gate, up)), expected, rtol=1e-5, atol=1e-5
    )


def test_yarn_does_not_round_the_dimensions_of_its_ramp() -> None:
    """The published config has "truncate": false; mlx-lm 0.32 still rounds."""
    config = {**CONFIG, "rope_scaling": {**YARN, "truncate": False}}
    rope = gpt_oss.Config.from_dict(config).rope()
    half, base, context = 16, 150000.0, 64
    low, high = (
        half * math.log(context / (turns * 2 * math.pi)) / math.log(base) for turns in (32.0, 1.0)
    )
    low = max(low, 0)
    ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    periods = base ** (np.arange(half) / half)
    expected = 1 / (ramp / (32.0 * periods) + (1 - ramp) / periods)
    np.testing.assert_allclose(np.array(rope.periods), expected, rtol=1e-5)
    rounded = gpt_oss.Config.from_dict(CONFIG).rope().periods
    assert not np.allclose(np.array(rounded), expected, rtol=1e-2)
    assert rope.magnitude == pytest.approx(0.1 * math.log(32) + 1)


def test_windowed_and_full_attention_layers_alternate() -> None:
    model = gpt_oss.Model(gpt_oss.Config.from_dict(CONFIG))
    assert [layer.sliceable for layer in model.make_kv()] == [False, True, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but must be between 1 and 8"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**CONFIG, **change}, {})
