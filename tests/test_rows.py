"""Tables of cases: every row runs, and is reported by the ID that `parametrize` would give it."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.rows import rows

ROOT = Path(__file__).resolve().parents[1]

Kind = Enum("Kind", "SMALL")


class Recorder:
    """Replaces the fixture `subtests`. results: an exception or None by the row's ID."""

    def __init__(self) -> None:
        self.results: dict[str, BaseException | None] = {}

    @contextmanager
    def test(self, msg: str) -> Iterator[None]:
        self.results[msg] = None
        try:
            yield
        except (Exception, pytest.skip.Exception) as error:
            self.results[msg] = error


def run(test: Any, *arguments: Any, **fixtures: Any) -> dict[str, BaseException | None]:
    recorder = Recorder()
    test(*arguments, subtests=recorder, **fixtures)
    return recorder.results


def test_a_failing_or_skipping_row_does_not_affect_others():
    @rows("number", [1, 2, 3, 4])
    def check(number: int) -> None:
        if number == 3:
            pytest.skip("three")
        assert number != 2

    results = run(check)
    assert list(results) == ["1", "2", "3", "4"]
    assert isinstance(results["2"], AssertionError)
    assert isinstance(results["3"], pytest.skip.Exception)
    assert results["1"] is results["4"] is None


def test_rows_of_several_tables_are_multiplied_in_the_order_of_pytest():
    seen: list[tuple[int, str, bool]] = []

    @rows("last", [False, True])
    @pytest.mark.skipif(False, reason="")
    @rows(("number", "name"), [(1, "a"), (2, "b")])
    def check(number: int, name: str, last: bool) -> None:
        seen.append((number, name, last))

    marks: Any = check
    assert [mark.name for mark in marks.pytestmark] == ["skipif"]
    assert list(run(check)) == ["1-a-False", "1-a-True", "2-b-False", "2-b-True"]
    assert seen == [(1, "a", False), (1, "a", True), (2, "b", False), (2, "b", True)]


def test_a_table_can_be_used_by_several_tests():
    numbers = rows("number", iter([1, 2]))

    @numbers
    def one(number: int) -> None: ...

    @numbers
    def other(number: int) -> None: ...

    assert list(run(one)) == list(run(other)) == ["1", "2"]


def test_ids_can_be_endless():
    @rows("value", [[], []], ids=itertools.count())
    def check(value: list[int]) -> None: ...

    assert list(run(check)) == ["0", "1"]


def test_each_row_is_in_one_part():
    @rows("letter", "ab", parts=2)
    @rows("number", [1, 2])
    def check(number: int, letter: str) -> None: ...

    marks: Any = check
    assert [mark.args for mark in marks.pytestmark] == [("rows_part", range(2))]
    assert [list(run(check, rows_part=part)) for part in range(2)] == [
        ["1-a", "2-a"],
        ["1-b", "2-b"],
    ]


def test_a_table_without_rows_fails():
    @rows("number", [])
    def check(number: int) -> None: ...

    with pytest.raises(AssertionError, match="no rows"):
        run(check)


@pytest.mark.parametrize(
    ("names", "values", "ids", "message"),
    [
        ("number", [1, 1], None, "several rows have the ID 1"),
        ("number", [1, 2], ["one"], "1 IDs for 2 rows"),
        ("number", [1], ["one", "two"], "2 IDs for 1 rows"),
        ("number, name", [(1, "a"), (2,)], None, "row 1 has 1 values"),
        ("number", [pytest.param(1, marks=pytest.mark.skip)], None, "cannot have marks"),
        ("wrong", [1], None, "no parameter 'wrong'"),
    ],
)
def test_an_invalid_table_is_an_error(names: str, values: list[Any], ids: Any, message: str):
    with pytest.raises(AssertionError, match=message):

        @rows(names, values, ids=ids)
        def check(number: int, name: str = "") -> None: ...


# names, values and sometimes ids
TABLES: list[tuple[Any, ...]] = [
    ("value", ["a", b"b", None, 1, 0.5, True, Kind.SMALL, re.compile("c"), int, [], ()]),
    ("value", ["é\n", "\ud800", b"\xff", "x" * 100, "x" * 101]),
    ("value, other", [(1, []), (2, {})]),
    (("value", "other"), [(1, "b"), (2, "c")], ["first", None]),
    ("value", [[1], [2]], {"first": 1, "second": 2}),
    ("value", [[1], (2,), "3"], lambda value: str(value) if isinstance(value, list) else None),
    ("value", [pytest.param([1], id="first"), pytest.param("second"), "third"]),
]

# Fixtures, methods, a failing and a skipping row, rows in parametrized items, and all TABLES twice.
TESTS = """
import pytest
from tests.rows import rows
from tests.test_rows import TABLES

@pytest.fixture
def limit() -> int:
    return 3

class TestNumbers:
    @pytest.mark.parametrize("outer", ["a", "b"])
    @rows("number", [1, 2, 3, 4])
    def test_number(self, outer: str, number: int, limit: int) -> None:
        if number == 2:
            pytest.skip("two")
        assert number < limit

for place, (names, values, *rest) in enumerate(TABLES):
    for kind, make in {"rows": rows, "items": pytest.mark.parametrize}.items():
        if "other" in names:
            def check(value, other): pass
        else:
            def check(value): pass
        ids = rest[0] if rest else None
        globals()[f"test_{kind}_of_table_{place}"] = make(names, values, ids=ids)(check)
"""


def test_pytest_injects_fixtures_and_reports_rows_with_the_ids_of_items(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.toml").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
    done = subprocess.run(
        # this plugin takes the ID from the lines
        [*command, "-p", "no:schemathesis", tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for outer in "ab":
        start = f"test_it.py::TestNumbers::test_number[{outer}]"
        for row, outcome in zip("1234", ["PASSED", "SKIPPED", "FAILED", "FAILED"], strict=True):
            assert any(f"{start} SUB{outcome}[{row}]" in line for line in lines)
            assert outcome != "FAILED" or f"E       in row {row}" in lines
    # the place of a failure is the test, not the decorator
    assert any(line.endswith("test_it.py:16: AssertionError") for line in lines)
    assert "rows.py:" not in done.stdout
    for place, table in enumerate(TABLES):
        of_rows = re.findall(rf"::test_rows_of_table_{place} SUBPASSED\[(.*?)\] +\[", done.stdout)
        of_items = re.findall(rf"::test_items_of_table_{place}\[(.*?)\] PASSED", done.stdout)
        assert of_rows == of_items
        assert len(of_rows) == len(table[1])
