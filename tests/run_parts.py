"""`make test-all`: the suite, the slow tests and the exhaustive cases, in parts that are timed.

`make test` runs some cases of each test that is marked `product` (tests/conftest.py), and no test
that is marked `slow`. The parts here run the slow tests, the other cases, and all tests that are
marked `exhaustive`. A part that does not end within the time limit, or that has no time left to
begin, is listed: nothing is skipped silently.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LIMIT_MINUTES = 75.0

# Minutes that are kept for the suite, which runs last.
SUITE_MINUTES = 15.0

WORKERS = ("-n", "auto", "--maxprocesses", "4")
EXHAUSTIVE = ("-m", "exhaustive and not gpu and not network", "--no-cov", *WORKERS)


@dataclass(frozen=True)
class Part:
    """A run of pytest. arguments: its command line."""

    name: str
    arguments: Sequence[str]


@dataclass(frozen=True)
class PartResult:
    """outcome: "passed", "FAILED", "DID NOT FIT" or "NOT RUN"."""

    name: str
    outcome: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:<11}  {self.seconds / 60:5.1f} minutes  {self.name}"


PARTS = (
    Part("slow tests", ["--slow=only", "--no-cov", *WORKERS]),
    Part("exhaustive: text and grammar", ["tests/text", "tests/grammar", *EXHAUSTIVE]),
    Part("exhaustive: models", ["tests/models", *EXHAUSTIVE]),
    Part("exhaustive: engine", ["tests/engine", *EXHAUSTIVE]),
    Part(
        "exhaustive: all other tests",
        [
            "tests",
            "--ignore=tests/text",
            "--ignore=tests/grammar",
            "--ignore=tests/models",
            "--ignore=tests/engine",
            *EXHAUSTIVE,
        ],
    ),
)
SUITE = Part("the suite", ["--slow=without", *WORKERS, "--cov", "--cov-report=term"])

# pytest's exit status when no test was selected
NO_TESTS = 5


def run_pytest(arguments: Sequence[str], timeout: float) -> int | None:
    """Returns the exit status, or None when `timeout` seconds have passed."""
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def run_parts(
    parts: Sequence[Part],
    seconds: float,
    run: Callable[[Sequence[str], float], int | None] = run_pytest,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartResult]:
    """Runs `parts` in order within `seconds`. A part that does not end in time is terminated, and
    the parts after it do not run; both are among the results."""
    end = clock() + seconds
    results: list[PartResult] = []
    for part in parts:
        start = clock()
        if start >= end:
            results.append(PartResult(part.name, "NOT RUN", 0))
            continue
        status = run(part.arguments, end - start)
        if status is None:
            outcome = "DID NOT FIT"
        else:
            outcome = "passed" if status in (0, NO_TESTS) else "FAILED"
        results.append(PartResult(part.name, outcome, clock() - start))
        print(results[-1], flush=True)
    return results


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-all", description="run all tests in parts")
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="limit of all parts")
    parser.add_argument(
        "--without-suite", action="store_true", help="only slow and exhaustive tests"
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    results = run_parts(PARTS, 60 * (options.minutes - SUITE_MINUTES))
    print("\nmake test-all:", *results, sep="\n", flush=True)
    if not options.without_suite:
        remaining = 60 * options.minutes - (time.monotonic() - start)
        results += run_parts([SUITE], remaining)
    return int(any(result.outcome == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
