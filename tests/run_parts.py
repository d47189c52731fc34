"""What CI runs, and what `make test-all` runs, in parts: `python -m tests.run_parts ci|all`.

Knows: the make targets, the results of pytest, and which results fail CI. Must not know: what the
tests test. It needs only the standard library, because it runs before anything is installed.

A part that runs pytest fails if a test fails in it and again in each of the part's repetitions,
where it runs alone. A test that fails and then passes is flaky: the table at the end lists it, its
outputs are printed, and build/flaky.json keeps it. A test that compares clocks is void if other
programs used the machine (tests/conftest.py), which is not a failure.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.durations import find_unlisted, read_list
from tests.results import Results, read_results

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/parts"
FLAKY_FILE = ROOT / "build/flaky.json"

COSTS = ROOT / "build/costs"

# How many runs build/flaky.json keeps.
MAX_RUNS = 50

# More failures than this have a cause that repeating them alone would not show.
MAX_REPEATED = 20

# Seconds after which a test that is repeated alone has failed.
ALONE_SECONDS = 600.0

# Seconds that a command has to end after SIGTERM.
GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Part:
    """command: without a shell. It runs pytest if `num_repetitions` is not None. num_repetitions:
    how often a failed test runs again, alone, before it counts as failed. python: runs it again.
    """

    name: str
    command: Sequence[str]
    num_repetitions: int | None = None
    python: str = ".venv/bin/python"


@dataclass
class PartResult:
    """outcome: "passed", "FAILED" or "NOT RUN". failed, flaky: the outputs of each test, by its
    ID. void: the reasons. figures: the output of tests that compare clocks. notes: lines for the
    reader. cpu_seconds: of all processes of the part."""

    name: str
    outcome: str = "passed"
    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    failed: dict[str, list[str]] = field(default_factory=dict)
    flaky: dict[str, list[str]] = field(default_factory=dict)
    void: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_tests(self) -> int:
        return self.passed + len(self.failed) + len(self.flaky)


class Run(Protocol):
    """Runs a command in the root of the repository. Returns its exit status, or None if it was
    terminated after `seconds`."""

    def __call__(self, command: Sequence[str], seconds: float) -> int | None: ...


def run_command(command: Sequence[str], seconds: float) -> int | None:
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def run_part(
    part: Part, seconds: float, run: Run, clock: Callable[[], float] = time.monotonic
) -> PartResult:
    """seconds: a limit. A part that exceeds it fails."""
    start, cpu_start = clock(), _read_cpu_seconds()
    result = PartResult(part.name)
    print(f"\n=== {part.name}: {' '.join(part.command)}", flush=True)
    if part.num_repetitions is None:
        status = run(part.command, seconds)
        result.outcome = "passed" if status == 0 else "FAILED"
    else:
        status = _run_tests(part, part.num_repetitions, seconds, run, result)
    if status is None:
        result.notes.append(f"ended after its limit of {seconds / 60:.0f} minutes")
    result.seconds, result.cpu_seconds = clock() - start, _read_cpu_seconds() - cpu_start
    return result


def _read_cpu_seconds() -> float:
    """Of all processes that this one, or one of them, has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run_tests(
    part: Part, num_repetitions: int, seconds: float, run: Run, result: PartResult
) -> int | None:
    file = FOLDER / "results.json"
    file.unlink(missing_ok=True)
    status = run([*part.command, f"RESULTS={file}"], seconds)
    results = read_results(file)
    if results is None:
        result.outcome = "FAILED"
        result.notes.append(f"no results, exit status {status}")
        return status
    result.passed, result.skipped = results.passed, results.skipped
    result.void, result.figures = dict(results.void), dict(results.figures)
    if len(results.failures) > MAX_REPEATED:
        result.notes.append(f"{len(results.failures)} tests failed, too many to repeat them alone")
        num_repetitions = 0
    for test, output in results.failures.items():
        _repeat(part, test, output, num_repetitions, run, result)
    # a collection or a worker that failed has a status without a failed test
    if result.failed or status is None or (status != 0 and not results.failures):
        result.outcome = "FAILED"
    return status


def _repeat(
    part: Part, test: str, output: str, num_repetitions: int, run: Run, result: PartResult
) -> None:
    """Runs a failed test alone until it does not fail, and adds it to the result."""
    outputs = [output]
    file = FOLDER / "alone.json"
    for _ in range(num_repetitions):
        file.unlink(missing_ok=True)
        # whatever its markers are
        command = [part.python, "-m", "pytest", "-m", "", "-q", f"--results={file}", test]
        status = run(command, ALONE_SECONDS)
        again = read_results(file)
        if status == 0 and again is not None:
            if again.void:
                result.void |= again.void
            else:
                result.flaky[test] = [*outputs, "alone: passed"]
            return
        outputs.append(_describe_failure(status, again))
    result.failed[test] = outputs


def _describe_failure(status: int | None, results: Results | None) -> str:
    if results is None or not results.failures:
        return f"alone: no result, exit status {status}"
    return "\n".join(results.failures.values())


def run_parts(
    parts: Sequence[Part],
    seconds: float,
    run: Run = run_command,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartResult]:
    """Runs `parts` in order within `seconds`. A part that has no time left to begin is listed and
    fails the run: nothing is skipped silently."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    end = clock() + seconds
    results: list[PartResult] = []
    for part in parts:
        remaining = end - clock()
        if remaining > 0:
            results.append(run_part(part, remaining, run, clock))
        else:
            results.append(PartResult(part.name, "NOT RUN"))
    return results


def format_report(results: Sequence[PartResult]) -> str:
    """The outputs of flaky and failed tests, the figures of those that compare clocks, and a table
    with a row for each part. The last line counts all tests."""
    lines: list[str] = []
    for result in results:
        for test, figures in result.figures.items():
            lines += [f"figures: {test}", *(f"    {line}" for line in figures.splitlines())]
    for title in ("flaky", "failed"):
        for result in results:
            tests: Mapping[str, list[str]] = getattr(result, title)
            for test, outputs in tests.items():
                lines += [f"\n{title}: {test} ({result.name})", *outputs]
    lines += [
        "",
        f"{'part':<28} {'outcome':<8} {'tests':>6} {'seconds':>8} {'CPU':>6} {'flaky':>6} "
        f"{'void':>5}",
    ]
    lines += [
        f"{result.name:<28} {result.outcome:<8} {result.num_tests:>6} {result.seconds:>8.0f} "
        f"{result.cpu_seconds:>6.0f} {len(result.flaky):>6} {len(result.void):>5}"
        for result in results
    ]
    seconds, cpu_seconds = (
        sum(getattr(result, name) for result in results) for name in ("seconds", "cpu_seconds")
    )
    num_tests = sum(result.num_tests for result in results)
    lines.append(f"{'all':<28} {'':<8} {num_tests:>6} {seconds:>8.0f} {cpu_seconds:>6.0f}")
    for result in results:
        lines += [f"void: {test}: {reason}" for test, reason in result.void.items()]
        lines += [
            f"{title}: {test}" for title in ("flaky", "failed") for test in getattr(result, title)
        ]
        lines += [f"{result.name}: {note}" for note in result.notes]
    # one that failed and then passed has passed
    passed = sum(result.passed + len(result.flaky) for result in results)
    failed = sum(len(result.failed) for result in results)
    skipped = sum(result.skipped + len(result.void) for result in results)
    lines.append(f"{passed} passed, {failed} failed, {skipped} skipped")
    return "\n".join(lines)


def record_flaky(results: Sequence[PartResult], file: Path = FLAKY_FILE) -> None:
    """Adds this run to the list of the last runs and their flaky tests."""
    runs: list[dict[str, object]] = json.loads(file.read_text("utf-8")) if file.exists() else []
    flaky = {test: outputs for result in results for test, outputs in result.flaky.items()}
    runs.append({"time": time.strftime("%Y-%m-%d %H:%M"), "flaky": flaky})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(runs[-MAX_RUNS:], indent=1))


@dataclass(frozen=True)
class Interpreter:
    """version: such as "3.11". environment: the folder of its virtual environment."""

    version: str
    path: str
    environment: str

    def make(self, target: str, *arguments: str) -> list[str]:
        return ["make", target, f"PYTHON={self.path}", f"VENV={self.environment}", *arguments]

    def build_tests_part(
        self, name: str, target: str, num_repetitions: int, *variables: str
    ) -> Part:
        python = f"{self.environment}/bin/python"
        return Part(name, self.make(target, *variables), num_repetitions, python)


def find_interpreters() -> list[Interpreter]:
    """The Pythons of .ci/interpreters, oldest first. .venv is not rebuilt for a different version
    than it has."""
    lines = _read_output(".ci/interpreters").splitlines()
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    existing = _read_output(".venv/bin/python", "-c", code).strip()
    pairs = [line.split(" ", 1) for line in lines]
    kept = existing or (pairs[0][0] if pairs else "")
    return [
        Interpreter(version, path, ".venv" if version == kept else f".venv-{version}")
        for version, path in pairs
    ]


def _read_output(*command: str) -> str:
    try:
        process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        return ""
    return process.stdout


# The tests that also run with the newest Python: every import, a server, and the modules that
# depend most on the standard library. They run from the sources, because they need no kernels,
# whose compilation takes longer than the tests.
NEWEST = "tests/test_imports.py tests/test_interpreter.py tests/core tests/config"

# `make check` runs these.
CHECKED = " ".join(
    f"--ignore=tests/{name}" for name in ("test_layers.py", "test_docs.py", "test_manual.py")
)


def list_ci_parts(interpreters: Sequence[Interpreter]) -> list[Part]:
    """Blocking parts first, then those that report, then those that compare clocks."""
    oldest, *others = interpreters
    parts = [
        # its checks run at the same time
        Part("make check", oldest.make("check", "--jobs=2", "--output-sync")),
        oldest.build_tests_part(
            "make test",
            "test",
            1,
            f"ARGS=--skip-unchanged {CHECKED} --costs={COSTS.relative_to(ROOT)}",
        ),
        oldest.build_tests_part(
            "make integration", "integration", 1, f"ARGS=--skip-unchanged {CHECKED}"
        ),
    ]
    for newest in others[-1:]:
        name = f"Python {newest.version}"
        variables = ("SOURCES=1", f"t={NEWEST}", "ARGS=-n auto")
        parts.append(newest.build_tests_part(name, "test", 1, *variables))
    parts += [
        oldest.build_tests_part("coding agents", "clients", 2, "ARGS=--tier=programs -n auto"),
        oldest.build_tests_part(
            "blocks of the manual", "test", 2, "t=tests/manual", "ARGS=-n auto"
        ),
        oldest.build_tests_part("timing", "timing", 2),
    ]
    return parts


def list_nightly_parts(interpreters: Sequence[Interpreter]) -> list[Part]:
    """The tests that `make test-all` runs in addition."""
    oldest, *others = interpreters
    workers = "-n auto --maxprocesses 4 --dist worksteal"
    parts = [
        oldest.build_tests_part(
            "coverage",
            "test",
            1,
            "t=tests",
            f"ARGS=--tier=blocking {workers} --cov --cov-report=term",
        )
    ]
    for name, tests in (
        ("text and grammar", "tests/text tests/grammar"),
        ("models", "tests/models"),
        ("engine", "tests/engine"),
        (
            "the rest",
            "tests --ignore=tests/text --ignore=tests/grammar --ignore=tests/models "
            "--ignore=tests/engine",
        ),
    ):
        arguments = f"ARGS=--tier=exhaustive {workers}"
        parts.append(
            oldest.build_tests_part(f"exhaustive: {name}", "test", 1, f"t={tests}", arguments)
        )
    parts += [
        other.build_tests_part(
            f"all of Python {other.version}",
            "test",
            1,
            "t=tests",
            f"ARGS=--tier=blocking {workers}",
        )
        for other in others
    ]
    parts += [
        Part("make wheel", oldest.make("wheel")),
        Part("make parity", oldest.make("parity")),
        Part("chaos", [f"{oldest.environment}/bin/python", "-m", "tests.chaos", "--minutes", "5"]),
    ]
    return parts


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_parts", description=__doc__)
    parser.add_argument("parts", choices=("ci", "all"))
    parser.add_argument("--minutes", type=float, default=0, help="limit of all parts")
    options = parser.parse_args(arguments)
    interpreters = find_interpreters()
    if not interpreters:
        versions = _read_output(".ci/interpreters", "--versions").strip()
        print(f"none of Python {versions} runs here, or none can make environments")
        return 1
    parts = list_ci_parts(interpreters)
    if options.parts == "all":
        parts += list_nightly_parts(interpreters)
    minutes = options.minutes or (85 if options.parts == "ci" else 600)
    # make's own variables of a `make test-all` around this
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        os.environ.pop(name, None)
    # files of an earlier run, which may have had more workers
    shutil.rmtree(COSTS, ignore_errors=True)
    results = run_parts(parts, 60 * minutes)
    for function in find_unlisted(COSTS, read_list()):
        results[0].notes.append(f"make test-durations would add {function}")
    tested = [interpreter.version for interpreter in interpreters]
    versions = _read_output(".ci/interpreters", "--versions").split()
    missing = [version for version in versions if version not in tested]
    if missing:
        results[0].notes.append(f"not run, because there is no such Python: {' '.join(missing)}")
    record_flaky(results)
    print(format_report(results), flush=True)
    return int(any(result.outcome != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
