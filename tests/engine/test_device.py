"""The memory budget: what the device, the machine and the container have available."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.engine import device
from app.engine.device import device_budget, read_device_memory
from app.engine.memory_policy import DeviceMemory

MIB = 1 << 20
HUGE = 1 << 62


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 10,000 MiB, all free, without containers. Returns the folder of its files."""
    monkeypatch.setattr(device, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroup")
    sizes = {"SC_PHYS_PAGES": 10_000, "SC_PAGE_SIZE": MIB}
    monkeypatch.setattr(device.os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def write_cgroup(folder: Path, limit: int | str, taken: int, files: int = 0) -> None:
    """Write the files of a cgroup v2; sizes in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    value = limit if isinstance(limit, str) else limit * MIB
    (folder / "memory.max").write_text(f"{value}\n")
    (folder / "memory.current").write_text(f"{taken * MIB}\n")
    half = files * MIB // 2
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {half}\nactive_file {half}\n")


def test_the_budget_leaves_memory_for_other_processes(machine: Path) -> None:
    assert device_budget() == 7000 * MIB


def test_memory_of_other_processes_is_not_available(machine: Path) -> None:
    (machine / "meminfo").write_text(
        f"MemTotal: {10_000 * 1024} kB\nMemFree: 100 kB\nMemAvailable: {2000 * 1024} kB\n"
    )
    assert device_budget() == 1800 * MIB


def test_our_own_memory_counts_as_available(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").write_text(f"MemAvailable: {2000 * 1024} kB\n")
    monkeypatch.setattr(mx, "get_active_memory", lambda: 700 * MIB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 300 * MIB)
    assert device_budget() == 2700 * MIB


def test_memory_of_our_other_processes_counts_up_to_the_usual_budget(machine: Path) -> None:
    assert device_budget(3000 * MIB) == 7000 * MIB, "all memory is free already"
    (machine / "meminfo").write_text(f"MemAvailable: {2000 * 1024} kB\n")
    assert device_budget(3000 * MIB) == 4500 * MIB


def test_the_metal_budget_does_not_depend_on_memory_in_use(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    assert device_budget() == device_budget(500) == 900


def test_the_container_limit_bounds_the_budget(machine: Path) -> None:
    write_cgroup(machine / "cgroup", 1000, taken=0)
    assert device_budget() == 700 * MIB
    write_cgroup(machine / "cgroup", "max", taken=0)
    assert device_budget() == 7000 * MIB


def test_memory_of_a_container_counts_without_its_page_cache(machine: Path) -> None:
    """Otherwise the cached files of a model would prevent its next start."""
    write_cgroup(machine / "cgroup", 1000, taken=900, files=0)
    assert device_budget() == 90 * MIB
    write_cgroup(machine / "cgroup", 1000, taken=900, files=400)
    assert device_budget() == 450 * MIB
    write_cgroup(machine / "cgroup", 1000, taken=1100, files=0)
    assert device_budget() == 0


def test_enclosing_cgroups_count(machine: Path) -> None:
    (machine / "own").write_text("0::/system.slice/runner.service\n")
    outer = machine / "cgroup" / "system.slice"
    write_cgroup(outer / "runner.service", 4000, taken=0)
    assert device_budget() == 2800 * MIB
    write_cgroup(outer, 3000, taken=2000)
    assert device_budget() == 900 * MIB


@pytest.mark.parametrize("path", ["", "docker/0123"])
def test_cgroups_v1_are_read(machine: Path, path: str) -> None:
    (machine / "own").write_text("5:cpu,memory:/docker/0123\n3:pids:/docker/0123\n1:name=x:/\n")
    folder = machine / "cgroup" / "memory" / path
    folder.mkdir(parents=True)
    for name, value in {"limit": 1000, "usage": 800}.items():
        (folder / f"memory.{name}_in_bytes").write_text(f"{value * MIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {300 * MIB}\ninactive_file 7\n")
    assert device_budget() == 450 * MIB
    (folder / "memory.limit_in_bytes").write_text(f"{HUGE}\n")  # how v1 writes "none"
    assert device_budget() == 7000 * MIB


@pytest.mark.parametrize(
    ("device_info", "budget"),
    [
        ({"total_memory": 1000 * MIB, "free_memory": 800 * MIB}, 720 * MIB),
        ({"total_memory": 1000 * MIB}, 900 * MIB),
        ({"memory_size": 1000 * MIB}, 900 * MIB),
        ({}, 7000 * MIB),
    ],
)
def test_the_budget_of_a_gpu_is_its_free_memory(
    machine: Path, monkeypatch: pytest.MonkeyPatch, device_info: dict[str, Any], budget: int
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: device_info)
    assert device_budget() == budget


GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("installed", "recommended", "budget"),
    [(8, 5.5, 4.0), (16, 11.5, 10.35), (64, 60, 48), (512, 464, 384)],
)
def test_metal_leaves_a_reserve_to_other_programs(
    monkeypatch: pytest.MonkeyPatch, installed: int, recommended: float, budget: float
) -> None:
    """0.9 of the recommended working set, but never the last quarter of the memory, and never the
    last 4 GiB."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    info = {
        "max_recommended_working_set_size": int(recommended * GIB),
        "memory_size": installed * GIB,
        "resource_limit": 499_000,
    }
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert device_budget() == int(budget * GIB)
    assert read_device_memory().max_buffers == 499_000


def test_the_memory_of_a_cpu_is_shared_and_that_of_a_gpu_is_its_own(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_device_memory() == DeviceMemory(physical=10_000 * MIB)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert read_device_memory() == DeviceMemory()


def test_this_machine_has_a_budget() -> None:
    assert device_budget() > 0
