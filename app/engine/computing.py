"""What arrays are computed with in this process.

Knows: the device, what was settled for the CPU. Must not know: models, requests.
"""

import time

import mlx.core as mx

from app.core.jobs import ComputeBackend
from models import backend, kernels

# rows and columns of a product that takes a good BLAS a few milliseconds, and a bad one not long
_MATRIX_SIZE = 512


def detect_backend() -> ComputeBackend:
    if mx.default_device().type == mx.DeviceType.gpu:
        return ComputeBackend(device="gpu")
    ours = kernels.describe()
    return ComputeBackend(
        device="cpu",
        kernels=ours.isa if ours.enabled else None,
        blas=backend.ACTIVE.blas,
        threads=backend.ACTIVE.threads,
    )


def measure_gigaflops() -> float:
    """What a product of two float32 matrices reaches, the best of three. Like all that makes arrays
    to be called on one thread."""
    left, right = mx.ones((_MATRIX_SIZE, _MATRIX_SIZE)), mx.ones((_MATRIX_SIZE, _MATRIX_SIZE))
    mx.eval(left, right)
    taken: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(left @ right)
        taken.append(time.perf_counter() - began)
    return 2 * _MATRIX_SIZE**3 / min(taken) / 1e9
