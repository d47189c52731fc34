"""Everything at once, for a little while: `python -m tests.chaos` is the same for ten minutes.

First, that the checks would see what they are there to see.
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
FRONT = ProcessResources(rss=1 << 26, descriptors=("pipe", "socket"), threads=4)
WELL = ChaosReport(
    outcomes=(ANSWER, ERROR, Outcome(question=ANNA, streamed=True, disconnected=True)),
    afterwards=(ANSWER,),
    before=FRONT,
    after=FRONT,
    orphan_pids=(),
    exit_status=-signal.SIGTERM,
    faults=Counter(kill=1),
    log="",
)

# what the checks must say of a report that is changed so
WRONG = {
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
    "nobody answered": ({"outcomes": [ERROR]}, "no request was answered"),
    "no answer afterwards": ({"afterwards": [ERROR]}, "after the faults had ended"),
    "an orphan": ({"orphan_pids": [7]}, "outlived the server: [7]"),
    "a socket left": (
        {"after": replace(FRONT, descriptors=("pipe", "socket", "socket"))},
        "left open: {'socket': 1}",
    ),
    "memory that grew": ({"after": replace(FRONT, rss=FRONT.rss + MAX_RSS_GROWTH + 1)}, "grew"),
    "threads that grew": ({"after": replace(FRONT, threads=99)}, "threads grew"),
    "a bad end": ({"exit_status": 1}, "status 1"),
    "a traceback": ({"log": "x\nTraceback (most recent call last)"}, "a traceback"),
}


def test_a_run_in_which_all_is_well_gives_no_cause_for_complaint() -> None:
    assert find_violations(WELL, EXPECTED) == []


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_the_checks_see_what_is_wrong(change: dict[str, object], said: str) -> None:
    [complaint] = find_violations(replace(WELL, **change), EXPECTED)
    assert said in complaint


def test_five_models_sixteen_clients_and_whatever_can_happen(tmp_path: Path) -> None:
    questions = make_questions(3, seed=6)
    write_models(tmp_path)
    expected = compute_answers(tmp_path, questions)
    assert len(set(expected.values())) == len(questions), "else a wrong answer could go unseen"
    report = run_chaos(tmp_path, questions, seconds=6, clients=16, pause=(0.2, 0.8), seed=6)
    assert find_violations(report, expected) == [], report.counts()
    assert report.faults.total() > 3
