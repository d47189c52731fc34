"""How many threads, by what a machine and its containers say."""

import os
from pathlib import Path

import pytest

from models.cpu_backend import MAX_THREADS, ThreadsError, get_num_threads


class Machine:
    """Files as the kernel would write them."""

    def __init__(self, folder: Path) -> None:
        self.topology, self.cgroups = folder / "cpu", folder / "cgroup"
        self.own = folder / "own"

    def core(self, *siblings: int) -> None:
        for cpu in siblings:
            listed = self.topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
            write(listed, ",".join(map(str, siblings)))

    def threads(self, *allowed: int, said: str = "") -> int:
        return get_num_threads(
            {"MLXRUNNER_THREADS": said},
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


def test_each_core_that_is_allowed_counts_once(machine: Machine) -> None:
    machine.core(0, 4)
    machine.core(1, 5)
    machine.core(2, 6)
    assert machine.threads(0, 1, 4, 5) == 2
    assert machine.threads(0, 1, 2) == 3


def test_cpus_of_unknown_cores_count_each(machine: Machine) -> None:
    assert machine.threads(0, 1, 7) == 3


@pytest.mark.parametrize(
    ("told", "threads"),
    [("max 100000", 8), ("400000 100000", 4), ("350000 100000", 3), ("50000 100000", 1), ("x", 8)],
)
def test_a_cgroup_gives_whole_cpus_of_its_time(machine: Machine, told: str, threads: int) -> None:
    write(machine.cgroups / "cpu.max", told)
    assert machine.threads(*range(8)) == threads


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("250000", 2)])
def test_the_first_cgroups_say_it_in_two_files(
    machine: Machine, folder: str, quota: str, threads: int
) -> None:
    write(machine.cgroups / folder / "cpu.cfs_quota_us", quota)
    write(machine.cgroups / folder / "cpu.cfs_period_us", "100000")
    assert machine.threads(*range(8)) == threads


@pytest.mark.parametrize("limited", ["pods", "pods/one"])
def test_every_group_around_the_process_counts(machine: Machine, limited: str) -> None:
    write(machine.own, "3:memory:/elsewhere\n0::/pods/one")
    write(machine.cgroups / limited / "cpu.max", "200000 100000")
    write(machine.cgroups / "elsewhere" / "cpu.max", "100000 100000")
    assert machine.threads(*range(8)) == 2


def test_a_group_of_the_first_cgroups_is_found_under_its_kinds(machine: Machine) -> None:
    write(machine.own, "4:cpu,cpuacct:/docker/one")
    write(machine.cgroups / "cpu,cpuacct" / "docker" / "one" / "cpu.cfs_quota_us", "300000")
    write(machine.cgroups / "cpu,cpuacct" / "docker" / "one" / "cpu.cfs_period_us", "100000")
    assert machine.threads(*range(8)) == 3


def test_a_path_that_leads_out_of_the_groups_ends(machine: Machine) -> None:
    """A process in a namespace that was made within its group sees `/../..`."""
    write(machine.own, "0::/../..")
    assert machine.threads(0, 1) == 2


def test_what_a_person_says_counts_beyond_the_cores(machine: Machine) -> None:
    write(machine.cgroups / "cpu.max", "100000 100000")
    assert machine.threads(0, said="6") == 6
    assert machine.threads(0, said=" ") == 1


@pytest.mark.parametrize("said", ["0", "-1", "two", "1.5", "²"])
def test_what_is_no_number_of_threads_is_refused(machine: Machine, said: str) -> None:
    with pytest.raises(ThreadsError, match=r"MLXRUNNER_THREADS: .* is not a number of threads"):
        machine.threads(0, said=said)


def test_more_threads_than_can_share_the_work_are_refused_not_cut(machine: Machine) -> None:
    assert machine.threads(0, said=str(MAX_THREADS)) == MAX_THREADS
    with pytest.raises(ThreadsError, match=r"MLXRUNNER_THREADS: 257 threads are too many.* 256$"):
        machine.threads(0, said=str(MAX_THREADS + 1))


def test_of_more_cores_than_can_share_the_work_as_many_are_used_as_can(machine: Machine) -> None:
    assert machine.threads(*range(MAX_THREADS + 100)) == MAX_THREADS


def test_this_machine_has_no_more_than_it_has() -> None:
    assert 1 <= get_num_threads({}) <= (os.cpu_count() or 1)
