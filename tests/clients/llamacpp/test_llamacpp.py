"""llama.cpp's own server tests pass against our server as they are written, except for those in
differences.toml. `make clients` downloads them."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.llamacpp.download import FOLDER, ROOT, STAMP
from tests.clients.llamacpp.shared_names import MODEL, PLUGIN, RESULTS_VARIABLE

DOCUMENT = tomllib.loads((Path(__file__).parent / "differences.toml").read_text("utf-8"))

TIMEOUT = 900


@dataclass(frozen=True)
class Difference:
    """Tests that do not pass. name: see differences.toml. may_pass: whether the result depends on
    the speed of the machine."""

    name: str
    may_pass: bool

    def covers(self, test: str) -> bool:
        if self.name.endswith("*"):
            return test.startswith(self.name[:-1])
        return test == self.name or test.startswith(f"{self.name}[")


DIFFERENCES = [
    Difference(name, group.get("may_pass", False))
    for group in DOCUMENT["differences"]
    for name in group["tests"]
]
NUM_TESTS: Mapping[str, int] = DOCUMENT["files"]


def is_expected(test: str, outcome: str) -> bool:
    known = [one for one in DIFFERENCES if one.covers(test)]
    assert len(known) <= 1, known
    return (outcome == "passed") == (not known) or any(one.may_pass for one in known)


def run_upstream(file: str, results: Path) -> dict[str, tuple[str, str]]:
    """Runs a file of llama.cpp's tests. Returns the outcome and the reason of each test."""
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-W", "ignore"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", PLUGIN, file),
        ],
        cwd=FOLDER / "tools/server/tests",
        env={**os.environ, "PYTHONPATH": str(ROOT), RESULTS_VARIABLE: str(results)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert results.exists(), process.stdout[-4000:]
    lines = map(json.loads, results.read_text("utf-8").splitlines())
    return {line["test"]: (line["outcome"], line["reason"]) for line in lines}


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            marks=pytest.mark.programs if file in DOCUMENT["in_ci"] else pytest.mark.exhaustive,
        )
        for file in NUM_TESTS
    ],
)
def test_llama_cpps_tests_pass_as_written(file: str, tmp_path: Path):
    if not STAMP.exists():
        pytest.skip("needs build/llama.cpp: `make clients` downloads it")
    if not MODEL.exists():
        pytest.skip(f"needs {MODEL}")
    outcomes = run_upstream(file, tmp_path / "results.jsonl")
    wrong = [
        f"{test}: {outcome}: {reason}"
        for test, (outcome, reason) in outcomes.items()
        if not is_expected(test, outcome)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(outcomes) == NUM_TESTS[file]
    listed = [one for one in DIFFERENCES if one.name.startswith(file)]
    assert [one for one in listed if not any(map(one.covers, outcomes))] == []


def test_each_difference_has_a_reason_and_is_listed_once():
    names = [one.name for one in DIFFERENCES]
    assert sorted(set(names)) == sorted(names)
    assert {name.partition("::")[0].removesuffix("*") for name in names} <= NUM_TESTS.keys()
    assert {*DOCUMENT["in_ci"]} <= NUM_TESTS.keys()
    assert all(group["reason"].endswith(".") for group in DOCUMENT["differences"])
