"""pytest plugins that write files: the cost of each test (`--costs`), and the results
(`--results`).

Knows: pytest's hooks, CPU times, audit events. Must not know: which tests run where, and the
meaning of a failure for CI (tests/durations.py, tests/run_parts.py).
"""

import json
import resource
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.durations import Cost
from tests.results import VOID, Results

_PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
)


class CostPlugin:
    """Measures the tests of one process, and writes a line of JSON for each to a file.

    The CPU time of child processes is not measured: a test that starts one is in the list anyway,
    and those that a fixture of a module has started end in the last test of the module."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")
        self._num_processes = 0
        # what wider fixtures of the current test have cost
        self._apart = Cost()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _PROCESS_EVENTS:
            self._num_processes += 1

    def _read(self) -> tuple[float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, self._num_processes

    def _compute_cost(self, start: tuple[float, int]) -> Cost:
        cpu, num_processes = self._read()
        return Cost(cpu - start[0], num_processes > start[1])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, start = self._apart, self._read()
        self._apart = Cost()
        try:
            return (yield)
        finally:
            # fixtures that this one requested are measured on their own
            total, inner = self._compute_cost(start), self._apart
            own = Cost(total.cpu - inner.cpu, total.process)
            self._write({"fixture": _name_fixture(fixturedef), **asdict(own)})
            self._apart = Cost(before.cpu + total.cpu)
            self._num_processes = start[1]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        start = self._read()
        self._apart = Cost()
        try:
            return (yield)
        finally:
            cost = self._compute_cost(start)
            info: Any = getattr(item, "_fixtureinfo", None)
            definitions = () if info is None else info.name2fixturedefs.values()
            used = [
                _name_fixture(definition)
                for several in definitions
                for definition in several
                if definition.scope != "function"
            ]
            own = Cost(cost.cpu - self._apart.cpu, cost.process)
            self._write({"test": item.nodeid, "used": used, **asdict(own)})

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _name_fixture(definition: pytest.FixtureDef[Any]) -> str:
    return f"{definition.baseid}::{definition.argname}"


class ResultsPlugin:
    """Registered in the process that gets all reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results = Results()
        self._passed: set[str] = set()
        self._start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        results = self._results
        if report.failed:
            text = "\n".join(_format_report(report))
            known = results.failures.get(report.nodeid)
            results.failures[report.nodeid] = text if known is None else f"{known}\n{text}"
        elif isinstance(report, pytest.SubtestReport):
            return  # a test counts once, however many subtests it has
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            _, is_void, text = reason.partition(VOID)
            if is_void:
                results.void[report.nodeid] = text
            else:
                results.skipped += 1
        elif report.when == "call":
            self._passed.add(report.nodeid)
            if "timing" in report.keywords and report.capstdout:
                results.figures[report.nodeid] = report.capstdout

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._results.failures[report.nodeid] = report.longreprtext

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        # one whose teardown failed has passed before
        self._results.passed = len(self._passed - self._results.failures.keys())
        self._results.seconds = time.monotonic() - self._start
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(asdict(self._results)))


def _format_report(report: pytest.TestReport) -> Iterable[str]:
    yield f"{report.nodeid} ({report.when})"
    yield report.longreprtext
    for title, content in report.sections:
        yield f"--- {title} ---\n{content}"
