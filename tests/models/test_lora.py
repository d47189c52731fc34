"""Adapters: their formats, their sum with the model's layers, and equal bits for a row in every
batch."""

import zlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import architectures
from models.base import Model, ModelError
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from models.lora import AdaptedModel, LoraFactors, read_lora_weights
from tests import tiny
from tests.models import parity
from tests.models.architectures import Case, build_untrained, cases

pytestmark = pytest.mark.recorded

PEFT: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
MLX: dict[str, Any] = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 3.0}}
QUERY = "model.layers.1.self_attn.q_proj"
PROMPT = [5, 6, 7, 8, 9]


def build(changes: Mapping[str, LoraFactors] | None = None) -> Model:
    """The tiny model, with the products of the factors added to its weights."""
    weights = tiny.weights(tiny.CONFIG, 0)
    for name, one in (changes or {}).items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + one.scale * (one.b @ one.a)
    model: Any = architectures.build(tiny.CONFIG, weights)
    apply_cpu_layout(model)
    return model


def draw_adapter(seed: int, *, rank: int = 4, part: str = "") -> dict[str, LoraFactors]:
    """Factors for all projections whose name contains `part`."""
    rng = np.random.default_rng(seed)
    found: dict[str, LoraFactors] = {}
    for name, weight in tiny.weights(tiny.CONFIG, 0).items():
        if name.endswith("_proj.weight") and part in name:
            outputs, inputs = weight.shape
            found[name.removesuffix(".weight")] = LoraFactors(
                a=mx.array(rng.standard_normal((rank, inputs)).astype(np.float32) * 0.1),
                b=mx.array(rng.standard_normal((outputs, rank)).astype(np.float32) * 0.1),
                scale=0.5,
            )
    return found


def compute_logits(model: Model, rows: int = 1) -> mx.array:
    hidden = model(mx.array([PROMPT] * rows), model.make_kv())
    return model.logits(hidden)


ADAPTERS = [draw_adapter(1), draw_adapter(2, rank=20), draw_adapter(3, part="mlp")]


@pytest.mark.parametrize("changes", ADAPTERS)
def test_an_adapter_gives_the_logits_of_the_merged_model(changes: dict[str, LoraFactors]) -> None:
    base = build()
    adapted = AdaptedModel(base)
    adapted.select([adapted.add(changes)])
    found, merged = compute_logits(adapted.model), compute_logits(build(changes))
    np.testing.assert_allclose(np.array(found), np.array(merged), atol=1e-4)
    assert not mx.allclose(found, compute_logits(base), atol=1e-2)


@given(rows=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=6))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(rows: list[int | None]) -> None:
    base = build()
    adapted = AdaptedModel(base)
    assert [adapted.add(changes) for changes in ADAPTERS] == [0, 1, 2]
    adapted.select(rows)
    together = compute_logits(adapted.model, len(rows))
    if not is_batch_invariant(base):
        pytest.skip("the kernels are not in use")
    for row, adapter in enumerate(rows):
        adapted.select([adapter])
        alone = compute_logits(base if adapter is None else adapted.model)
        assert mx.array_equal(together[row], alone[0])


ONE_CASE_EACH = list({case.config["model_type"]: case for case in reversed(cases())}.values())


@pytest.mark.parametrize("case", ONE_CASE_EACH, ids=lambda case: case.id)
def test_every_layer_of_every_architecture_is_changed_or_rejected(case: Case) -> None:
    """A fused operation, or a model that uses a weight directly, must not ignore an adapter."""
    base, merged = (draw_model(case) for _ in range(2))
    linear = {name: one for name, one in merged.named_modules() if type(one) is nn.Linear}
    apply_cpu_layout(base)
    adapted = AdaptedModel(base)
    changes = {name: draw_factors(one, name) for name, one in linear.items()}
    for name in list(changes):
        try:
            adapted.remove(adapted.add({name: changes[name]}))
        except ModelError:
            del changes[name]
            # a layer that is wrapped stays wrapped, which models that use its weight do not support
            adapted = AdaptedModel(base)
    # all but the indexer of DeepSeek V3.2, and the layers that Gemma 3n casts to float32 (AltUp)
    assert len(changes) == len(linear) or case.config["model_type"] in ("deepseek_v32", "gemma3n")
    adapted.select([adapted.add(changes)])
    for name, one in changes.items():
        linear[name].weight = linear[name].weight + one.scale * (one.b @ one.a)
    apply_cpu_layout(merged)
    found, expected = (compute_two_steps(model) for model in (adapted.model, merged))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert not np.allclose(expected, compute_two_steps(base), atol=1e-3)


def draw_model(case: Case) -> Any:
    mx.random.seed(0)
    model = build_untrained(case)
    mx.eval(model.parameters())  # not all of them are drawn
    parity.draw_weights(model, 0)
    return model


def draw_factors(layer: nn.Linear, name: str) -> LoraFactors:
    outputs, inputs = layer.weight.shape
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return LoraFactors(
        a=mx.array(rng.standard_normal((4, inputs)).astype(np.float32) * 0.1),
        b=mx.array(rng.standard_normal((outputs, 4)).astype(np.float32) * 0.1),
        scale=0.5,
    )


def compute_two_steps(model: Model) -> np.ndarray:
    """The logits of the last position of a prompt, and of a decode step."""
    kv = model.make_kv()
    steps = [model.logits(model(mx.array([ids]), kv))[:, -1] for ids in ([3, 7, 5, 9], [6])]
    return np.concatenate([np.array(step) for step in steps])


def test_the_model_itself_is_not_changed() -> None:
    base = build()
    before = compute_logits(base)
    adapted = AdaptedModel(base)
    adapted.select([adapted.add(ADAPTERS[0])])
    mx.eval(compute_logits(adapted.model))
    assert mx.array_equal(compute_logits(base), before)


def test_a_removed_adapter_changes_nothing_and_its_index_is_not_used_again() -> None:
    adapted = AdaptedModel(build())
    first = adapted.add(ADAPTERS[0])
    assert len(adapted.parameters(first)) == 2 * len(ADAPTERS[0])
    adapted.remove(first)
    assert adapted.parameters(first) == []
    assert adapted.add(ADAPTERS[1]) != first


def factors(name: str, *, peft: bool, rank: int = 4) -> dict[str, mx.array]:
    width = tiny.CONFIG["hidden_size"]
    a, b = mx.full((rank, width), 2.0), mx.full((width, rank), 3.0)
    if peft:
        return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return {f"{name}.lora_a": a.T, f"{name}.lora_b": b.T}


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 20}}, 5.0),
        ({"alpha_pattern": {"k_proj": 20}}, 2.0),
    ],
)
def test_pefts_scale_depends_on_the_rank(changes: dict[str, Any], scale: float) -> None:
    tensors = factors(f"base_model.model.{QUERY}", peft=True)
    [(name, one)] = read_lora_weights({**PEFT, **changes}, tensors).items()
    assert (name, one.scale) == (QUERY, scale)
    assert (one.a.shape[0], one.b.shape[1]) == (4, 4)


def test_mlx_lms_factors_are_transposed_and_its_scale_is_used_as_it_is() -> None:
    [(name, one)] = read_lora_weights(MLX, factors(QUERY, peft=False)).items()
    assert (name, one.scale, one.a.shape[0], one.b.shape[1]) == (QUERY, 3.0, 4, 4)


def test_the_prefix_of_a_multimodal_model_is_removed() -> None:
    tensors = factors(f"language_model.{QUERY}", peft=False)
    assert list(read_lora_weights(MLX, tensors)) == [QUERY]


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({**PEFT, "peft_type": "IA3"}, factors(QUERY, peft=True), "the type 'IA3'"),
        ({**MLX, "fine_tune_type": "dora"}, factors(QUERY, peft=False), "the type 'dora'"),
        ({**PEFT, "use_dora": True}, factors(QUERY, peft=True), "use_dora"),
        ({**PEFT, "bias": "all"}, factors(QUERY, peft=True), "bias"),
        ({**PEFT, "modules_to_save": ["lm_head"]}, factors(QUERY, peft=True), "modules_to_save"),
        ({**PEFT, "lora_alpha": None}, factors(QUERY, peft=True), "lora_alpha"),
        ({"fine_tune_type": "lora"}, factors(QUERY, peft=False), "lora_parameters.scale"),
        (PEFT, {}, "no tensors"),
        (PEFT, {"lm_head.weight": mx.zeros((2, 2))}, "lm_head.weight"),
        (PEFT, {f"{QUERY}.lora_A.weight": mx.zeros((4, 8))}, "only one factor"),
        (
            PEFT,
            {
                f"{QUERY}.lora_A.weight": mx.zeros((4, 8)),
                f"{QUERY}.lora_B.weight": mx.zeros((8, 5)),
            },
            "do not match",
        ),
    ],
)
def test_another_adapter_is_rejected_by_what_it_has(
    config: dict[str, Any], tensors: dict[str, mx.array], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_lora_weights(config, tensors)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.9.self_attn.q_proj", "not a linear layer"),
        ("model.norm", "not a linear layer"),
        ("model.layers.0.mlp.up_proj", "outputs"),
    ],
)
def test_an_adapter_of_another_model_is_rejected_and_nothing_changes(
    name: str, message: str
) -> None:
    adapted = AdaptedModel(build())
    wrong = LoraFactors(a=mx.zeros((2, 3)), b=mx.zeros((3, 2)), scale=1.0)
    with pytest.raises(ModelError, match=message):
        adapted.add({**ADAPTERS[0], name: wrong})
    assert adapted.add(ADAPTERS[0]) == 0
