"""Detection of the compute backend."""

from dataclasses import replace

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


@pytest.mark.parametrize(("info", "isa"), [(ON, "avx2"), (OFF, None)])
def test_enabled_kernels_are_reported(
    monkeypatch: pytest.MonkeyPatch, info: KernelInfo, isa: str | None
) -> None:
    monkeypatch.setattr(kernels, "describe", lambda: info)
    assert detect_backend() == ComputeBackend(
        device="cpu", kernels=isa, blas=ACTIVE.blas, threads=ACTIVE.threads
    )


def test_wrong_results_of_tiles_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = replace(ON, why_no_tiles=f"{kernels.TILE_TEST_FAILED}: planted")
    monkeypatch.setattr(kernels, "describe", lambda: info)
    detect_backend()
    assert [record.message for record in caplog.records] == [
        "AMX tiles are disabled: the known-answer test failed: planted"
    ]


def test_a_gpu_reports_only_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert detect_backend() == ComputeBackend(device="gpu")


def test_the_measured_speed_is_plausible() -> None:
    assert 0 < measure_gigaflops() < 1e6
