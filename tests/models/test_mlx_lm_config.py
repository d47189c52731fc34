"""Configs of transformers 5 in the form that mlx-lm's classes read, and keys that they ignore.

`make parity` compares the logits of these families with transformers.
"""

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import transformers
from mlx.utils import tree_flatten

from models import architectures
from models.base import ModelError
from models.checkpoint_config import get_text_config
from tests.models import parity
from tests.models.architectures import Case
from tests.models.mlx_lm_families import FAMILIES, THETA
from tests.models.test_mlx_lm_adapter import TINY
from tests.models.test_mlx_lm_classes import LINEAR
from tests.rows import rows

SEED_OSS: dict[str, Any] = {
    "model_type": "seed_oss",
    **TINY,
    "head_dim": 16,
    "rope_theta": THETA,
    "rms_norm_eps": 1e-6,
}


def save_as_transformers(case: Case) -> dict[str, Any]:
    """The config.json that transformers writes."""
    config = dict(case.config)
    kind = config.pop("model_type")
    return json.loads(transformers.AutoConfig.for_model(kind, **config).to_json_string())


def build(config: dict[str, Any]) -> Any:
    """The model without weights."""
    text = get_text_config(config)
    architecture = architectures._find_architecture(text, config)
    return architecture.Model(architecture.Config.from_dict(text))


def rope_bases(model: nn.Module) -> set[float]:
    return {module.base for module in model.modules() if type(module) is nn.RoPE}


@rows("case", FAMILIES, ids=[case.id for case in FAMILIES])
def test_a_class_gets_the_rope_that_transformers_saves(case: Case) -> None:
    bases = rope_bases(build(save_as_transformers(case)))
    if "rope_theta" in json.dumps(case.config) and "rope_type" not in json.dumps(case.config):
        assert bases <= {THETA, 10000.0 if "attn_config" in case.config else THETA}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("seed_oss", SEED_OSS),
        ("hunyuan_v1_dense", SEED_OSS),
        ("starcoder2", {**TINY, "rope_theta": THETA, "norm_epsilon": 1e-5}),
    ],
)
def test_both_forms_of_a_config_give_the_same_logits(
    kind: str, config: dict[str, Any], tmp_path: Any
) -> None:
    """Their classes read only the older form, and computed with a default without it."""
    config = {**config, "model_type": kind}
    reference = parity.save_reference(Case(name="", config=config), tmp_path)
    newer = {key: value for key, value in config.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA}
    flat: Any = tree_flatten(reference.parameters())
    prompt = list(range(23))
    ours = architectures.build(newer, dict(flat))
    expected = parity.prefill_reference(reference, prompt)
    assert parity.max_difference(parity.prefill(ours, prompt, [23]), expected) < 1e-4
    del newer["rope_parameters"]
    default = architectures.build(newer, dict(flat))
    assert parity.max_difference(parity.prefill(default, prompt, [23]), expected) > 1e-2


def test_a_window_that_a_class_ignores_is_in_its_caches(tmp_path: Any) -> None:
    config = {"model_type": "starcoder2", **TINY, "rope_theta": THETA}
    reference = parity.save_reference(Case(name="", config=config), tmp_path)
    flat: Any = tree_flatten(reference.parameters())
    prompt = list(range(40))
    layers, window = TINY["num_hidden_layers"], 6
    ours = architectures.build({**config, "sliding_window": window}, dict(flat))
    logits = parity.prefill(ours, prompt, [7, 1, 32])
    # the last position depends on this number of tokens
    seen = layers * (window - 1) + 1
    same = parity.prefill(ours, [5] * (40 - seen) + prompt[-seen:], [40])
    other = parity.prefill(ours, [5] * (41 - seen) + prompt[1 - seen :], [40])
    np.testing.assert_allclose(same[-1], logits[-1], atol=1e-5)
    assert np.abs(other[-1] - logits[-1]).max() > 1e-4


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_multiplier": 2.0}, "attention_multiplier"),
        ({"query_pre_attn_scalar": 128}, "query_pre_attn_scalar"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": "relu2"}, "hidden_act"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate of rope scaling 'yarn'"),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
            },
            "sliding_window of some layers",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layer_types with 'linear_attention'",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            "rope_theta of sliding_attention",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_an_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"sets {named}, which mlx-lm's seed_oss implementation"):
        build({**SEED_OSS, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": 1.0, "final_logit_softcapping": None, "sliding_window": None},
        {"sliding_window": 6, "use_sliding_window": False},
        {"sliding_window": 6, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 4096},
        {"hidden_act": "swish"},
        {"layer_types": ["full_attention"] * 2},
        {"rope_parameters": {**YARN, "truncate": True, "attention_factor": 1.2}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}},
    ],
)
def test_a_key_with_a_neutral_value_is_accepted(changes: dict[str, Any]) -> None:
    build({**SEED_OSS, **changes})


def test_the_alpha_of_dynamic_scaling_changes_the_base() -> None:
    """All of Hunyuan's checkpoints have it. It was removed with the scaling, and the logits were
    those of a different base."""
    alpha = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    config = {**SEED_OSS, "model_type": "hunyuan_v1_dense", "rope_theta": None}
    rope: Any = build({**config, "rope_parameters": alpha}).layers[0].self_attn.rope
    expected = (1e4 * 1000 ** (16 / 14)) ** (mx.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(np.array(rope._freqs), np.array(expected), rtol=1e-5)
    with pytest.raises(ModelError, match="sets alpha of rope scaling 'dynamic', which mlx-lm's"):
        build({**SEED_OSS, "rope_parameters": alpha})


def test_a_class_without_rotation_needs_no_theta() -> None:
    """Kimi Linear's published config has one."""
    linear = {"model_type": "kimi_linear", **LINEAR}
    assert build(linear).layers[3].self_attn is not None
    with pytest.raises(ModelError, match="sets rope_theta, which mlx-lm's kimi_linear"):
        build({**linear, "mla_use_nope": False})


def test_the_attention_factor_of_yarn_is_converted() -> None:
    model = build({**SEED_OSS, "rope_parameters": {**YARN, "attention_factor": 1.25}})
    assert model.layers[0].self_attn.rope.mscale == pytest.approx(1.25)


def test_the_original_length_of_yarn_is_the_context_length_by_default() -> None:
    given = {**SEED_OSS, "max_position_embeddings": 128}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    models = [build({**given, "rope_parameters": one}) for one in (scaling, YARN)]
    first, second = (model.layers[0].self_attn.rope._freqs for model in models)
    assert mx.array_equal(first, second)


def test_a_share_of_rotated_dimensions_that_a_class_ignores_is_applied() -> None:
    config = {"model_type": "glm", **TINY, "head_dim": 16, "attention_bias": True}
    config |= {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    assert build(config).layers[0].self_attn.rope.dims == 8


@pytest.mark.parametrize("tag", ["NaN", "inf", 3, None])
def test_an_unknown_tagged_float_is_an_error(tag: Any) -> None:
    with pytest.raises(ModelError, match="__float__ is"):
        build({**SEED_OSS, "time_step_limit": [0.0, {"__float__": tag}]})


def test_nested_values_are_bounded() -> None:
    value: Any = 1
    for _ in range(50):
        value = [value]
    with pytest.raises(ModelError, match="nested too deeply"):
        build({**SEED_OSS, "unknown": value})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "ernie4_5_moe"}, "ignores the bias of the router"),
        ({"model_type": "jamba", "num_experts": 4}, "normalizes the expert weights"),
        ({"model_type": "mamba2", "n_groups": 8}, "normalizes all groups together"),
        ({"model_type": "dots1", "scoring_func": "softmax"}, "sets scoring_func"),
    ],
)
def test_a_class_that_computes_something_else_is_refused(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        build({**TINY, **config})
