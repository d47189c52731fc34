"""What the engine says it computes with."""

import mlx.core as mx
import pytest

from app.core.jobs import ComputeBackend
from app.engine import device
from app.engine.device import detect_backend, measure_gigaflops
from models import kernels
from models.cpu_backend import ACTIVE
from models.kernels import KernelInfo

ON = KernelInfo(built=True, enabled=True, isa="avx2", threads=2, why=None)
OFF = KernelInfo(built=True, enabled=False, isa="avx2", threads=2, why="planted")


@pytest.mark.parametrize(("described", "told"), [(ON, "avx2"), (OFF, None)])
def test_kernels_are_told_where_they_do_the_work(
    monkeypatch: pytest.MonkeyPatch, described: KernelInfo, told: str | None
) -> None:
    monkeypatch.setattr(kernels, "describe", lambda: described)
    assert detect_backend() == ComputeBackend(
        device="cpu", kernels=told, blas=ACTIVE.blas, threads=ACTIVE.threads
    )


def test_of_a_gpu_nothing_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert detect_backend() == ComputeBackend(device="gpu")


def test_a_product_takes_time() -> None:
    assert 0 < measure_gigaflops() < 1e6
