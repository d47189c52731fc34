"""Qwen3-Next: published checkpoints, float32 states, unsupported settings."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from models import architectures
from models.base import Model, ModelError
from models.kv import KVCache
from models.recurrent import RecurrentCache
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
}

CASES = [
    Case(name="plain", config=TINY, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(
        name="mixed",
        config={
            **TINY,
            "num_hidden_layers": 5,
            "full_attention_interval": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "partial_rotary_factor": 0.5,
        },
    ),
    Case(
        name="dense",
        config={**TINY, "num_experts": 0, "linear_num_value_heads": 6},
        quantized=(),
    ),
]

ZERO_CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Undo the conversion of a checkpoint, except for names and experts."""
    found = {"mtp.layers.0.mlp.gate.weight": mx.zeros((3, 3))}
    for name, array in weights.items():
        if name.endswith("conv1d.weight"):
            array = array.swapaxes(1, 2)
        elif name.endswith(ZERO_CENTRED):
            array = array - 1
        found[name] = array
    return found


def with_single_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if "switch_mlp" in name:
            for expert, one in enumerate(array):
                found[name.replace("switch_mlp", f"experts.{expert}")] = one
        else:
            found[name] = array
    return found


def with_fused_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The layout of newer checkpoints."""
    found = {name: array for name, array in weights.items() if "switch_mlp" not in name}
    for name, up in weights.items():
        if name.endswith("switch_mlp.up_proj.weight"):
            gate, down = (weights[name.replace("up_proj", f"{n}_proj")] for n in ("gate", "down"))
            prefix = name.replace("switch_mlp.up_proj.weight", "experts.")
            found[prefix + "gate_up_proj"] = mx.concatenate([gate, up], axis=1)
            found[prefix + "down_proj"] = down
    return found


def logits(config: Any, weights: dict[str, mx.array]) -> np.ndarray[Any, Any]:
    return parity.prefill(architectures.build(config, weights, vision=False), list(range(40)), [40])


def in_bfloat16(model: Any) -> Any:
    """The model with all weights in bfloat16, including those that checkpoints have in float32."""
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    return model


def assert_states_are_float32(model: Model) -> None:
    """Also in a bfloat16 model; prefill and decoding leave the same states."""
    prompt = np.random.default_rng(0).integers(0, 101, 48).tolist()
    at_once, one_by_one = model.make_kv(), model.make_kv()
    prefill = model(mx.array([prompt]), at_once)
    last = mx.concatenate([model(mx.array([[id]]), one_by_one) for id in prompt], axis=1)
    assert prefill.dtype == last.dtype == mx.bfloat16
    assert relative_distance(model.logits(prefill), model.logits(last)) < 0.03
    for a, b in zip(at_once, one_by_one, strict=True):
        if isinstance(a, RecurrentCache):
            assert [array.dtype for array in a.state()] == [mx.bfloat16, mx.float32]
            assert [array.dtype for array in b.state()] == [mx.bfloat16, mx.float32]
            assert relative_distance(a.state()[1], b.state()[1]) < 0.03


def relative_distance(a: mx.array, b: mx.array) -> float:
    """Distance relative to the norm of `a`."""
    first, second = np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32))
    return float(np.linalg.norm(first - second) / np.linalg.norm(first))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("layout", [with_single_experts, with_fused_experts])
def test_published_and_converted_checkpoints_give_the_same_logits(
    case: Case, layout: Any, tmp_path: Path
) -> None:
    weights = parity.save_converted(case, tmp_path)
    theirs = layout(to_published_layout(weights))
    got = logits(case.config, theirs)
    np.testing.assert_allclose(got, logits(case.config, weights), atol=1e-4)


def test_states_are_float32_for_all_activation_types(tmp_path: Path) -> None:
    case = CASES[2]
    model = architectures.build(case.config, parity.save_converted(case, tmp_path))
    assert_states_are_float32(in_bfloat16(model))


def test_each_layer_has_the_cache_for_its_type(tmp_path: Path) -> None:
    weights = parity.save_converted(CASES[1], tmp_path)
    model = architectures.build(CASES[1].config, weights)
    expected = [RecurrentCache, KVCache, RecurrentCache, KVCache, RecurrentCache]
    assert [type(layer) for layer in model.make_kv()] == expected
    assert not model.shift(model.make_kv(), 0, 0)
    layer_types = ["linear_attention", "full_attention"] * 2 + ["linear_attention"]
    spelled = {**CASES[1].config, "full_attention_interval": 4, "layer_types": layer_types}
    np.testing.assert_array_equal(logits(spelled, weights), logits(CASES[1].config, weights))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, r"\(3\) is not a multiple of linear_num_key_heads \(2\)"),
        ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, "'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but must be between 1 and 6"),
        ({"num_experts": 0, "intermediate_size": None}, "lacks intermediate_size"),
        ({"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, {})
