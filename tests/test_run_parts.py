"""The parts of CI: a failed test is repeated alone, and nothing is skipped or repeated silently."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import run_parts
from tests.results import Results
from tests.run_parts import Interpreter, Part, PartResult

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

    def run(self, command: Sequence[str], seconds: float) -> int | None:
        self.now += 10
        self.commands.append(command)
        results, status = next(self._runs)
        files = [found[1] for word in command if (found := re.search("(?i)results=(.*)", word))]
        if results is not None:
            Path(files[0]).write_text(json.dumps(asdict(results)))
        return status


def failing(*tests: str, passed: int = 3) -> Results:
    return Results(passed=passed, failures={test: f"output of {test}" for test in tests})


PASSING = Results(passed=3)
VOID = Results(void={"t.py::a": "other programs used 50 %"})


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_parts, "FOLDER", tmp_path)


def run(part: Part, *runs: tuple[Results | None, int | None]) -> tuple[PartResult, Machine]:
    machine = Machine(*runs)
    return run_parts.run_part(part, 60, machine.run, machine.clock), machine


def test_a_part_without_failures_passes() -> None:
    result, machine = run(TESTS, (PASSING, 0))
    assert (result.outcome, result.num_tests, result.seconds) == ("passed", 3, 10)
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
    (run_parts.FOLDER / "results.json").write_text(json.dumps(asdict(PASSING)))
    assert run(TESTS, (None, 0))[0].outcome == "FAILED"


def test_a_command_without_tests_passes_or_fails_by_its_status() -> None:
    for status, outcome in ((0, "passed"), (2, "FAILED"), (None, "FAILED")):
        assert run(COMMAND, (None, status))[0].outcome == outcome


def test_after_a_failure_the_other_parts_run() -> None:
    machine = Machine((None, 2), (PASSING, 0))
    results = run_parts.run_parts([COMMAND, TESTS], 60, machine.run, machine.clock)
    assert [result.outcome for result in results] == ["FAILED", "passed"]


def test_a_part_without_time_is_listed_as_not_run() -> None:
    machine = Machine((None, 0))
    results = run_parts.run_parts([COMMAND, TESTS], 10, machine.run, machine.clock)
    assert [result.outcome for result in results] == ["passed", "NOT RUN"]


def test_a_command_that_takes_too_long_is_terminated() -> None:
    assert run_parts.run_command(["sleep", "60"], 0.1) is None


def test_the_report_ends_with_a_table_and_a_line_that_counts_all_tests() -> None:
    results = [
        PartResult("make check", seconds=61.0, cpu_seconds=99.0),
        PartResult("unit", passed=7, skipped=2, flaky={"a": ["first output", "alone: passed"]}),
        PartResult("slow", "FAILED", failed={"b": ["x", "y"]}, void={"c": "busy"}, notes=["why"]),
        PartResult("timing", figures={"d": "median 0.1 s\n"}),
    ]
    report = run_parts.format_report(results)
    assert "first output" in report
    assert "figures: d\n    median 0.1 s" in report
    table = report.partition("part  ")[2].splitlines()
    assert [line.split() for line in table[1:4]] == [
        ["make", "check", "passed", "0", "61", "99", "0", "0"],
        ["unit", "passed", "8", "0", "0", "1", "0"],
        ["slow", "FAILED", "1", "0", "0", "0", "1"],
    ]
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


def commands_by_name(parts: Sequence[Part]) -> Mapping[str, str]:
    return {part.name: " ".join(part.command) for part in parts}


def test_ci_runs_all_tiers_with_the_oldest_python_and_a_part_with_the_newest() -> None:
    parts = run_parts.list_ci_parts([OLDEST, *NEWER])
    commands = commands_by_name(parts)
    assert list(commands) == [
        *("make check", "make test", "make integration", "Python 3.13"),
        *("coding agents", "blocks of the manual", "timing"),
    ]
    arguments = "PYTHON=/opt/3.11/python3 VENV=.venv --jobs=2 --output-sync"
    assert commands["make check"] == f"make check {arguments}"
    assert f" VENV=.venv-3.13 SOURCES=1 t={run_parts.NEWEST} " in commands["Python 3.13"]
    repetitions = [part.num_repetitions for part in parts]
    assert repetitions == [None, 1, 1, 1, 2, 2, 2]
    assert [part.python for part in parts[2:4]] == [".venv/bin/python", ".venv-3.13/bin/python"]


def test_make_test_all_runs_all_tests_with_every_python() -> None:
    commands = commands_by_name(run_parts.list_nightly_parts([OLDEST, *NEWER]))
    for version in ("3.12", "3.13"):
        assert f" VENV=.venv-{version} t=tests " in commands[f"all of Python {version}"]


def test_one_python_is_enough() -> None:
    assert len(run_parts.list_ci_parts([OLDEST])) == 6
    assert run_parts.list_nightly_parts([OLDEST])


def test_the_part_for_the_newest_python_names_existing_tests() -> None:
    assert [path for path in run_parts.NEWEST.split() if not (ROOT / path).exists()] == []


def test_tests_that_make_check_runs_do_not_run_twice() -> None:
    ignored = [option.removeprefix("--ignore=") for option in run_parts.CHECKED.split()]
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ncheck-documents:")[2]
    assert f"pytest --quiet {' '.join(ignored)}\n" in recipe.partition("\n\n")[0] + "\n"
    for name in ("make test", "make integration"):
        assert run_parts.CHECKED in commands_by_name(run_parts.list_ci_parts([OLDEST]))[name]
