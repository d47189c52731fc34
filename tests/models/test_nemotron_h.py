"""Nemotron-H: kinds of layers, config keys, and the published layout of tensors."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from models import architectures, nemotron_h
from models.base import ModelError
from models.cpu_layout import apply_cpu_layout
from models.kv import KVCache
from models.recurrent import RecurrentCache
from tests.models import parity
from tests.models.architectures import Case

TINY: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 96,
    "hybrid_override_pattern": "M-M*-",
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    # transformers uses it as the limit for prompts, but not for single positions
    "time_step_min": 1e-12,
    "tie_word_embeddings": False,
}

MOE: dict[str, Any] = {
    **TINY,
    "hybrid_override_pattern": "ME*E",
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}

CASES = [
    Case(name="plain", config=TINY, quantized=("affine-4", "affine-8", "mxfp4")),
    Case(name="experts", config=MOE, quantized=("affine-4", "affine-8")),
    Case(
        name="latent",
        config={
            **{key: value for key, value in MOE.items() if key != "hybrid_override_pattern"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "num_hidden_layers": 5,
            "moe_latent_size": 32,
            "mlp_bias": True,
            "n_group": 4,
            "topk_group": 2,
        },
        quantized=("affine-4",),
    ),
    Case(
        name="limited",
        config={
            **TINY,
            "hybrid_override_pattern": "M*M",
            "num_hidden_layers": 3,
            "attention_bias": True,
            "time_step_limit": [0.01, 0.5],
        },
        quantized=(),
        transformers=False,
        why="transformers reads neither time_step_limit nor attention_bias",
    ),
    Case(
        name="uneven",
        config={
            **TINY,
            "hybrid_override_pattern": "*M",
            "num_hidden_layers": 2,
            "use_bias": True,
            "mamba_proj_bias": True,
            "use_conv_bias": False,
            "mamba_num_heads": 6,
            "mamba_head_dim": 24,
            "ssm_state_size": 12,
            "n_groups": 2,
            "conv_kernel": 3,
        },
        quantized=(),
    ),
]


def logits(config: Any, weights: dict[str, mx.array]) -> np.ndarray[Any, Any]:
    return parity.prefill(architectures.build(config, weights), list(range(20)), [20])


def to_published_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Undo the conversion of a checkpoint, and add a layer for multi-token prediction."""
    found = {"mtp.layers.0.eh_proj.weight": mx.zeros((2, 2))}
    for name, array in weights.items():
        if name.endswith("conv1d.weight"):
            found[name] = array.swapaxes(1, 2)
        elif "switch_mlp" in name:
            name = name.replace("fc1", "up_proj").replace("fc2", "down_proj")
            for expert, one in enumerate(array):
                found[name.replace("switch_mlp", f"experts.{expert}")] = one
        else:
            found[name] = array
    return found


def to_transformers_layout(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The names of the modules in transformers."""
    names = {
        "backbone.": "model.",
        "switch_mlp.fc1.weight": "experts.up_proj",
        "switch_mlp.fc2.weight": "experts.down_proj",
    }
    found = dict[str, mx.array]()
    for name, array in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = array
    return found


@pytest.mark.parametrize("layout", [to_published_layout, to_transformers_layout])
def test_all_layouts_of_a_checkpoint_give_the_same_logits(layout: Any, tmp_path: Any) -> None:
    weights = parity.save_converted(CASES[1], tmp_path)
    assert layout(weights).keys() != weights.keys()
    np.testing.assert_array_equal(logits(MOE, layout(weights)), logits(MOE, weights))


@pytest.mark.parametrize(
    "keys",
    [
        {"hybrid_override_pattern": ["M", "E", "*", "E"]},
        {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
        {"layer_types": ["linear_attention", "moe", "full_attention", "moe"]},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_all_spellings_of_the_layers_are_equal(keys: Any, tmp_path: Any) -> None:
    weights = parity.save_converted(CASES[1], tmp_path)
    rest = {
        key: value
        for key, value in MOE.items()
        if key not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    np.testing.assert_array_equal(logits({**rest, **keys}, weights), logits(MOE, weights))


def test_infinite_limits_of_step_sizes_are_accepted(tmp_path: Any) -> None:
    weights = parity.save_converted(CASES[0], tmp_path)
    config = {**TINY, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    np.testing.assert_array_equal(logits(config, weights), logits(TINY, weights))


def test_only_mamba_and_attention_layers_have_a_cache() -> None:
    model = nemotron_h.Model(nemotron_h.Config.from_dict(TINY))
    assert [type(layer) for layer in model.make_kv()] == [RecurrentCache, RecurrentCache, KVCache]


def test_layers_after_the_last_cache_compute_only_the_selected_positions(tmp_path: Any) -> None:
    parity.save_converted(CASES[1], tmp_path)
    model = parity.load_model(tmp_path)
    apply_cpu_layout(cast(nn.Module, model))
    tokens = mx.array([list(range(20))])
    every = model(tokens, model.make_kv())
    last = model(tokens, model.make_kv(), lambda hidden: hidden[:, -1:])
    np.testing.assert_allclose(np.array(last), np.array(every[:, -1:]), atol=1e-6)


def test_a_context_is_shifted_only_without_mamba_layers() -> None:
    def shift(pattern: str) -> bool:
        config = {**TINY, "hybrid_override_pattern": pattern}
        model = nemotron_h.Model(nemotron_h.Config.from_dict(config))
        kv = model.make_kv()
        mx.eval(model(mx.array([[1, 2, 3, 4]]), kv))
        return model.shift(kv, 1, 3) and {layer.offset for layer in kv} == {2}

    assert shift("-*-*")
    assert not shift("M*")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "M*X"}, "layer of type 'X'; supported types: M, "),
        ({"hybrid_override_pattern": "M" * 1025}, "between 1 and 1024 layers, not 1025"),
        ({"hybrid_override_pattern": ""}, "between 1 and 1024 layers, not 0"),
        ({"hybrid_override_pattern": "--"}, "neither Mamba nor attention layers"),
        ({"intermediate_size": None}, "an MLP has the inner width 0"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported"),
        ({"time_step_limit": [1, 0]}, "time_step_limit is"),
        ({"n_groups": 3}, "cannot be split into 3 groups"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**TINY, **change}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"moe_intermediate_size": 0}, "experts have moe_intermediate_size 0"),
        ({"moe_latent_size": 0}, "moe_latent_size 0"),
        ({"moe_shared_expert_intermediate_size": 0}, "an MLP has the inner width 0"),
    ],
)
def test_invalid_experts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architectures.build({**MOE, **change}, {})
