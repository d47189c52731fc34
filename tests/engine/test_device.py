"""The budget is what the device, the machine and the container have, and leave free."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.engine import device
from app.engine.device import device_budget

MIB = 1 << 20
HUGE = 1 << 62


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 10,000 MiB, all of it free, and no containers; what it tells lies here."""
    monkeypatch.setattr(device, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroup")
    sizes = {"SC_PHYS_PAGES": 10_000, "SC_PAGE_SIZE": MIB}
    monkeypatch.setattr(device.os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def group(folder: Path, limit: int | str, taken: int, files: int = 0) -> None:
    """cgroup v2; in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    told = limit if isinstance(limit, str) else limit * MIB
    (folder / "memory.max").write_text(f"{told}\n")
    (folder / "memory.current").write_text(f"{taken * MIB}\n")
    half = files * MIB // 2
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {half}\nactive_file {half}\n")


def test_a_machine_has_other_things_to_do(machine: Path) -> None:
    assert device_budget() == 7000 * MIB


def test_what_others_hold_is_not_ours(machine: Path) -> None:
    (machine / "meminfo").write_text(
        f"MemTotal: {10_000 * 1024} kB\nMemFree: 100 kB\nMemAvailable: {2000 * 1024} kB\n"
    )
    assert device_budget() == 1800 * MIB


def test_what_we_hold_ourselves_is_ours(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").write_text(f"MemAvailable: {2000 * 1024} kB\n")
    monkeypatch.setattr(mx, "get_active_memory", lambda: 700 * MIB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 300 * MIB)
    assert device_budget() == 2700 * MIB


def test_what_other_processes_of_ours_hold_is_ours_and_makes_nothing_larger(machine: Path) -> None:
    assert device_budget(3000 * MIB) == 7000 * MIB, "of a machine that is free it is no more"
    (machine / "meminfo").write_text(f"MemAvailable: {2000 * 1024} kB\n")
    assert device_budget(3000 * MIB) == 4500 * MIB


def test_metal_recommends_one_and_the_same_whoever_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    assert device_budget() == device_budget(500) == 900


def test_a_container_is_held_to_its_limit(machine: Path) -> None:
    group(machine / "cgroup", 1000, taken=0)
    assert device_budget() == 700 * MIB
    group(machine / "cgroup", "max", taken=0)
    assert device_budget() == 7000 * MIB


def test_what_a_container_holds_counts_but_for_files_that_it_only_keeps(machine: Path) -> None:
    """A model's own files, read once, would otherwise stand in the way of its next start."""
    group(machine / "cgroup", 1000, taken=900, files=0)
    assert device_budget() == 90 * MIB
    group(machine / "cgroup", 1000, taken=900, files=400)
    assert device_budget() == 450 * MIB
    group(machine / "cgroup", 1000, taken=1100, files=0)
    assert device_budget() == 0


def test_groups_around_ours_count_too(machine: Path) -> None:
    (machine / "own").write_text("0::/system.slice/runner.service\n")
    outer = machine / "cgroup" / "system.slice"
    group(outer / "runner.service", 4000, taken=0)
    assert device_budget() == 2800 * MIB
    group(outer, 3000, taken=2000)
    assert device_budget() == 900 * MIB


@pytest.mark.parametrize("path", ["", "docker/0123"])
def test_the_older_groups_are_read_too(machine: Path, path: str) -> None:
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
    ("told", "budget"),
    [
        ({"total_memory": 1000 * MIB, "free_memory": 800 * MIB}, 720 * MIB),
        ({"total_memory": 1000 * MIB}, 900 * MIB),
        ({"memory_size": 1000 * MIB}, 900 * MIB),
        ({}, 7000 * MIB),
    ],
)
def test_a_gpu_is_held_to_what_it_has_free(
    machine: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], budget: int
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: told)
    assert device_budget() == budget


def test_metal_says_itself_what_it_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    told = {"max_recommended_working_set_size": 1000 * MIB, "memory_size": 4000 * MIB}
    monkeypatch.setattr(mx, "device_info", lambda: told)
    assert device_budget() == 900 * MIB


def test_this_machine_has_a_budget() -> None:
    assert device_budget() > 0
