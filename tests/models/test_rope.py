"""Rotary embeddings against the published formulas."""

import math
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from models.base import ModelError
from models.rope import make_rope, rope_settings
from tests.models import reference

DIMS, THETA, POSITIONS = 8, 10000.0, 64
INVERSE = THETA ** (-np.arange(0, DIMS, 2) / DIMS)


def rotated(scaling: dict[str, Any] | None, offset: int = 0, dims: int = DIMS) -> Any:
    x = np.random.default_rng(0).standard_normal((2, 5, DIMS))
    rope = make_rope(dims=dims, theta=THETA, max_positions=POSITIONS, scaling=scaling)
    return x, np.array(rope(mx.array(x.astype(np.float32))[None], offset)[0])


def expected(x: Any, inverse: Any, offset: int = 0) -> Any:
    return reference.rotate(x, (offset + np.arange(x.shape[1]))[:, None] * inverse)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
@pytest.mark.parametrize("offset", [0, 37])
def test_plain_rotation_starts_at_the_offset(scaling: Any, offset: int) -> None:
    x, got = rotated(scaling, offset)
    np.testing.assert_allclose(got, expected(x, INVERSE, offset), atol=1e-5)


def test_linear_scaling_divides_positions() -> None:
    x, got = rotated({"type": "linear", "factor": 4.0}, 9)
    np.testing.assert_allclose(got, expected(x, INVERSE / 4, 9), atol=1e-5)


def test_dynamic_scaling_changes_nothing_within_the_configured_context() -> None:
    x, got = rotated({"rope_type": "dynamic", "factor": 2.0}, POSITIONS - 5)
    np.testing.assert_allclose(got, expected(x, INVERSE, POSITIONS - 5), atol=1e-5)


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
    wanted = np.where(
        wavelength > 128,
        INVERSE / 8,
        np.where(wavelength < 32, INVERSE, (1 - smooth) * INVERSE / 8 + smooth * INVERSE),
    )
    assert len({*(wanted / INVERSE).round(3)}) == 3, "the case must cover all three ranges"
    x, got = rotated(scaling, 11)
    np.testing.assert_allclose(got, expected(x, wanted, 11), atol=1e-5)


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
    wanted = INVERSE / factor * ramp + INVERSE * (1 - ramp)
    magnitude = 0.1 * math.log(factor) + 1
    x, got = rotated(scaling, 7)
    np.testing.assert_allclose(got, magnitude * expected(x, wanted, 7), atol=1e-5)


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
    x, got = rotated({"rope_type": "yarn", "factor": 4.0}, dims=4)
    np.testing.assert_allclose(got[..., 4:], x[..., 4:], atol=1e-6)
    assert not np.allclose(got[..., :4], x[..., :4])


@pytest.mark.parametrize(
    ("scaling", "complaint"),
    [
        ({"rope_type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"rope_type": "linear"}, "rope scaling 'linear' lacks 'factor'"),
    ],
)
def test_an_unusable_scaling_is_named(scaling: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        rotated(scaling)


def test_both_spellings_of_the_config_are_read() -> None:
    class Old:
        rope_theta, rope_scaling, rope_parameters = 5.0, {"factor": 2}, None

    class New:
        rope_theta, rope_scaling = 10000.0, None
        rope_parameters: ClassVar[Any] = {"rope_theta": 7.0, "rope_type": "default"}

    assert rope_settings(Old) == (5.0, {"factor": 2})
    assert rope_settings(New) == (7.0, New.rope_parameters)
