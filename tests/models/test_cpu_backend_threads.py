"""The number of threads, from CPU topology, cgroups and MLXRUNNER_THREADS."""

import os
from pathlib import Path

import pytest

from models.cpu_backend import MAX_THREADS, ThreadsError, get_num_threads


class Machine:
    """Fake files of /sys and /proc."""

    def __init__(self, folder: Path) -> None:
        self.topology, self.cgroups = folder / "cpu", folder / "cgroup"
        self.own = folder / "own"

    def core(self, *siblings: int) -> None:
        for cpu in siblings:
            listed = self.topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
            write(listed, ",".join(map(str, siblings)))

    def threads(self, *allowed: int, variable: str = "") -> int:
        return get_num_threads(
            {"MLXRUNNER_THREADS": variable},
            allowed_cpus=allowed,
            topology=self.topology,
            proc_cgroup=self.own,
            cgroup_root=self.cgroups,
        )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_each_allowed_core_counts_once(machine: Machine) -> None:
    machine.core(0, 4)
    machine.core(1, 5)
    machine.core(2, 6)
    assert machine.threads(0, 1, 4, 5) == 2
    assert machine.threads(0, 1, 2) == 3


def test_cpus_without_topology_count_singly(machine: Machine) -> None:
    assert machine.threads(0, 1, 7) == 3


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("400000 100000", 4), ("350000 100000", 3), ("50000 100000", 1), ("x", 8)],
)
def test_a_cgroup_quota_is_rounded_to_whole_cpus(
    machine: Machine, quota: str, threads: int
) -> None:
    write(machine.cgroups / "cpu.max", quota)
    assert machine.threads(*range(8)) == threads


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("250000", 2)])
def test_the_quota_of_cgroups_v1_is_read_from_two_files(
    machine: Machine, folder: str, quota: str, threads: int
) -> None:
    write(machine.cgroups / folder / "cpu.cfs_quota_us", quota)
    write(machine.cgroups / folder / "cpu.cfs_period_us", "100000")
    assert machine.threads(*range(8)) == threads


@pytest.mark.parametrize("limited", ["pods", "pods/one"])
def test_the_quotas_of_all_parent_cgroups_count(machine: Machine, limited: str) -> None:
    write(machine.own, "3:memory:/elsewhere\n0::/pods/one")
    write(machine.cgroups / limited / "cpu.max", "200000 100000")
    write(machine.cgroups / "elsewhere" / "cpu.max", "100000 100000")
    assert machine.threads(*range(8)) == 2


def test_a_group_of_cgroups_v1_is_found_by_its_controllers(machine: Machine) -> None:
    write(machine.own, "4:cpu,cpuacct:/docker/one")
    write(machine.cgroups / "cpu,cpuacct" / "docker" / "one" / "cpu.cfs_quota_us", "300000")
    write(machine.cgroups / "cpu,cpuacct" / "docker" / "one" / "cpu.cfs_period_us", "100000")
    assert machine.threads(*range(8)) == 3


def test_a_cgroup_path_outside_the_root_is_ignored(machine: Machine) -> None:
    """A process in a namespace that was created inside its cgroup reads `/../..`."""
    write(machine.own, "0::/../..")
    assert machine.threads(0, 1) == 2


def test_the_variable_overrides_cores_and_quota(machine: Machine) -> None:
    write(machine.cgroups / "cpu.max", "100000 100000")
    assert machine.threads(0, variable="6") == 6
    assert machine.threads(0, variable=" ") == 1


@pytest.mark.parametrize("variable", ["0", "-1", "two", "1.5", "²"])
def test_an_invalid_number_of_threads_is_refused(machine: Machine, variable: str) -> None:
    with pytest.raises(ThreadsError, match=r"MLXRUNNER_THREADS: .* is not a number of threads"):
        machine.threads(0, variable=variable)


def test_a_requested_number_above_the_maximum_is_refused(machine: Machine) -> None:
    assert machine.threads(0, variable=str(MAX_THREADS)) == MAX_THREADS
    with pytest.raises(
        ThreadsError, match=r"MLXRUNNER_THREADS: 257 threads exceed the maximum of 256$"
    ):
        machine.threads(0, variable=str(MAX_THREADS + 1))


def test_the_detected_number_of_threads_is_capped_at_the_maximum(machine: Machine) -> None:
    assert machine.threads(*range(MAX_THREADS + 100)) == MAX_THREADS


def test_the_number_of_threads_is_at_most_the_number_of_cpus() -> None:
    assert 1 <= get_num_threads({}) <= (os.cpu_count() or 1)
