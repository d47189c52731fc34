"""What CI runs, and what `make test-all` runs, in parts: `python -m tests.run_parts ci|all`.

Knows: the make targets, the results of pytest, and which results fail CI. Must not know: what the
tests test. It needs only the standard library, because it runs before anything is installed.

Some parts run at the same time. A part that runs pytest fails if a test fails in it and again in
each of the part's repetitions, where it runs alone. A test that fails and then passes is flaky: the
table at the end lists it, its outputs are printed, and build/flaky.json keeps it. A test that
compares clocks is void if other programs used the machine (tests/conftest.py), which is not a
failure.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
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


# Lanes, which run at the same time. The parts of a lane run one after another.
Stage = Sequence[Sequence[Part]]


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


@dataclass(frozen=True)
class Ended:
    """A command that has ended. status: its exit status; None if it was terminated after its limit.
    cpu_seconds: of its process and of all that they have started and waited for."""

    status: int | None
    cpu_seconds: float = 0.0


class Run(Protocol):
    """Runs a command in the root of the repository, for at most `seconds`. log: the file for its
    output; None for this process's own."""

    def __call__(self, command: Sequence[str], seconds: float, log: Path | None) -> Ended: ...


def run_command(command: Sequence[str], seconds: float, log: Path | None = None) -> Ended:
    with ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        has_ended, is_late = threading.Event(), threading.Event()

        def limit() -> None:
            for number, limit_seconds in (
                (signal.SIGTERM, seconds),
                (signal.SIGKILL, GRACE_SECONDS),
            ):
                if has_ended.wait(limit_seconds):
                    return
                is_late.set()
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)

        thread = threading.Thread(target=limit, daemon=True)
        thread.start()
        # Popen's own methods do not return the CPU time
        _, status, used = os.wait4(process.pid, 0)
        has_ended.set()
        thread.join()
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(None if is_late.is_set() else process.returncode, used.ru_utime + used.ru_stime)


def run_part(
    part: Part,
    seconds: float,
    run: Run,
    clock: Callable[[], float] = time.monotonic,
    log: Path | None = None,
) -> PartResult:
    """Runs a part once. seconds: a limit. A part that exceeds it fails. log: the file for its
    output."""
    start = clock()
    result = PartResult(part.name)
    command = list(part.command)
    file = FOLDER / f"{part.name}.json".replace(" ", "-")
    if part.num_repetitions is not None:
        file.unlink(missing_ok=True)
        command.append(f"RESULTS={file}")
    ended = run(command, seconds, log)
    result.seconds, result.cpu_seconds = clock() - start, ended.cpu_seconds
    if ended.status is None:
        result.notes.append(f"ended after its limit of {seconds / 60:.0f} minutes")
    found = Results() if part.num_repetitions is None else read_results(file)
    if found is None:
        result.notes.append(f"no results, exit status {ended.status}")
    else:
        result.passed, result.skipped = found.passed, found.skipped
        result.void, result.figures = dict(found.void), dict(found.figures)
        result.failed = {test: [output] for test, output in found.failures.items()}
    # a collection or a worker that failed has a status without a failed test
    if found is None or ended.status is None or (ended.status != 0 and not found.failures):
        result.outcome = "FAILED"
    return result


def repeat_failed(
    part: Part, result: PartResult, run: Run, clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs each failed test of a part alone until it does not fail, and updates the result."""
    start, num_repetitions = clock(), part.num_repetitions or 0
    if len(result.failed) > MAX_REPEATED:
        result.notes.append(f"{len(result.failed)} tests failed, too many to repeat them alone")
        num_repetitions = 0
    file = FOLDER / "alone.json"
    for test, outputs in list(result.failed.items()):
        for _ in range(num_repetitions):
            file.unlink(missing_ok=True)
            # whatever its markers are
            command = [part.python, "-m", "pytest", "-m", "", "-q", f"--results={file}", test]
            status = run(command, ALONE_SECONDS, None).status
            again = read_results(file)
            if status == 0 and again is not None:
                del result.failed[test]
                if again.void:
                    result.void |= again.void
                else:
                    result.flaky[test] = [*outputs, "alone: passed"]
                break
            outputs.append(_describe_failure(status, again))
    if result.failed:
        result.outcome = "FAILED"
    result.seconds += clock() - start


def _describe_failure(status: int | None, results: Results | None) -> str:
    if results is None or not results.failures:
        return f"alone: no result, exit status {status}"
    return "\n".join(results.failures.values())


def run_stages(
    stages: Sequence[Stage],
    seconds: float,
    run: Run = run_command,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartResult]:
    """Runs the stages in order within `seconds`. A part that has no time left to begin is listed
    and fails the run: nothing is skipped silently. Failed tests are repeated when all lanes of the
    stage have ended, because they run alone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    end = clock() + seconds

    def run_lane(number: int, lane: Sequence[Part]) -> list[PartResult]:
        results: list[PartResult] = []
        for part in lane:
            remaining = end - clock()
            if remaining <= 0:
                results.append(PartResult(part.name, "NOT RUN"))
                continue
            title = f"\n=== {part.name}: {' '.join(part.command)}"
            if number == 0:
                print(title, flush=True)
                results.append(run_part(part, remaining, run, clock))
                continue
            # the output of two lanes would be mixed
            log = FOLDER / f"lane-{number}.log"
            log.write_bytes(b"")
            results.append(run_part(part, remaining, run, clock, log))
            print(f"{title}\n{log.read_text('utf-8', 'replace')}", flush=True)
        return results

    results: list[PartResult] = []
    for stage in stages:
        with ThreadPoolExecutor(len(stage)) as pool:
            of_lanes = list(pool.map(run_lane, range(len(stage)), stage))
        for lane, of_lane in zip(stage, of_lanes, strict=True):
            for part, result in zip(lane, of_lane, strict=True):
                repeat_failed(part, result, run, clock)
                results.append(result)
    return results


def format_report(results: Sequence[PartResult], seconds: float) -> str:
    """The outputs of flaky and failed tests, the figures of those that compare clocks, and a table
    with a row for each part. The last line counts all tests. seconds: of the whole run."""
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
    cpu_seconds = sum(result.cpu_seconds for result in results)
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


def list_ci_stages(interpreters: Sequence[Interpreter]) -> list[Stage]:
    """Blocking parts first. Those that report, and wait for other programs half of the time, run
    beside the longest one. Those that compare clocks run last, with no other."""
    oldest, *others = interpreters
    beside: list[Part] = []
    for newest in others[-1:]:
        name = f"Python {newest.version}"
        variables = ("SOURCES=1", f"t={NEWEST}", "ARGS=-n auto")
        beside.append(newest.build_tests_part(name, "test", 1, *variables))
    beside += [
        oldest.build_tests_part("coding agents", "clients", 2, "ARGS=--tier=programs -n auto"),
        oldest.build_tests_part(
            "blocks of the manual", "test", 2, "t=tests/manual", "ARGS=-n auto"
        ),
    ]
    return [
        [[Part("installation", oldest.make("environments", "--jobs=3", "--output-sync"))]],
        # its checks run at the same time
        [[Part("make check", oldest.make("check", "--jobs=2", "--output-sync"))]],
        [
            [
                oldest.build_tests_part(
                    "make test",
                    "test",
                    1,
                    f"ARGS=--skip-unchanged {CHECKED} --costs={COSTS.relative_to(ROOT)}",
                )
            ]
        ],
        [
            [
                oldest.build_tests_part(
                    "make integration", "integration", 1, f"ARGS=--skip-unchanged {CHECKED}"
                )
            ],
            beside,
        ],
        [[oldest.build_tests_part("timing", "timing", 2)]],
    ]


def list_nightly_stages(interpreters: Sequence[Interpreter]) -> list[Stage]:
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
    return [[[part]] for part in parts]


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
    stages = list_ci_stages(interpreters)
    if options.parts == "all":
        stages += list_nightly_stages(interpreters)
    minutes = options.minutes or (85 if options.parts == "ci" else 600)
    # make's own variables of a `make test-all` around this
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        os.environ.pop(name, None)
    # files of an earlier run, which may have had more workers
    shutil.rmtree(COSTS, ignore_errors=True)
    start = time.monotonic()
    results = run_stages(stages, 60 * minutes)
    for function in find_unlisted(COSTS, read_list()):
        results[0].notes.append(f"make test-durations would add {function}")
    tested = [interpreter.version for interpreter in interpreters]
    versions = _read_output(".ci/interpreters", "--versions").split()
    missing = [version for version in versions if version not in tested]
    if missing:
        results[0].notes.append(f"not run, because there is no such Python: {' '.join(missing)}")
    record_flaky(results)
    print(format_report(results, time.monotonic() - start), flush=True)
    return int(any(result.outcome != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
