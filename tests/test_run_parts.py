"""`make test-all`: each part is timed, and none is skipped silently."""

from collections.abc import Sequence

import pytest

from tests import run_parts
from tests.conftest import choose_cases
from tests.run_parts import Part, PartResult

PARTS = [Part("one", ["a"]), Part("two", ["b"]), Part("three", ["c"])]


class Machine:
    """A clock, and runs that take a number of seconds and end with a status."""

    def __init__(self, *runs: tuple[float, int]) -> None:
        self.now = 100.0
        self.arguments: list[Sequence[str]] = []
        self._runs = iter(runs)

    def clock(self) -> float:
        return self.now

    def run(self, arguments: Sequence[str], timeout: float) -> int | None:
        self.arguments.append(arguments)
        seconds, status = next(self._runs)
        self.now += min(seconds, timeout)
        return None if seconds > timeout else status


def run(machine: Machine, seconds: float) -> list[PartResult]:
    return run_parts.run_parts(PARTS, seconds, machine.run, machine.clock)


def test_each_part_runs_and_is_timed(capsys: pytest.CaptureFixture[str]):
    machine = Machine((60, 0), (120, 1), (30, 5))
    results = run(machine, 600)
    assert results == [
        PartResult("one", "passed", 60),
        PartResult("two", "FAILED", 120),
        PartResult("three", "passed", 30),  # no test of this part is selected
    ]
    assert machine.arguments == [["a"], ["b"], ["c"]]
    assert "FAILED         2.0 minutes  two" in capsys.readouterr().out


def test_parts_that_do_not_fit_are_listed():
    results = run(Machine((60, 0), (120, 0)), 100)
    assert results == [
        PartResult("one", "passed", 60),
        PartResult("two", "DID NOT FIT", 40),
        PartResult("three", "NOT RUN", 0),
    ]


def test_a_run_that_takes_too_long_is_terminated():
    assert run_parts.run_pytest(["--version"], 60) == 0
    assert run_parts.run_pytest(["--collect-only", "tests/core"], 0.1) is None


def test_every_value_of_every_parameter_is_in_a_chosen_case():
    cases = [{"a": a, "b": b} for a in range(5) for b in range(7)]
    chosen = [cases[place] for place in choose_cases(cases)]
    assert {case["a"] for case in chosen} == set(range(5))
    assert {case["b"] for case in chosen} == set(range(7))
    assert len(chosen) < len(cases) / 2


def test_of_many_values_and_of_a_single_parameter_a_quarter_is_chosen():
    assert len(choose_cases([{"a": a} for a in range(40)])) == 10
    # two parameters that are set together
    assert len(choose_cases([{"a": a, "b": a} for a in range(40)])) == 10
    many = [{"a": a, "b": b} for a in range(40) for b in range(2)]
    assert 10 <= len(choose_cases(many)) <= 20
    assert len(choose_cases([{"a": 0}])) == 1
