"""Ollama's names of quantised tensors, and MLX's."""

import itertools

import mlx.core as mx
import pytest

from models.ollama_names import to_mlx_names

PACKED = mx.zeros((4, 8), mx.uint32)
PLAIN = mx.zeros((4,))

# what the store holds of a layer that is quantised and has a bias, and what it becomes
Q = "model.layers.0.self_attn.q_proj"
STORED = {
    f"{Q}.weight": PACKED,
    f"{Q}.weight.scale": PLAIN,
    f"{Q}.weight.bias": PLAIN,
    f"{Q}.bias": PLAIN,
}
WANTED = {f"{Q}.{part}" for part in ("weight", "scales", "biases", "bias")}


def test_a_bias_is_a_quantisations_only_beside_a_scale_in_whatever_order_they_come() -> None:
    for order in itertools.permutations(STORED.items()):
        assert to_mlx_names(dict(order)).keys() == WANTED


def test_the_names_that_the_runner_gives_are_known_too() -> None:
    renamed = {
        f"{Q}.weight": PACKED,
        f"{Q}.weight_scale": PLAIN,
        f"{Q}.weight_qbias": PLAIN,
        f"{Q}.bias": PLAIN,
    }
    assert to_mlx_names(renamed).keys() == WANTED


@pytest.mark.parametrize(
    "weights",
    [
        # a layer that is not quantised
        {f"{Q}.weight": mx.zeros((4, 8)), f"{Q}.bias": PLAIN},
        # parameters that happen to be called so
        {"norm.scale": PLAIN, "norm.bias": PLAIN, "router.scale": PLAIN},
        {"router.weight": mx.zeros((4, 8)), "router.weight.scale": PLAIN},
        # MLX's own
        {f"{Q}.weight": PACKED, f"{Q}.scales": PLAIN, f"{Q}.biases": PLAIN, f"{Q}.bias": PLAIN},
        # what is not MLX's keeps the name that it will be refused under
        {f"{Q}.weight": mx.zeros((4, 8), mx.uint8), f"{Q}.weight_scale": PLAIN},
    ],
)
def test_everything_else_stays_as_it_is(weights: dict[str, mx.array]) -> None:
    found = to_mlx_names(weights)
    assert found.keys() == weights.keys()
    assert all(found[name] is weights[name] for name in weights)


def test_stacked_experts_are_renamed_like_any_other_layer() -> None:
    for path in ("mlp.switch_mlp.up_proj.weight", "mlp.experts.up_proj"):
        weights = {path: mx.zeros((2, 4, 8), mx.uint32), f"{path}.scale": mx.zeros((2, 4, 2))}
        plain = path.removesuffix(".weight")
        assert to_mlx_names(weights).keys() == {f"{plain}.weight", f"{plain}.scales"}


def test_a_global_scale_becomes_the_magnitude_that_it_brings_about() -> None:
    """The store's is a factor of the weight; the largest that nvfp4 writes is 6 times 448."""
    weights = {
        f"{Q}.weight": PACKED,
        f"{Q}.weight.scale": mx.zeros((4, 4), mx.uint8),
        f"{Q}.weight.global_scale": mx.array([0.5]),
    }
    assert to_mlx_names(weights)[f"{Q}.global_scale"].tolist() == [0.5 * 6 * 448]
