"""Layering of sampling settings."""

import pytest

from app.core.sampling_params import SamplingParams


def test_later_layers_override_earlier_ones_and_the_defaults() -> None:
    assert SamplingParams.merge() == SamplingParams()
    assert SamplingParams.merge({"temperature": 0.5, "top_k": 9}, {"top_k": 3}) == SamplingParams(
        temperature=0.5, top_k=3
    )


def test_an_unknown_field_raises_a_type_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams.merge({"temprature": 0.5})
