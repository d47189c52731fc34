"""What the engine says it computes with."""

import mlx.core as mx
import pytest

from app.core.jobs import Backend
from app.engine import computing
from app.engine.computing import gigaflops, in_use
from models import kernels
from models.backend import IN_USE
from models.kernels import Described

ON = Described(built=True, on=True, isa="avx2", threads=2, why=None)
OFF = Described(built=True, on=False, isa="avx2", threads=2, why="planted")


@pytest.mark.parametrize(("described", "told"), [(ON, "avx2"), (OFF, None)])
def test_kernels_are_told_where_they_do_the_work(
    monkeypatch: pytest.MonkeyPatch, described: Described, told: str | None
) -> None:
    monkeypatch.setattr(kernels, "describe", lambda: described)
    assert in_use() == Backend(device="cpu", kernels=told, blas=IN_USE.blas, threads=IN_USE.threads)


def test_of_a_gpu_nothing_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert in_use() == Backend(device="gpu")


def test_a_product_takes_time() -> None:
    assert 0 < gigaflops() < 1e6
