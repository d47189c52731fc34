"""The parts of CI: a failed test is repeated alone, and nothing is skipped or repeated silently."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import run_parts
from tests.results import Results
from tests.run_parts import Ended, Interpreter, Part, PartResult, Stage

ROOT = Path(__file__).resolve().parents[1]
TESTS = Part("unit", ["make", "test"], 1)
COMMAND = Part("check", ["make", "check"])


class Machine:
    """A clock, and commands that take ten seconds each. runs: what each run of pytest writes, and
    its exit status; None for a run that writes nothing."""

    def __init__(self, *runs: tuple[Results | None, int | None]) -> None:
        self.now = 100.0
        self.commands: list[Sequence[str]] = []
        self._runs = iter(runs)

    def clock(self) -> float:
        return self.now

    def run(self, command: Sequence[str], seconds: float, log: Path | None) -> Ended:
        self.now += 10
        self.commands.append(command)
        results, status = next(self._runs)
        files = [found[1] for word in command if (found := re.search("(?i)results=(.*)", word))]
        if results is not None:
            Path(files[0]).write_text(json.dumps(asdict(results)))
        return Ended(status, cpu_seconds=15)


def failing(*tests: str, passed: int = 3) -> Results:
    return Results(passed=passed, failures={test: f"output of {test}" for test in tests})


PASSING = Results(passed=3)
VOID = Results(void={"t.py::a": "other programs used 50 %"})


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_parts, "FOLDER", tmp_path)


def run(part: Part, *runs: tuple[Results | None, int | None]) -> tuple[PartResult, Machine]:
    machine = Machine(*runs)
    [result] = run_parts.run_stages([[[part]]], 60, machine.run, machine.clock)
    return result, machine


def test_a_part_without_failures_passes() -> None:
    result, machine = run(TESTS, (PASSING, 0))
    assert (result.outcome, result.num_tests) == ("passed", 3)
    assert (result.seconds, result.cpu_seconds) == (10, 15)
    assert len(machine.commands) == 1


def test_a_test_that_passes_alone_is_flaky_and_the_part_passes() -> None:
    result, machine = run(TESTS, (failing("t.py::a[1 2]"), 1), (Results(passed=1), 0))
    assert (result.outcome, result.failed) == ("passed", {})
    assert result.flaky == {"t.py::a[1 2]": ["output of t.py::a[1 2]", "alone: passed"]}
    assert machine.commands[1][-1] == "t.py::a[1 2]"


def test_a_test_that_fails_again_fails_the_part() -> None:
    result, _ = run(TESTS, (failing("a", "b"), 1), (failing("a"), 1), (Results(passed=1), 0))
    assert result.outcome == "FAILED"
    assert result.failed == {"a": ["output of a", "output of a"]}
    assert list(result.flaky) == ["b"]
    assert result.num_tests == 5


def test_a_repetition_that_is_killed_counts_as_a_failure() -> None:
    for status in (None, -9, 4):
        result, _ = run(TESTS, (failing("a"), 1), (None, status))
        assert (result.outcome, list(result.failed)) == ("FAILED", ["a"])


def test_a_test_that_compares_clocks_fails_three_times_in_a_row_or_is_flaky() -> None:
    timing = Part("timing", ["make", "timing"], 2)
    failed = (failing("a"), 1)
    assert run(timing, failed, failed, failed)[0].outcome == "FAILED"
    result, _ = run(timing, failed, failed, (Results(passed=1), 0))
    assert (result.outcome, list(result.flaky)) == ("passed", ["a"])


def test_a_void_repetition_is_listed_and_is_no_failure() -> None:
    result, _ = run(Part("timing", ["make"], 2), (failing("t.py::a"), 1), (VOID, 0))
    assert (result.outcome, result.flaky, result.failed) == ("passed", {}, {})
    assert list(result.void) == ["t.py::a"]


def test_many_failures_are_not_repeated() -> None:
    tests = [f"t.py::{number}" for number in range(run_parts.MAX_REPEATED + 1)]
    result, machine = run(TESTS, (failing(*tests), 1))
    assert (result.outcome, len(result.failed), len(machine.commands)) == ("FAILED", 21, 1)


@pytest.mark.parametrize(
    "outcome", [(None, 2), (None, None), (PASSING, 2), (PASSING, None)], ids=str
)
def test_a_run_that_breaks_fails_the_part_without_a_failed_test(
    outcome: tuple[Results | None, int | None],
) -> None:
    """make cannot install, a worker crashes, the time is over."""
    result, _ = run(TESTS, outcome)
    assert result.outcome == "FAILED"


def test_results_of_an_earlier_run_are_not_read() -> None:
    (run_parts.FOLDER / "unit.json").write_text(json.dumps(asdict(PASSING)))
    assert run(TESTS, (None, 0))[0].outcome == "FAILED"


def test_a_command_without_tests_passes_or_fails_by_its_status() -> None:
    for status, outcome in ((0, "passed"), (2, "FAILED"), (None, "FAILED")):
        assert run(COMMAND, (None, status))[0].outcome == outcome


def test_after_a_failure_the_other_parts_run() -> None:
    machine = Machine((None, 2), (PASSING, 0))
    results = run_parts.run_stages([[[COMMAND]], [[TESTS]]], 60, machine.run, machine.clock)
    assert [result.outcome for result in results] == ["FAILED", "passed"]


def test_a_part_without_time_is_listed_as_not_run() -> None:
    machine = Machine((None, 0))
    results = run_parts.run_stages([[[COMMAND, TESTS]]], 10, machine.run, machine.clock)
    assert [result.outcome for result in results] == ["passed", "NOT RUN"]


def test_a_command_that_takes_too_long_is_terminated() -> None:
    assert run_parts.run_command(["sleep", "60"], 0.1).status is None


def test_a_command_that_ignores_the_termination_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_parts, "GRACE_SECONDS", 0.1)
    # the shell is the process, and a shell that waits for a child would end after it
    script = "trap '' TERM; while :; do :; done"
    assert run_parts.run_command(["sh", "-c", script], 0.5).status is None


def test_the_cpu_time_of_a_command_includes_its_children() -> None:
    work = [sys.executable, "-c", "sum(range(5_000_000))"]
    ended = run_parts.run_command(["sh", "-c", '"$@"; exit 3', "sh", *work], 60)
    assert ended.status == 3
    assert 0.02 < ended.cpu_seconds < 60


def test_lanes_run_at_the_same_time_and_each_has_its_own_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each part waits for the other one to begin."""

    def meet(name: str, other: str) -> Part:
        wait = f"until [ -e {tmp_path}/{other} ]; do sleep 0.01; done"
        return Part(name, ["sh", "-c", f"touch {tmp_path}/{name}; {wait}; echo end of {name}"])

    after = Part("after", ["echo", "end of after"])
    stages = [[[meet("a", "b")], [meet("b", "a"), after]]]
    results = run_parts.run_stages(stages, 60)
    assert [(result.name, result.outcome) for result in results] == [
        *(("a", "passed"), ("b", "passed"), ("after", "passed"))
    ]
    printed = capfd.readouterr().out
    for part in (stages[0][1][0], after):
        assert f"=== {part.name}: {' '.join(part.command)}\nend of {part.name}\n" in printed


def test_tests_of_a_lane_are_repeated_when_all_lanes_have_ended(tmp_path: Path) -> None:
    commands: list[str] = []

    def run(command: Sequence[str], seconds: float, log: Path | None) -> Ended:
        commands.append(command[0])
        if command[0] == "first":
            file = command[-1].removeprefix("RESULTS=")
            Path(file).write_text(json.dumps(asdict(failing("t.py::a"))))
            return Ended(1)
        if command[0] == "python":
            assert log is None
            (tmp_path / "alone.json").write_text(json.dumps(asdict(PASSING)))
        return Ended(0)

    first = Part("first", ["first"], 1, "python")
    lanes = [[first, Part("second", ["second"])], [Part("beside", ["beside"])]]
    results = run_parts.run_stages([lanes], 60, run)
    assert sorted(commands[:3]) == ["beside", "first", "second"]
    assert commands[3:] == ["python"]
    assert list(results[0].flaky) == ["t.py::a"]


def test_the_report_ends_with_a_table_and_a_line_that_counts_all_tests() -> None:
    results = [
        PartResult("make check", seconds=61.0, cpu_seconds=99.0),
        PartResult("unit", passed=7, skipped=2, flaky={"a": ["first output", "alone: passed"]}),
        PartResult("slow", "FAILED", failed={"b": ["x", "y"]}, void={"c": "busy"}, notes=["why"]),
        PartResult("timing", figures={"d": "median 0.1 s\n"}),
    ]
    report = run_parts.format_report(results, 70)
    assert "first output" in report
    assert "figures: d\n    median 0.1 s" in report
    table = report.partition("part  ")[2].splitlines()
    assert [line.split() for line in table[1:4]] == [
        ["make", "check", "passed", "0", "61", "99", "0", "0"],
        ["unit", "passed", "8", "0", "0", "1", "0"],
        ["slow", "FAILED", "1", "0", "0", "0", "1"],
    ]
    assert table[5].split() == ["all", "9", "70", "99"]
    assert {"flaky: a", "failed: b", "void: c: busy", "slow: why"} <= set(table)
    assert table[-1] == "8 passed, 1 failed, 3 skipped"


def test_the_flaky_tests_of_the_last_runs_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "folder/flaky.json"
    for number in range(run_parts.MAX_RUNS + 1):
        run_parts.record_flaky([PartResult("unit", flaky={f"test {number}": ["output"]})], file)
    runs = json.loads(file.read_text("utf-8"))
    assert len(runs) == run_parts.MAX_RUNS
    assert runs[-1]["flaky"] == {f"test {run_parts.MAX_RUNS}": ["output"]}


OLDEST = Interpreter("3.11", "/opt/3.11/python3", ".venv")
NEWER = [Interpreter(v, f"/opt/{v}/python3", f".venv-{v}") for v in ("3.12", "3.13")]


def list_parts(stages: Sequence[Stage]) -> list[Part]:
    return [part for stage in stages for lane in stage for part in lane]


def commands_by_name(stages: Sequence[Stage]) -> Mapping[str, str]:
    return {part.name: " ".join(part.command) for part in list_parts(stages)}


def test_ci_runs_all_tiers_with_the_oldest_python_and_a_part_with_the_newest() -> None:
    stages = run_parts.list_ci_stages([OLDEST, *NEWER])
    commands = commands_by_name(stages)
    assert list(commands) == [
        *("installation", "make check", "make test", "make integration", "Python 3.13"),
        *("coding agents", "blocks of the manual", "timing"),
    ]
    arguments = "PYTHON=/opt/3.11/python3 VENV=.venv --jobs=2 --output-sync"
    assert commands["make check"] == f"make check {arguments}"
    assert f" VENV=.venv-3.13 SOURCES=1 t={run_parts.NEWEST} " in commands["Python 3.13"]
    parts = list_parts(stages)
    assert [part.num_repetitions for part in parts] == [None, None, 1, 1, 1, 2, 2, 2]
    assert [part.python for part in parts[3:5]] == [".venv/bin/python", ".venv-3.13/bin/python"]


def test_no_part_runs_beside_those_that_compare_clocks() -> None:
    *others, last = run_parts.list_ci_stages([OLDEST, *NEWER])
    assert [[part.name for part in lane] for lane in last] == [["timing"]]
    assert [len(lane) for stage in others for lane in stage] == [1, 1, 1, 1, 3]


def test_make_test_all_runs_all_tests_with_every_python() -> None:
    commands = commands_by_name(run_parts.list_nightly_stages([OLDEST, *NEWER]))
    for version in ("3.12", "3.13"):
        assert f" VENV=.venv-{version} t=tests " in commands[f"all of Python {version}"]


def test_one_python_is_enough() -> None:
    assert len(list_parts(run_parts.list_ci_stages([OLDEST]))) == 7
    assert run_parts.list_nightly_stages([OLDEST])


def test_the_part_for_the_newest_python_names_existing_tests() -> None:
    assert [path for path in run_parts.NEWEST.split() if not (ROOT / path).exists()] == []


def test_tests_that_make_check_runs_do_not_run_twice() -> None:
    ignored = [option.removeprefix("--ignore=") for option in run_parts.CHECKED.split()]
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ncheck-documents:")[2]
    assert f"pytest --quiet {' '.join(ignored)}\n" in recipe.partition("\n\n")[0] + "\n"
    for name in ("make test", "make integration"):
        assert run_parts.CHECKED in commands_by_name(run_parts.list_ci_stages([OLDEST]))[name]
