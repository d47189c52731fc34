"""Renaming of Ollama's quantized tensors to MLX's names."""

import itertools

import mlx.core as mx
import pytest

from models.ollama_names import to_mlx_names

PACKED = mx.zeros((4, 8), mx.uint32)
PLAIN = mx.zeros((4,))

# a quantized layer with a bias: names in the store, and the names after renaming
Q = "model.layers.0.self_attn.q_proj"
STORED = {
    f"{Q}.weight": PACKED,
    f"{Q}.weight.scale": PLAIN,
    f"{Q}.weight.bias": PLAIN,
    f"{Q}.bias": PLAIN,
}
RENAMED = {f"{Q}.{part}" for part in ("weight", "scales", "biases", "bias")}


def test_quantization_biases_are_recognised_by_their_scales_in_any_order() -> None:
    for order in itertools.permutations(STORED.items()):
        assert to_mlx_names(dict(order)).keys() == RENAMED


def test_the_names_of_ollamas_runner_are_supported() -> None:
    renamed = {
        f"{Q}.weight": PACKED,
        f"{Q}.weight_scale": PLAIN,
        f"{Q}.weight_qbias": PLAIN,
        f"{Q}.bias": PLAIN,
    }
    assert to_mlx_names(renamed).keys() == RENAMED


@pytest.mark.parametrize(
    "weights",
    [
        # a layer that is not quantized
        {f"{Q}.weight": mx.zeros((4, 8)), f"{Q}.bias": PLAIN},
        # parameters that have such a name by chance
        {"norm.scale": PLAIN, "norm.bias": PLAIN, "router.scale": PLAIN},
        {"router.weight": mx.zeros((4, 8)), "router.weight.scale": PLAIN},
        # names of MLX
        {f"{Q}.weight": PACKED, f"{Q}.scales": PLAIN, f"{Q}.biases": PLAIN, f"{Q}.bias": PLAIN},
        # unsupported tensors keep their name, which the error will name
        {f"{Q}.weight": mx.zeros((4, 8), mx.uint8), f"{Q}.weight_scale": PLAIN},
    ],
)
def test_other_names_are_unchanged(weights: dict[str, mx.array]) -> None:
    found = to_mlx_names(weights)
    assert found.keys() == weights.keys()
    assert all(found[name] is weights[name] for name in weights)


def test_stacked_experts_are_renamed_like_other_layers() -> None:
    for path in ("mlp.switch_mlp.up_proj.weight", "mlp.experts.up_proj"):
        weights = {path: mx.zeros((2, 4, 8), mx.uint32), f"{path}.scale": mx.zeros((2, 4, 2))}
        plain = path.removesuffix(".weight")
        assert to_mlx_names(weights).keys() == {f"{plain}.weight", f"{plain}.scales"}


def test_a_global_scale_is_converted_to_the_magnitude_of_the_weight() -> None:
    """The stored scale is a factor of the weight; the largest value of nvfp4 is 6 times 448."""
    weights = {
        f"{Q}.weight": PACKED,
        f"{Q}.weight.scale": mx.zeros((4, 4), mx.uint8),
        f"{Q}.weight.global_scale": mx.array([0.5]),
    }
    assert to_mlx_names(weights)[f"{Q}.global_scale"].tolist() == [0.5 * 6 * 448]
