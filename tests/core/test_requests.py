"""Layering of sampling settings."""

import pytest

from app.core.requests import Sampling


def test_later_layers_override_earlier_ones_and_our_defaults() -> None:
    assert Sampling.layered() == Sampling()
    assert Sampling.layered({"temperature": 0.5, "top_k": 9}, {"top_k": 3}) == Sampling(
        temperature=0.5, top_k=3
    )


def test_a_field_that_does_not_exist_is_our_mistake() -> None:
    with pytest.raises(TypeError):
        Sampling.layered({"temprature": 0.5})
