"""A short chaos run: `python -m tests.chaos` does the same for ten minutes.

The first tests show that the checks detect violations.
"""

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.checks import MAX_RSS_GROWTH, ChaosReport, find_violations
from tests.chaos.load import Outcome
from tests.chaos.processes import ProcessResources
from tests.chaos.questions import ChaosQuestion, compute_answers, make_questions, write_models
from tests.chaos.run import run_chaos

pytestmark = pytest.mark.exhaustive

ANNA, BERT = ChaosQuestion("anna", "hello", None), ChaosQuestion("bert", "hello", None)
EXPECTED = {ANNA: "from anna", BERT: "from bert"}
ANSWER = Outcome(question=ANNA, streamed=True, text="from anna")
ERROR = Outcome(
    question=ANNA,
    streamed=True,
    status=500,
    code="engine_error",
    message="the engine stopped: its process was killed by SIGKILL",
)
RESOURCES = ProcessResources(rss=1 << 26, descriptors=("pipe", "socket"), threads=4)
GOOD = ChaosReport(
    outcomes=(ANSWER, ERROR, Outcome(question=ANNA, streamed=True, disconnected=True)),
    afterwards=(ANSWER,),
    before=RESOURCES,
    after=RESOURCES,
    orphan_pids=(),
    exit_status=-signal.SIGTERM,
    faults=Counter(kill=1),
    log="",
)

# changes of a report, and the violation that the checks must find
VIOLATIONS = {
    "a wrong answer": ({"outcomes": [replace(ANSWER, text="nonsense")]}, "expected 'from anna'"),
    "another model's answer": (
        {"outcomes": [replace(ANSWER, text="from bert")]},
        "got the answer of bert",
    ),
    "half an answer": ({"outcomes": [replace(ANSWER, text="from a")]}, "expected 'from anna'"),
    "a stream that broke off": (
        {"outcomes": [ANSWER, replace(ANSWER, text=None, failure="silence")]},
        "ended in silence",
    ),
    "an error without a cause": (
        {"outcomes": [ANSWER, replace(ERROR, message="internal error")]},
        "with no cause",
    ),
    "an error of another kind": (
        {"outcomes": [ANSWER, replace(ERROR, code="internal_error")]},
        "which no fault explains",
    ),
    "no answers": ({"outcomes": [ERROR]}, "no request was answered"),
    "no answer afterwards": ({"afterwards": [ERROR]}, "after the faults had ended"),
    "an orphan": ({"orphan_pids": [7]}, "outlived the server: [7]"),
    "a socket left": (
        {"after": replace(RESOURCES, descriptors=("pipe", "socket", "socket"))},
        "left open: {'socket': 1}",
    ),
    "memory that grew": (
        {"after": replace(RESOURCES, rss=RESOURCES.rss + MAX_RSS_GROWTH + 1)},
        "grew",
    ),
    "threads that grew": ({"after": replace(RESOURCES, threads=99)}, "threads grew"),
    "a bad end": ({"exit_status": 1}, "status 1"),
    "a traceback": ({"log": "x\nTraceback (most recent call last)"}, "a traceback"),
}


def test_a_good_run_has_no_violations() -> None:
    assert find_violations(GOOD, EXPECTED) == []


@pytest.mark.parametrize(("change", "expected"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_the_checks_find_each_violation(change: dict[str, object], expected: str) -> None:
    [violation] = find_violations(replace(GOOD, **change), EXPECTED)
    assert expected in violation


def test_five_models_and_sixteen_clients_with_faults(tmp_path: Path) -> None:
    questions = make_questions(3, seed=6)
    write_models(tmp_path)
    expected = compute_answers(tmp_path, questions)
    assert len(set(expected.values())) == len(questions), "equal answers would hide a wrong one"
    report = run_chaos(tmp_path, questions, seconds=6, clients=16, pause=(0.2, 0.8), seed=6)
    assert find_violations(report, expected) == [], report.counts()
    assert report.faults.total() > 3
