"""Rotary embeddings against the published formulas."""

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import decoder
from models.base import ModelError
from models.rope import NoRope, make_rope, rope_settings
from tests.models import reference
from tests.models.kernel_switch import BOTH, use_kernels
from tests.models.test_llama import TINY

DIMS, THETA, POSITIONS = 8, 10000.0, 64
INVERSE = THETA ** (-np.arange(0, DIMS, 2) / DIMS)


def rotate(scaling: dict[str, Any] | None, offset: int = 0, dims: int = DIMS) -> Any:
    x = np.random.default_rng(0).standard_normal((2, 5, DIMS))
    rope = make_rope(dims=dims, theta=THETA, max_positions=POSITIONS, scaling=scaling)
    return x, np.array(rope(mx.array(x.astype(np.float32))[None], offset)[0])


def rotate_reference(x: Any, inverse: Any, offset: int = 0) -> Any:
    return reference.rotate(x, (offset + np.arange(x.shape[1]))[:, None] * inverse)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
@pytest.mark.parametrize("offset", [0, 37])
def test_plain_rotation_starts_at_the_offset(scaling: Any, offset: int) -> None:
    x, got = rotate(scaling, offset)
    np.testing.assert_allclose(got, rotate_reference(x, INVERSE, offset), atol=1e-5)


def test_linear_scaling_divides_positions() -> None:
    x, got = rotate({"type": "linear", "factor": 4.0}, 9)
    np.testing.assert_allclose(got, rotate_reference(x, INVERSE / 4, 9), atol=1e-5)


def test_dynamic_scaling_changes_nothing_within_the_configured_context() -> None:
    x, got = rotate({"rope_type": "dynamic", "factor": 2.0}, POSITIONS - 5)
    np.testing.assert_allclose(got, rotate_reference(x, INVERSE, POSITIONS - 5), atol=1e-5)


@pytest.mark.parametrize("enabled", BOTH)
def test_proportional_rope_keeps_the_high_frequencies_of_the_whole_head(enabled: bool) -> None:
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    inverse = np.where(np.arange(DIMS // 2) < DIMS // 4, INVERSE / 2, 0)
    with use_kernels(enabled=enabled):
        x, got = rotate(scaling, 37)
    np.testing.assert_allclose(got, rotate_reference(x, inverse, 37), atol=1e-5)


def test_any_architecture_can_have_proportional_rope() -> None:
    """The factor selects frequencies, and not dimensions of the head."""
    given = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": THETA}
    config = decoder.Config.from_dict({**TINY, "head_dim": DIMS, "rope_parameters": given})
    assert config.rope().dims == DIMS
    np.testing.assert_array_equal(np.array(config.rope().periods)[2:], [math.inf, math.inf])


@pytest.mark.parametrize("share", [0, 1.5, "half"])
def test_an_invalid_share_of_proportional_rope_is_refused(share: Any) -> None:
    with pytest.raises(ModelError, match="'proportional' is invalid"):
        rotate({"rope_type": "proportional", "partial_rotary_factor": share})


def test_llama3_scaling_stretches_long_waves_and_keeps_short_ones() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    wavelength = 2 * math.pi / INVERSE
    smooth = (128 / wavelength - 1.0) / (4.0 - 1.0)
    inverse = np.where(
        wavelength > 128,
        INVERSE / 8,
        np.where(wavelength < 32, INVERSE, (1 - smooth) * INVERSE / 8 + smooth * INVERSE),
    )
    assert len({*(inverse / INVERSE).round(3)}) == 3, "the case must cover all three ranges"
    x, got = rotate(scaling, 11)
    np.testing.assert_allclose(got, rotate_reference(x, inverse, 11), atol=1e-5)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_interpolation_and_extrapolation(truncate: bool) -> None:
    factor, original = 4.0, 1024
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "truncate": truncate,
    }

    def dimension(turns: float) -> float:
        return DIMS * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(DIMS // 2) - low) / (high - low), 0, 1)
    inverse = INVERSE / factor * ramp + INVERSE * (1 - ramp)
    magnitude = 0.1 * math.log(factor) + 1
    x, got = rotate(scaling, 7)
    np.testing.assert_allclose(got, magnitude * rotate_reference(x, inverse, 7), atol=1e-5)


@pytest.mark.parametrize(
    ("extra", "magnitude"),
    [
        ({"attention_factor": 1.5}, 1.5),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_takes_its_magnitude_from_the_config(extra: dict[str, Any], magnitude: float) -> None:
    rope = make_rope(
        dims=DIMS,
        theta=THETA,
        max_positions=POSITIONS,
        scaling={"rope_type": "yarn", "factor": 4.0, **extra},
    )
    assert rope.magnitude == pytest.approx(magnitude)


def test_a_magnitude_leaves_unrotated_dimensions_alone() -> None:
    x, got = rotate({"rope_type": "yarn", "factor": 4.0}, dims=4)
    np.testing.assert_allclose(got[..., 4:], x[..., 4:], atol=1e-6)
    assert not np.allclose(got[..., :4], x[..., :4])


def test_longrope_stretches_each_dimension_by_its_own_factor() -> None:
    stretches = [1.0, 2.0, 4.0, 7.5]
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": stretches,
        "original_max_position_embeddings": 16,
    }
    magnitude = math.sqrt(1 + math.log(POSITIONS / 16) / math.log(16))
    x, got = rotate(scaling, 11)
    np.testing.assert_allclose(
        got, magnitude * rotate_reference(x, INVERSE / stretches, 11), atol=1e-5
    )
    assert np.array_equal(rotate({**scaling, "rope_type": "su"}, 11)[1], got)


@pytest.mark.parametrize(
    ("extra", "magnitude"),
    [
        ({"factor": 4.0}, math.sqrt(1 + math.log(4) / math.log(16))),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.19}, 1.19),
    ],
)
def test_longrope_takes_its_magnitude_from_the_config(
    extra: dict[str, Any], magnitude: float
) -> None:
    scaling = {"rope_type": "longrope", "long_factor": [1.0] * 4, **extra}
    scaling["original_max_position_embeddings"] = 16
    x, got = rotate(scaling, 3)
    np.testing.assert_allclose(got, magnitude * rotate_reference(x, INVERSE, 3), atol=1e-5)


def test_multimodal_rope_gives_text_one_position() -> None:
    x, got = rotate({"type": "mrope", "mrope_section": [1, 1, 2]}, 9)
    np.testing.assert_allclose(got, rotate_reference(x, INVERSE, 9), atol=1e-5)


def test_traditional_rotation_pairs_adjacent_dimensions() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, DIMS))
    rope = make_rope(dims=DIMS, theta=THETA, max_positions=POSITIONS, traditional=True)
    got = np.array(rope(mx.array(x.astype(np.float32))[None], 9)[0])
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], -1)
    expected = np.stack(np.split(rotate_reference(halves, INVERSE, 9), 2, -1), -1).reshape(x.shape)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 4.0}])
def test_rerotated_keys_equal_keys_of_another_position(scaling: Any, traditional: bool) -> None:
    rope = make_rope(
        dims=4, theta=THETA, max_positions=POSITIONS, scaling=scaling, traditional=traditional
    )
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 5, DIMS)).astype(np.float32))
    np.testing.assert_allclose(
        np.array(rope.rerotate(rope(x, 30), -13)), np.array(rope(x, 17)), atol=1e-5
    )


def test_no_rope_changes_nothing() -> None:
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 5, DIMS)))
    assert NoRope()(x, 7) is x
    assert NoRope().rerotate(x, -3) is x


@pytest.mark.parametrize("dims", [0, 1, 7])
def test_an_odd_number_of_dimensions_is_refused(dims: int) -> None:
    with pytest.raises(
        ModelError, match=f"cannot rotate {dims} dimensions of a head: the number must be even"
    ):
        make_rope(dims=dims, theta=THETA, max_positions=POSITIONS)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "rope scaling 'spiral' is not supported"),
        ({"rope_type": "linear"}, "rope scaling 'linear' lacks 'factor'"),
        ({"rope_type": "dynamic", "alpha": 1000.0}, "'dynamic' with 'alpha' is not supported"),
        ({"rope_type": "linear", "factor": "4"}, "rope scaling 'linear' is invalid"),
        ({"rope_type": "linear", "factor": 0}, "rope scaling 'linear' is invalid"),
        ({"rope_type": "linear", "factor": math.inf}, "rope scaling 'linear' is invalid"),
        ({"rope_type": ["linear"]}, r"rope scaling \['linear'\] is not supported"),
    ],
)
def test_the_error_names_an_invalid_scaling(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rotate(scaling)


def settings(layer_type: str | None = None, **keys: Any) -> tuple[float, Any]:
    usual = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
    return rope_settings(SimpleNamespace(**{**usual, **keys}), layer_type)


def test_both_spellings_of_the_config_are_read() -> None:
    assert settings() == (10000.0, None)
    assert settings(rope_theta=5.0, rope_scaling={"factor": 2}) == (5.0, {"factor": 2})
    both = {"rope_theta": 7.0, "rope_type": "default"}
    assert settings(rope_parameters=both) == (7.0, both)
    # a model saved with the newer keys, whose context was extended manually with the older keys
    assert settings(rope_parameters=both, rope_scaling={"factor": 2}) == (7.0, {"factor": 2})


def test_layer_types_can_have_their_own_parameters() -> None:
    near, far = {"rope_type": "default"}, {"rope_type": "linear", "rope_theta": 1e6}
    nested = {"sliding_attention": near, "full_attention": far}
    assert settings("full_attention", rope_parameters=nested) == (1e6, far)
    assert settings("sliding_attention", rope_parameters=nested) == (10000.0, near)
    with pytest.raises(ModelError, match="rope_parameters lacks chunked_attention"):
        settings("chunked_attention", rope_parameters=nested)
    with pytest.raises(ModelError, match="rope_parameters lacks a setting for all layers"):
        settings(rope_parameters=nested)


def test_both_spellings_of_partial_rotation_are_read() -> None:
    def dims(**keys: Any) -> int:
        return decoder.Config.from_dict({**TINY, **keys}).rope().dims

    assert dims() == 16
    assert dims(partial_rotary_factor=0.5) == 8
    assert dims(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == 4
    with pytest.raises(ModelError, match=r"partial_rotary_factor is '0\.5'"):
        dims(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": "0.5"})
