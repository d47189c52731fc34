"""What arrays are computed with in this process.

Knows: the device, what was settled for the CPU. Must not know: models, requests.
"""

import time

import mlx.core as mx

from app.core.jobs import Backend
from models import backend, kernels

# rows and columns of a product that takes a good BLAS a few milliseconds, and a bad one not long
_SIDE = 512


def in_use() -> Backend:
    if mx.default_device().type == mx.DeviceType.gpu:
        return Backend(device="gpu")
    ours = kernels.describe()
    return Backend(
        device="cpu",
        kernels=ours.isa if ours.on else None,
        blas=backend.IN_USE.blas,
        threads=backend.IN_USE.threads,
    )


def gigaflops() -> float:
    """What a product of two float32 matrices reaches, the best of three. Like all that makes arrays
    to be called on one thread."""
    left, right = mx.ones((_SIDE, _SIDE)), mx.ones((_SIDE, _SIDE))
    mx.eval(left, right)
    taken: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(left @ right)
        taken.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(taken) / 1e9
