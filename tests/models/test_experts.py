"""Mixtures of experts, compared with a sum in float64."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from models.base import ModelError
from models.experts import (
    MIN_SORTED_ROWS,
    Experts,
    GroupedTopKMoE,
    SparseMoeBlock,
    orient_fused_experts,
    stack_experts,
)
from tests.models import parity

HIDDEN, INNER, EXPERTS, CHOSEN = 64, 32, 8, 3


def randomize(layer: nn.Module, seed: int = 0) -> Any:
    mx.random.seed(seed)
    shapes = tree_map(lambda a: mx.random.normal(a.shape) * 0.2, layer.parameters())
    layer.update(shapes)
    return layer


def draw_routing(tokens: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    """Random x [1, L, D], chosen and shares [1, L, k]."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    x, shares = rng.standard_normal((1, tokens, HIDDEN)), rng.random((1, tokens, CHOSEN))
    return (
        mx.array(x.astype(np.float32)),
        mx.array(chosen[None].astype(np.uint32)),
        mx.array(shares.astype(np.float32)),
    )


def sum_experts(
    experts: Any,
    weight: Callable[[Any], mx.array],
    x: mx.array,
    chosen: mx.array,
    shares: mx.array,
) -> np.ndarray:
    """The sum, computed token by token and expert by expert in float64."""
    names = ("gate_proj", "up_proj", "down_proj")
    weights = {name: np.array(weight(experts[name]), np.float64) for name in names}
    biases = {name: np.array(experts[name].bias, np.float64) for name in names}

    def linear(name: str, expert: int, row: np.ndarray) -> np.ndarray:
        return weights[name][expert] @ row + biases[name][expert]

    out = np.zeros(x.shape)
    for token, row in enumerate(np.array(x[0], dtype=np.float64)):
        for expert, share in zip(
            np.array(chosen[0, token]), np.array(shares[0, token]), strict=True
        ):
            gate = linear("gate_proj", expert, row)
            inner = gate / (1 + np.exp(-gate)) * linear("up_proj", expert, row)
            out[0, token] += share * linear("down_proj", expert, inner)
    return out


@pytest.mark.parametrize(
    "tokens", [1, 5, MIN_SORTED_ROWS // CHOSEN, MIN_SORTED_ROWS // CHOSEN + 1, MIN_SORTED_ROWS]
)
def test_expert_outputs_are_summed_by_shares(tokens: int) -> None:
    """Few rows are evaluated in order, many are sorted by expert."""
    experts = randomize(Experts(HIDDEN, INNER, EXPERTS, bias=True))
    x, chosen, shares = draw_routing(tokens)
    expected = sum_experts(experts, lambda layer: layer.weight, x, chosen, shares)
    np.testing.assert_allclose(np.array(experts(x, chosen, shares)), expected, atol=1e-4)


@pytest.mark.parametrize("tokens", [5, MIN_SORTED_ROWS])
@pytest.mark.parametrize("kind", parity.KINDS)
def test_quantized_experts_equal_their_dequantized_weights(kind: str, tokens: int) -> None:
    experts = randomize(Experts(HIDDEN, INNER, EXPERTS, bias=True))
    nn.quantize(experts, **parity.KINDS[kind])

    def weight(layer: Any) -> mx.array:
        parts = (layer.weight, layer.scales, layer.get("biases"))
        return mx.dequantize(*parts, **parity.KINDS[kind], dtype=mx.float32)

    names = {name for name, _ in tree_flatten(experts.gate_proj.parameters())}
    affine = {"biases"} if kind.startswith("affine") else set()
    assert names == {"weight", "scales", "bias"} | affine
    x, chosen, shares = draw_routing(tokens)
    expected = sum_experts(experts, weight, x, chosen, shares)
    np.testing.assert_allclose(np.array(experts(x, chosen, shares)), expected, atol=1e-4)


def test_half_precision_inputs_give_half_precision_outputs() -> None:
    experts = randomize(Experts(HIDDEN, INNER, EXPERTS))
    experts.set_dtype(mx.bfloat16)
    x, chosen, shares = draw_routing(MIN_SORTED_ROWS)
    assert experts(x.astype(mx.bfloat16), chosen, shares).dtype == mx.bfloat16


@pytest.mark.parametrize("normalized", [True, False])
def test_a_sparse_mlp_is_the_sum_of_the_top_experts_and_the_shared_one(
    normalized: bool,
) -> None:
    mlp = randomize(
        SparseMoeBlock(
            HIDDEN, INNER, EXPERTS, top_k=CHOSEN, norm_topk_prob=normalized, shared_width=INNER
        )
    )
    x, _, _ = draw_routing(4)
    scores = np.array(mx.softmax(mlp.gate(x), axis=-1))
    best = np.argsort(scores, axis=-1)[..., -CHOSEN:]
    shares = np.take_along_axis(scores, best, axis=-1)
    if normalized:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    routed_part = mlp.switch_mlp(x, mx.array(best.astype(np.uint32)), mx.array(shares))
    shared_part = mx.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
    np.testing.assert_allclose(
        np.array(mlp(x)), np.array(routed_part + shared_part), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("chosen", [0, EXPERTS + 1])
def test_top_k_must_be_between_one_and_the_number_of_experts(chosen: int) -> None:
    with pytest.raises(
        ModelError, match=f"num_experts_per_tok is {chosen}, but must be between 1 and {EXPERTS}"
    ):
        SparseMoeBlock(HIDDEN, INNER, EXPERTS, top_k=chosen, norm_topk_prob=True)


def test_separate_experts_are_stacked_in_order() -> None:
    weights = {
        f"model.layers.0.mlp.experts.{n}.{projection}.{kind}": mx.full((2, 3), n)
        for n in (10, *range(10))
        for projection in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "scales")
    }
    rest = {"model.layers.0.mlp.gate.weight": mx.ones((11, 3)), "model.norm.weight": mx.ones((3,))}
    stacked = stack_experts(weights | rest)
    assert stacked.keys() == rest.keys() | {
        f"model.layers.0.mlp.switch_mlp.{projection}.{kind}"
        for projection in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "scales")
    }
    up = stacked["model.layers.0.mlp.switch_mlp.up_proj.weight"]
    assert up.shape == (11, 2, 3)
    assert up[:, 0, 0].tolist() == list(range(11))


def test_fused_experts_are_split_into_gate_and_up() -> None:
    fused, down = mx.arange(2 * 8 * 3).reshape(2, 8, 3), mx.ones((2, 3, 4))
    path = "model.layers.3.mlp"
    halves = stack_experts(
        {f"{path}.experts.gate_up_proj": fused, f"{path}.experts.down_proj": down}
    )
    assert halves.keys() == {
        f"{path}.switch_mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")
    }
    assert mx.array_equal(halves[f"{path}.switch_mlp.gate_proj.weight"], fused[:, :4])
    assert mx.array_equal(halves[f"{path}.switch_mlp.up_proj.weight"], fused[:, 4:])


def test_projections_can_have_other_names() -> None:
    weights = {f"a.experts.{n}.w2.weight": mx.ones((2, 3)) for n in range(2)}
    assert stack_experts(weights, projections={"w2": "down_proj"}, module_name="many").keys() == {
        "a.many.down_proj.weight"
    }


def test_the_error_names_a_missing_expert() -> None:
    weights = {f"a.experts.{n}.up_proj.weight": mx.ones((2, 3)) for n in (0, 2, 3)}
    with pytest.raises(ModelError, match=r"lacks expert 1 of a\.switch_mlp\.up_proj\.weight"):
        stack_experts(weights)


def test_experts_of_different_shapes_are_refused() -> None:
    weights = {f"a.experts.{n}.up_proj.weight": mx.ones((2, 3 + n)) for n in range(2)}
    with pytest.raises(ModelError, match=r"different shapes in a\.switch_mlp\.up_proj\.weight"):
        stack_experts(weights)


def test_experts_are_chosen_within_the_best_groups_and_shares_ignore_the_bias() -> None:
    """The biases are so low that every sum is negative. Other groups must still be excluded (mlx-lm
    0.32 sets their scores to 0, and so prefers them)."""
    layer = GroupedTopKMoE(HIDDEN, INNER, 16, top_k=CHOSEN, scale=1.8, num_groups=4, topk_group=2)
    rng = np.random.default_rng(0)
    layer.gate.weight = mx.array(rng.standard_normal((16, HIDDEN)).astype(np.float32))
    layer.e_score_correction_bias = mx.array((rng.random(16) - 3).astype(np.float32))
    x = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    chosen, shares = (np.array(a) for a in layer.route(mx.array(x)))
    scores = 1 / (1 + np.exp(-(x @ np.array(layer.gate.weight).T)))
    biased = scores + np.array(layer.e_score_correction_bias)
    for token in range(40):
        groups = np.sort(biased[token].reshape(4, 4), axis=1)[:, -2:].sum(axis=1)
        allowed = np.repeat(np.isin(np.arange(4), np.argsort(groups)[-2:]), 4)
        best = np.argsort(np.where(allowed, biased[token], -np.inf))[-3:]
        order = np.argsort(chosen[token])
        assert chosen[token][order].tolist() == sorted(best)
        own = scores[token][np.sort(best)]
        np.testing.assert_allclose(shares[token][order], 1.8 * own / own.sum(), rtol=1e-4)


def test_the_scores_of_a_softmax_sum_to_one_over_all_experts() -> None:
    layer = GroupedTopKMoE(
        HIDDEN, INNER, EXPERTS, top_k=EXPERTS, norm_topk_prob=False, uses_softmax=True
    )
    rng = np.random.default_rng(0)
    layer.gate.weight = mx.array(rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32))
    x = mx.array(rng.standard_normal((5, HIDDEN)).astype(np.float32))
    chosen, shares = layer.route(x)
    expected = mx.take_along_axis(mx.softmax(x @ layer.gate.weight.T, axis=-1), chosen, axis=-1)
    np.testing.assert_allclose(np.array(shares), np.array(expected), rtol=1e-4)


@pytest.mark.parametrize(
    ("groups", "used", "top_k", "message"),
    [
        (3, 1, 2, "n_group 3 and topk_group 1 are not valid for 8 experts"),
        (4, 5, 2, "n_group 4 and topk_group 5 are not valid for 8 experts"),
        (4, 1, 3, "num_experts_per_tok is 3, but must be between 1 and 2"),
    ],
)
def test_groups_that_do_not_divide_the_experts_are_refused(
    groups: int, used: int, top_k: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        GroupedTopKMoE(HIDDEN, INNER, EXPERTS, top_k=top_k, num_groups=groups, topk_group=used)


@pytest.mark.parametrize("inner", [HIDDEN // 4, HIDDEN // 2, HIDDEN])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_transposed_even_if_one_of_the_two_is_square(
    inner: int, transposed: bool
) -> None:
    gate_up, down = draw((EXPERTS, 2 * inner, HIDDEN)), draw((EXPERTS, HIDDEN, inner))
    path = "layers.0.mlp.experts."
    stored = {
        f"{path}down_proj": down.swapaxes(1, 2) if transposed else down,
        f"{path}gate_up_proj": gate_up.swapaxes(1, 2) if transposed else gate_up,
        "layers.0.self_attn.q_proj.weight": mx.zeros((HIDDEN, HIDDEN)),
    }
    oriented = orient_fused_experts(stored, HIDDEN)
    assert oriented.keys() == stored.keys()
    np.testing.assert_array_equal(oriented[f"{path}gate_up_proj"], gate_up)
    np.testing.assert_array_equal(oriented[f"{path}down_proj"], down)


def draw(shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
