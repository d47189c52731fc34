"""Tests of the sampler run with the sampling operation of the kernels, and with MLX's operations,
which a GPU uses."""

from collections.abc import Iterator

import pytest

from app.engine.sampling import sampler
from app.engine.sampling.logprobs import compute_logprobs_with_mlx
from models import kernels


@pytest.fixture(scope="module", params=["kernel", "MLX"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "MLX":
            patch.setattr(sampler, "can_fuse", lambda stages: False)
            patch.setattr(sampler, "compute_logprobs", compute_logprobs_with_mlx)
        elif kernels.ops() is None:
            pytest.skip(f"no kernels: {kernels.describe().why}")
        yield request.param
