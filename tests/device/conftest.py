"""The device of the tests marked `gpu`."""

import os

import mlx.core as mx
import pytest

# `cpu` lets the tests of a GPU run on a CPU, to test the tests.
DEVICE_VARIABLE = "TEST_DEVICE"


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if (
        request.node.get_closest_marker("gpu")
        and on_cpu
        and os.environ.get(DEVICE_VARIABLE) != "cpu"
    ):
        pytest.skip("MLX has no GPU")
