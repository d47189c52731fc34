"""The list of integration tests follows from what was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import durations
from tests.durations import Cost, choose_integration, format_list, read_list

SUITE = """
import subprocess
import pytest

@pytest.fixture(scope="module")
def server():
    subprocess.run(["true"], check=True)

@pytest.fixture(scope="module")
def work():
    sum(range(20_000_000))

def test_cheap(): pass
@pytest.mark.parametrize("number", range(3))
def test_starts(number): subprocess.run(["true"], check=True)
def test_uses_a_process_of_a_fixture(server): pass
def test_uses_it_too(server): pass
def test_uses_an_expensive_fixture(work): pass
"""


def test_processes_and_expensive_fixtures_count_for_each_test_that_uses_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    code = (
        f"import sys; sys.path.insert(0, {str(durations.ROOT)!r})\n"
        "import pytest; from pathlib import Path; from tests.plugins import CostPlugin\n"
        f"pytest.main(['-q', {str(tmp_path)!r}], [CostPlugin(Path('c.jsonl'))])"
    )
    command = [sys.executable, "-c", code]
    # importing the plugins of other packages would take most of the time
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True)
    measured = durations.compute_costs(durations.read_measurement([tmp_path / "c.jsonl"]))
    costs = {function.rpartition("::")[2]: cost for function, cost in measured.items()}
    assert {name for name, cost in costs.items() if cost.process} == {
        *("test_starts", "test_uses_a_process_of_a_fixture", "test_uses_it_too"),
    }
    assert costs["test_uses_an_expensive_fixture"].cpu > 10 * costs["test_cheap"].cpu


def test_the_cases_of_a_function_count_together(tmp_path: Path) -> None:
    lines = [{"test": f"t.py::a[{n}]", "used": [], "cpu": 0.4, "process": False} for n in range(3)]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    costs = durations.compute_costs(durations.read_measurement([file]))
    assert choose_integration(costs, {}) == {"t.py::a": "time"}


def test_a_listed_function_stays_until_it_is_clearly_cheaper() -> None:
    for cpu, listed, expected in (
        (0.9, {}, {}),
        (0.9, {"a": "time"}, {"a": "time"}),
        (0.6, {"a": "time"}, {}),
        (0.9, {"a": "process"}, {}),
        (1.1, {}, {"a": "time"}),
    ):
        assert choose_integration({"a": Cost(cpu=cpu)}, listed) == expected


def test_a_function_that_did_not_run_stays_in_the_list_if_it_exists() -> None:
    here = "tests/test_durations.py::test_the_list_is_read_as_it_was_written"
    listed = {here: "process", "tests/test_durations.py::test_gone": "time"}
    assert choose_integration({}, listed) == {here: "process"}


def test_the_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    chosen = {"t.py::b": "process", "t.py::C::a": "time"}
    file = tmp_path / "list.txt"
    file.write_text(format_list(chosen))
    assert read_list(file) == chosen
    assert file.read_text().splitlines()[-1] == "process  t.py::b"


def test_each_listed_function_exists() -> None:
    assert [function for function in read_list() if not durations.exists(function)] == []
